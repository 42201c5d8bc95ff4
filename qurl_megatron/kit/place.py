"""The place of a rank that torchrun or srun started, and how the others reach it.

The launcher's variables become torch's own in the environment; ``launch`` starts ranks where there
is no launcher.

torchrun's agents meet before there are ranks. Under srun rank 0 opens torch's store on a free port
and writes address and port into a file in a shared folder, under a name that no other step has: a
port that ranks derive from the job's number may be another job's.
"""

import contextlib
import ctypes
import ipaddress
import json
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing, wait_until_seen
from qurl_megatron.kit.network import own_address
from qurl_megatron.kit.undertaker import bury

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MEETING = ".meet-"
PATIENCE_S = 600.0
"""For rank 0, whose node may be the last to have a container unpacked and torch imported."""


def place_under_launcher(world_size: int | None = None) -> bool:
    """Return whether torchrun or srun started this process; torch's own variables are then set.

    After srun it is still open where the ranks meet (``mustered``).

    Args:
        world_size: how many processes the recipe's parallel sizes need; None takes any number.

    Raises:
        ConfigError: the launcher started another number of processes, or could not start them
            again.
    """
    env = os.environ
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        _refuse_shared_store(env)
        _check_count("torchrun", int(env["WORLD_SIZE"]), world_size)
        one_node = env["WORLD_SIZE"] in ("1", env.get("LOCAL_WORLD_SIZE"))
        be_reachable(one_node=one_node or env["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1"))
        return True
    # A batch script or an interactive shell is a step of one task: there the ranks are
    # still to start.
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1:
        return False
    _check_count("srun", tasks, world_size)
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], str(tasks)
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    if "MASTER_ADDR" in env:
        be_reachable(one_node=env.get("SLURM_STEP_NUM_NODES") == "1")
    return True


def ranks_here(env: Mapping[str, str]) -> int:
    """Return the number of ranks on the leading one's machine, by the launcher's variables."""
    if "LOCAL_WORLD_SIZE" in env:
        return int(env["LOCAL_WORLD_SIZE"])
    if "SLURM_STEP_TASKS_PER_NODE" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return int(re.split(r"\D", env["SLURM_STEP_TASKS_PER_NODE"])[0])  # such as 8(x2),4
    return int(env.get("WORLD_SIZE", "1"))


def own_name() -> str:
    """Return Slurm's name of this node, or its own."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def end_with_launcher() -> None:
    """End this rank's children with it, and the rank itself with torchrun.

    srun's own daemon outlives it and ends the ranks; one that was started by hand, with torchrun's
    variables, may well outlive the shell it came from.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Its main thread starts the ranks: the signal comes when that thread ends.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A shell puts a whole pipeline into one group, which may have more than this rank in it.
    placed = os.getsid(0) == os.getpid() or "SLURM_PROCID" in os.environ
    # srun puts its tasks on a node into the first one's group, which may end before the others.
    only_task = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0] == "1"
    if placed and only_task and os.getpgrp() == os.getpid():
        bury(os.getpid())


@contextlib.contextmanager
def mustered(folder: Path, *, key: str) -> Iterator[None]:
    """Inside, ``MASTER_ADDR`` and ``MASTER_PORT`` lead to rank 0, whose store listens.

    Nothing is done where torchrun or the user has set both, and where srun started nothing.

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
    one_node = env.get("SLURM_STEP_NUM_NODES") == "1"
    file = folder / f"{MEETING}{_step(env)}.json"
    store = None
    if env["RANK"] == "0":
        address = env.get("MASTER_ADDR") or address_for_others(one_node=one_node)
        from torch.distributed import TCPStore

        port = int(env.get("MASTER_PORT", "0"))
        store = TCPStore(address, port, is_master=True, wait_for_workers=False)
        with refusing(file, key=key):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps({"address": address, "port": store.port}) + "\n")
    else:
        reason = "rank 0, if it has not failed, writes it once it listens"
        wait_until_seen(file, reason, key=key, seconds=PATIENCE_S)
    meeting = json.loads(file.read_text(encoding="utf-8"))
    env["MASTER_ADDR"], env["MASTER_PORT"] = meeting["address"], str(meeting["port"])
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 has opened it
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
    """Return a unique name of this step: ids repeat in a requeued job, and after a controller has
    lost its state."""
    names = ("JOB_ID", "STEP_ID", "RESTART_COUNT", "STEP_LAUNCHER_PORT")
    return "-".join(env.get(f"SLURM_{name}", "0") for name in names)


def be_reachable(*, one_node: bool) -> None:
    """Have gloo tell the other nodes an address of this one that they can reach.

    It advertises the host name's address, which many /etc/hosts map to 127.0.1.1.

    Raises:
        ConfigError: there are other nodes, and it is not clear which interface leads to them.
    """
    if not one_node and "GLOO_SOCKET_IFNAME" not in os.environ:
        _, interface = _reached_at(os.environ["MASTER_ADDR"])
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface


def address_for_others(*, one_node: bool) -> str:
    """Return an address of this node for engines, and for ranks on other nodes.

    It belongs to the interface that the site names, else to the node's name, else to the interface
    that leads out.

    Raises:
        ConfigError: there are other nodes, and it is not clear which interface leads to them.
    """
    preferred = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for address, interface in _outward().items():
        if interface == preferred:
            return address
    try:
        return _reached_at()[0]
    except ConfigError:
        if one_node:
            return "127.0.0.1"
        raise


def _reached_at(goal: str = "") -> tuple[str, str]:
    """Return this node's address for others, and its interface where its name leads elsewhere.

    The interface leads towards ``goal``, else along the default route, else it is the only one.

    Args:
        goal: an address, a name, or "" where there is none.
    """
    name, resolved = socket.gethostname(), ""
    with contextlib.suppress(OSError):  # no such name
        resolved = str(socket.getaddrinfo(name, 0)[0][4][0])
    if resolved and not ipaddress.ip_address(resolved).is_loopback:
        return resolved, ""
    outward = _outward()
    # The last two are reserved for documentation: the default route leads to them.
    for end in filter(None, (goal, "192.0.2.1", "2001:db8::1")):
        with contextlib.suppress(OSError):  # no such name, no such route
            if (address := own_address(end)) in outward:
                return address, outward[address]
    if len(set(outward.values())) == 1:
        return next(iter(outward.items()))
    raise ConfigError(
        f"this node's name, {name}, resolves to {resolved or 'nothing'}, which other nodes cannot "
        f"reach; set GLOO_SOCKET_IFNAME to the interface that leads to them, of "
        f"{sorted(set(outward.values()))}"
    )


def _outward() -> dict[str, str]:
    """Return interfaces by the addresses of this node that others may reach."""
    import psutil  # a supervisor calls ``forget`` without it

    outward = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                parsed = ipaddress.ip_address(address.address)
                if not (parsed.is_loopback or parsed.is_link_local):
                    outward[address.address] = name
    return outward


def _refuse_shared_store(env: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` where ranks that torchrun starts again may never meet.

    By default its store outlives an attempt, and with it the addresses of ranks that are gone: a
    rank that is faster than another tries to reach those.
    """
    restarts = int(env.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts > 0 and shared and int(env["WORLD_SIZE"]) > 1:
        raise ConfigError(
            f"torchrun --max-restarts={restarts} keeps one store for all attempts, where ranks "
            "find the addresses of those that are gone; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
            "and --rdzv-backend=c10d on every node, or --max-restarts=0"
        )


def _check_count(launcher: str, started: int, needed: int | None) -> None:
    if needed is not None and started != needed:
        raise ConfigError(
            f"{launcher} started {started} processes, but parallel.tensor * parallel.pipeline * "
            f"parallel.context * parallel.data = {needed}; make them equal"
        )
