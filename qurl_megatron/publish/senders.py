"""Which way a run's weights take, and this rank's end of it."""

import os
import secrets
import shutil
import socket
from pathlib import Path

import torch.distributed as dist

from qurl_megatron.config import RolloutConfig, SyncConfig
from qurl_megatron.errors import ConfigError
from qurl_megatron.model.policy import Policy
from qurl_megatron.runtime.megatron import share
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.group import GroupSender, host_store, join_store
from qurl_megatron.wire.shared_memory import MemorySender, memory_folder, private_folder
from qurl_megatron.wire.transport import Sender

OPENING = "opening the transport"  # what the other ranks wait for


def make_sender(sync: SyncConfig, rollout: RolloutConfig, policy: Policy, run_dir: Path) -> Sender:
    """This rank's end of the transport that ``sync`` asks for; all ranks call it together.

    Raises:
        ConfigError: the transport cannot reach these engines; names the key and the mend.
    """
    ranks = policy.ranks
    hosts: list = [None] * ranks.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    one_machine = len(set(hosts)) == 1 and not rollout.urls and not rollout.rendezvous
    kind = choose(sync.transport, one_machine=one_machine)
    token = share(run_token(run_dir) if ranks.leads else None, waiting_for=OPENING)
    if kind == "memory":
        if ranks.leads:
            shutil.rmtree(memory_folder(token), ignore_errors=True)  # what a killed run left
        dist.barrier()
        return MemorySender(token, ranks.rank, leads=ranks.leads, device=ranks.device)
    if kind == "group":
        return _group_sender(sync, rollout, policy, one_machine=one_machine)
    root = None
    if ranks.leads:
        parameters = sum(p.numel() for p in policy.gpt.parameters())
        whole = parameters * ranks.tensor.size * ranks.pipeline.size
        bytes_needed = 4 * whole * (sync.keep + 1)
        root = versions_root(
            sync, run_dir, token, one_machine=one_machine, bytes_needed=bytes_needed
        )
        shutil.rmtree(root, ignore_errors=True)  # what a killed run left
        private_folder(root)
    root = share(root, waiting_for=OPENING)
    name = f"pp{ranks.pipeline.rank}-tp{ranks.tensor.rank}-copy{ranks.copies.rank}"
    return FilesSender(root, name, leads=ranks.leads, receipt_wait_s=sync.receipt_wait_s)


def _group_sender(
    sync: SyncConfig, rollout: RolloutConfig, policy: Policy, *, one_machine: bool
) -> GroupSender:
    ranks, timeout_s = policy.ranks, rollout.update_timeout_s
    # Where torchrun or srun had the ranks meet, engines can reach the leading one too.
    host = sync.host or ("127.0.0.1" if one_machine else os.environ["MASTER_ADDR"])
    store = host_store(host, timeout_s) if ranks.leads else None
    port = share(store and store.port, waiting_for=OPENING)
    if store is None:
        store = join_store(host, port, timeout_s)
    return GroupSender(
        store, ranks.rank, ranks.world_size, device=ranks.device, timeout_s=timeout_s
    )


def choose(transport: str, *, one_machine: bool) -> str:
    """The transport for engines here, or elsewhere.

    Raises:
        ConfigError: the one that is asked for cannot reach them.
    """
    if transport == "memory" and not one_machine:
        raise ConfigError(
            "sync.transport=memory needs trainer and engines on one machine, and engines that the "
            "run starts itself; use group, or files with sync.dir on a shared filesystem"
        )
    if transport == "auto":
        return "memory" if one_machine else "files"
    return transport


def versions_root(
    sync: SyncConfig, run_dir: Path, token: str, *, one_machine: bool, bytes_needed: int
) -> Path:
    """Where versions go: the recipe's folder, else memory if they fit, else the run directory."""
    name = f"qurl-{token}-versions"
    if sync.dir:
        return Path(sync.dir) / name
    memory = Path("/dev/shm")
    if one_machine and memory.is_dir() and os.access(memory, os.W_OK):
        shutil.rmtree(memory / name, ignore_errors=True)
        if shutil.disk_usage(memory).free > bytes_needed:
            return memory / name
    return run_dir / "versions"


def run_token(run_dir: Path) -> str:
    """Names what a run shares with its engines, the same after a restart and no other run's."""
    file = run_dir / ".token"
    if not file.is_file():
        run_dir.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".tmp")
        aside.write_text(secrets.token_hex(6), encoding="utf-8")
        aside.rename(file)
    return file.read_text(encoding="utf-8")
