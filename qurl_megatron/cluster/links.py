"""All-reduces between neighbouring nodes of a job: one with a bad link is slow with both.

The nodes form a ring. Each times an all-reduce with either neighbour and reports the shorter time:
a neighbour's bad link spoils one of the two, its own link both. Pairs take turns, so that no node
is in two at once. They meet in the attempt's folder, at the store of a pair's first node.
"""

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from qurl_megatron.kit.clock import shortest_ms
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.place import address_for_others
from qurl_megatron.observe.failures import FOLDER

LINK_S = 40.0
"""Time for a pair of the first turn, NCCL's start for each GPU included, before it counts as hung.
A neighbour may come late from such a pair: the second turn has twice as long."""
ABORT_S = 10.0
NUMBERS = {"cuda": 1 << 22, "cpu": 1 << 20}
"""FP32 numbers that each device reduces; few enough for a network of 1 Gbit/s."""
REPEATS = 5
POLL_S = 0.2


def link_ms(devices: list, patience_s: float) -> float | None:
    """Time an all-reduce with either neighbour, by all GPUs at once; without any, on the CPU.

    Returns:
        The shorter time; inf where both fail or hang; None where there are no other nodes, or one
        has not come within ``patience_s``, or stays away.
    """
    own_number, count = step_place()
    if count == 1:
        return None
    from torch import device

    from qurl_megatron.wire.store import host_store

    address = address_for_others(one_node=False)
    store = host_store(address, LINK_S)  # until the last pair is done
    announce({"address": address, "port": store.port, "devices": len(devices)})
    nodes = _all_nodes(count, patience_s)
    if not all(nodes):
        return None
    devices = devices[: min(node["devices"] for node in nodes)] or [device("cpu")]
    return min(_pair_ms(nodes, own_number, *pair, devices) for pair in pairs(own_number, count))


def announce(entry: dict[str, Any]) -> None:
    """Tell the other nodes where this one listens; an empty entry means that it stays away."""
    own_number, count = step_place()
    if count > 1:
        with contextlib.suppress(OSError):  # then they wait in vain
            write_whole(Path(os.environ[FOLDER]) / f"node-{own_number}.json", json.dumps(entry))


def step_place() -> tuple[int, int]:
    """Return this task's number and the number of tasks, one on each node."""
    if FOLDER not in os.environ:  # started by hand
        return 0, 1
    return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])


def pairs(own_number: int, count: int) -> list[tuple[int, int, int]]:
    """Return a node's pairs in the order of their turns: turn, first node, second node.

    The last pair of an odd ring has a turn to itself; two nodes are one pair.
    """
    own_pairs = []
    for first in range(count if count > 2 else 1):
        second = (first + 1) % count
        if own_number in (first, second):
            turn = 2 if count % 2 and second == 0 else first % 2
            own_pairs.append((turn, first, second))
    return sorted(own_pairs)


def _all_nodes(count: int, patience_s: float) -> list[dict[str, Any]]:
    """Return each node's entry; an empty one for a node that has written none in time."""
    folder, end = Path(os.environ[FOLDER]), time.monotonic() + patience_s
    files = [folder / f"node-{number}.json" for number in range(count)]
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(POLL_S)
        os.listdir(folder)  # asks the file server, where lookups are cached
    return [json.loads(file.read_text() if file.exists() else "{}") for file in files]


def _pair_ms(
    nodes: list[dict[str, Any]], own_number: int, turn: int, first: int, second: int, devices: list
) -> float:
    import torch
    from torch.distributed import PrefixStore

    from qurl_megatron.wire.link import open_group, unwatched, within
    from qurl_megatron.wire.store import join_store

    seconds, groups = LINK_S * (turn + 1), []

    def measure() -> float:
        host, other = nodes[first], nodes[second if own_number == first else first]
        store = join_store(host["address"], host["port"], seconds)
        pair_store, rank = PrefixStore(f"pair-{first}", store), int(own_number != first)
        with unwatched():
            group = open_group(pair_store, rank, 2, devices[0], other["address"], seconds)
        groups.append(group)
        parts = [torch.ones(NUMBERS[device.type], device=device) for device in devices]

        def reduce() -> None:
            for work in [group.allreduce([part]) for part in parts]:
                work.wait()
            for device in devices:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)

        return shortest_ms(reduce, REPEATS)

    try:
        return within(seconds, measure, late=lambda: None)
    except (OSError, RuntimeError):
        for group in groups:  # its kernels would block the next pair's
            with contextlib.suppress(RuntimeError):
                within(ABORT_S, group.abort, late=lambda: None)
        return math.inf
