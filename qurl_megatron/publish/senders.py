"""The transport of a run's weights, and this rank's end of it."""

import os
import shutil
import socket
from functools import partial
from pathlib import Path

import torch.distributed as dist

from qurl_megatron.actor.megatron import share
from qurl_megatron.actor.policy import Policy
from qurl_megatron.config import RolloutConfig, SyncConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.wire import SLOTS
from qurl_megatron.wire.lease import Owner
from qurl_megatron.wire.session import TRANSPORTS
from qurl_megatron.wire.transport import Sender, Site

MIB = 2**20


def make_sender(sync: SyncConfig, rollout: RolloutConfig, policy: Policy, run_dir: Path) -> Sender:
    """Open this rank's end of the transport that ``sync`` asks for; all ranks call it together.

    Raises:
        ConfigError: the transport cannot reach these engines; names the key and the fix.
    """
    ranks = policy.ranks
    hosts: list = [None] * ranks.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    one_machine = len(set(hosts)) == 1 and not rollout.urls and not rollout.rendezvous
    shared = partial(share, waiting_for="opening the transport")
    parameters = sum(p.numel() for p in policy.gpt.parameters())
    bucket = min(int(sync.bucket_mb * MIB), 4 * parameters)
    room = ranks.device.type == "cuda" or _shm_free() > SLOTS * ranks.world_size * bucket
    token = None
    if ranks.leads:
        run_dir.mkdir(parents=True, exist_ok=True)
        token = Owner.of(run_dir).token
    # Stages differ in size: one rank's answer holds for all.
    transport = TRANSPORTS[choose(sync, one_machine=one_machine, room=shared(room))]
    return transport.sender.open(
        Site(
            rank=ranks.rank,
            size=ranks.world_size,
            leads=ranks.leads,
            device=ranks.device,
            name=f"pp{ranks.pipeline.rank}-tp{ranks.tensor.rank}-copy{ranks.copies.rank}",
            run_dir=run_dir,
            token=shared(token),
            one_machine=one_machine,
            bytes=4 * parameters * ranks.tensor.size * ranks.pipeline.size * (sync.keep + 1),
            share=shared,
            shared=sync.dir,
            host=sync.host,
            receipt_wait_s=sync.receipt_wait_s,
            timeout_s=rollout.update_timeout_s,
        )
    )


def choose(sync: SyncConfig, *, one_machine: bool, room: bool = True) -> str:
    """Return the name of the transport for engines here, or elsewhere.

    Args:
        room: the machine's shared memory has room for the buckets of all ranks.

    Raises:
        ConfigError: the requested one cannot reach them.
    """
    if sync.transport == "auto":
        return sync.on_one_machine if one_machine and room else "files"
    if TRANSPORTS[sync.transport].sender.one_machine and not one_machine:
        raise ConfigError(
            f"sync.transport={sync.transport} needs trainer and engines on one machine, and "
            "engines that the run starts itself; use group, or files with sync.dir on a shared "
            "filesystem"
        )
    return sync.transport


def _shm_free() -> int:
    """Bytes free in /dev/shm; containers often have 64 MB."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
