"""Where the ranks of an ``srun`` step meet: rank 0 listens, and says where in a shared folder.

torchrun's agents meet before there are ranks; srun has no such thing, and a port that each rank
works out for itself may be another job's. So rank 0 opens torch's store on a port that the system
leases to it, and then writes address and port into a file, under a name that no other step has.
Names of nodes need not resolve: the file holds an address.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.filesystem import refusing, wait_until_seen

MEETING = ".meet-"
PATIENCE_S = 600.0
"""For rank 0, whose node may be the last to have a container unpacked and torch imported."""


@contextlib.contextmanager
def mustered(folder: Path, *, key: str) -> Iterator[None]:
    """Inside, ``MASTER_ADDR`` and ``MASTER_PORT`` lead to rank 0, whose store listens.

    Nothing is done where both are set, by torchrun or by a user with a meeting point of their own,
    and where srun started nothing.

    Args:
        folder: seen by all ranks; made if need be.
        key: recipe key of the folder, for messages.

    Raises:
        ConfigError: the folder cannot be written, or is not shared.
    """
    env = os.environ
    if {"MASTER_ADDR", "MASTER_PORT"} <= env.keys() or "SLURM_STEP_NUM_TASKS" not in env:
        yield
        return
    # A supervisor calls ``forget`` without these imports.
    from qurl_megatron.kit.place import address_for_others, be_reachable

    one_node = env.get("SLURM_STEP_NUM_NODES") == "1"
    file = folder / f"{MEETING}{_step(env)}.json"
    store = None
    if env["RANK"] == "0":
        address = env.get("MASTER_ADDR") or address_for_others(one_node=one_node)
        store = _listen(address, int(env.get("MASTER_PORT", "0")))
        _tell(file, {"address": address, "port": store.port}, key=key)
    else:
        reason = "rank 0, if it has not failed, writes it once it listens"
        wait_until_seen(file, reason, key=key, seconds=PATIENCE_S)
    _lead_to(json.loads(file.read_text(encoding="utf-8")), env)
    be_reachable(one_node=one_node)
    try:
        yield
    finally:
        if store is not None:
            file.unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Remove the files of ranks that were killed; none must be running."""
    for file in folder.glob(f"{MEETING}*"):
        file.unlink(missing_ok=True)


def _step(env: Mapping[str, str]) -> str:
    """Name of this step alone: ids begin again with a requeued job, and with a
    controller that has lost its state."""
    names = ("JOB_ID", "STEP_ID", "RESTART_COUNT", "STEP_LAUNCHER_PORT")
    return "-".join(env.get(f"SLURM_{name}", "0") for name in names)


def _listen(address: str, port: int):
    """The store of this step; it lasts as long as whoever holds it."""
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=True, wait_for_workers=False)


def _tell(file: Path, where: dict, *, key: str) -> None:
    with refusing(file, key=key):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(where) + "\n")


def _lead_to(where: dict, env: MutableMapping[str, str]) -> None:
    env["MASTER_ADDR"], env["MASTER_PORT"] = where["address"], str(where["port"])
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 has opened it
