"""The processes that share a job: one alone, or the ranks torchrun or srun started."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from qurl_megatron.kit.muster import mustered
from qurl_megatron.kit.place import place_under_launcher

T = TypeVar("T")

_MEETING, _WORK = timedelta(minutes=5), timedelta(hours=12)


class AnotherFailed(Exception):
    """Raised on all workers but the first that failed; that one says what went wrong."""


@dataclass(frozen=True)
class Workers:
    """This process' place among those that share the job."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T], *, size: Callable[[T], int]) -> list[T]:
        """This worker's items, in order: largest first, each goes to whoever has least."""
        load = [0] * self.size
        indices: set[int] = set()
        for index in sorted(range(len(items)), key=lambda i: (-size(items[i]), i)):
            worker = load.index(min(load))
            load[worker] += size(items[index])
            if worker == self.rank:
                indices.add(index)
        return [items[index] for index in sorted(indices)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A step that ends for all when all have ended; where some fail, all stop here.

        The first of them raises its own error, the others ``AnotherFailed``.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:  # the others must not wait for one that was interrupted
            failure = error
        if self.size > 1:
            failed = [False] * self.size
            dist.all_gather_object(failed, failure is not None, group=self.group)
            if any(failed) and failed.index(True) != self.rank:
                raise AnotherFailed(f"worker {failed.index(True)} failed") from failure
        if failure is not None:
            raise failure


ALONE = Workers()


@contextmanager
def workers(beside: Path) -> Iterator[Workers]:
    """The workers a launcher started, or this process alone.

    Args:
        beside: output of the job, on a file system that all share; started by srun, they meet
            through a file beside it.
    """
    if not place_under_launcher():
        yield ALONE
        return
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # All are on this machine; without it gloo looks the host's name up, which may fail.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with mustered(beside.absolute().parent, key="--out"):
        # All must come within minutes; from then on a worker may be hours behind another.
        dist.init_process_group("gloo", timeout=_MEETING)
        group = dist.new_group(timeout=_WORK)
        yield Workers(dist.get_rank(), dist.get_world_size(), group)
        # Only after success: where this worker failed, tearing down would wait for the others.
        dist.destroy_process_group()
