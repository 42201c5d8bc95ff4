"""Publish the policy's weights as one new version: every rank quantizes and writes its own shard.

No full tensor is gathered anywhere. Row-parallel ranks agree on their channels' scales by a MAX
all-reduce; data-parallel replicas leave the writing to the first of them.
"""

import hashlib
import os
import shutil
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from qurl_megatron.config import QuantConfig, SyncConfig
from qurl_megatron.errors import ConfigError
from qurl_megatron.model.policy import HfShard, Policy
from qurl_megatron.observe.metrics import Metric
from qurl_megatron.quant import quantize
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.version import Manifest, Slice, TensorEntry, write_shard
from qurl_megatron.sync.drift import Drift
from qurl_megatron.weights import is_quantized


class Publisher:
    """Writes versions into a folder that trainer and engines share, and has the fleet load them.

    Use as a context manager: leaving removes the folder, which engines no longer need once loaded.
    """

    def __init__(
        self, policy: Policy, fleet: Fleet | None, quant: QuantConfig, root: Path, *, keep: int
    ) -> None:
        """
        Args:
            fleet: the engines, on the leading rank; None on the others.
            root: versions are ``root/v000012``; anything an earlier process left there is removed.
        """
        self.policy = policy
        self.fleet = fleet
        self.scheme = quant.scheme
        self.root = root
        self.keep = keep
        self.drift = Drift(quant)
        if policy.ranks.leads:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.policy.ranks.leads:
            shutil.rmtree(self.root, ignore_errors=True)

    def publish(self, version: int) -> dict[str, Metric]:
        """Quantize, write and load ``version`` everywhere; all ranks call it together.

        Returns:
            The quantization metrics of this rank's shards; empty on data-parallel replicas.

        Raises:
            EngineError: an engine did not confirm the version; it keeps serving the one before.
        """
        ranks = self.policy.ranks
        folder = self.root / f"v{version:06d}"
        if ranks.leads:
            folder.mkdir()
        dist.barrier()
        file = f"pp{ranks.pipeline.rank}-tp{ranks.tensor.rank}.safetensors"
        tensors: dict[str, Tensor] = {}
        entries: dict[str, dict] = {}
        for shard in self.policy.hf_shards():
            if ranks.data.rank > 0:
                continue  # a replica only lends its part of the masters
            for part in self._export(shard, version):
                # Replicated tensors are written by the first tensor rank alone.
                if part.split_dim is None and ranks.tensor.rank > 0:
                    continue
                tensors[part.name] = part.value.cpu()
                entries[part.name] = _entry(part, file)
        written = None
        if ranks.data.rank == 0:
            written = (file, write_shard(folder, file, tensors), entries)
        gathered = [None] * ranks.world_size if ranks.leads else None
        dist.gather_object(written, gathered)
        if ranks.leads:
            _manifest(version, self.scheme, [part for part in gathered if part]).write(folder)
            self.fleet.publish(folder, version)
            for old in sorted(self.root.glob("v*"))[: -self.keep]:
                shutil.rmtree(old)
        dist.barrier()
        return self.drift.metrics()

    def _export(self, shard: HfShard, version: int) -> list[HfShard]:
        """What a version holds for this shard: codes and scale, or one high-precision tensor."""
        quantized = is_quantized(shard.name)
        if not quantized or self.scheme == "none":
            if quantized:
                self.drift.observe(shard.name, shard.value, None, version)
            dtype = next(self.policy.gpt.parameters()).dtype
            return [
                HfShard(
                    shard.name, shard.value.to(dtype), shard.split_dim, shard.offset, shard.shape
                )
            ]
        row_parallel = shard.split_dim == 1
        try:
            codes = quantize(
                shard.value,
                self.scheme,
                input_group=self.policy.ranks.tensor.group if row_parallel else None,
            )
        except ConfigError as error:
            raise ConfigError(f"tensor {shard.name}: {error}") from error
        self.drift.observe(shard.name, shard.value, codes, version)
        scale_dim, scale_offset = (None, 0) if row_parallel else (0, shard.offset)
        return [
            HfShard(shard.name, codes.values, shard.split_dim, shard.offset, shard.shape),
            HfShard(
                f"{shard.name}_scale", codes.scale, scale_dim, scale_offset, (shard.shape[0], 1)
            ),
        ]


def versions_root(sync: SyncConfig, run_dir: Path, *, one_machine: bool, bytes_needed: int) -> Path:
    """Where versions go: the recipe's folder, else memory if they fit, else the run directory."""
    # Named after the run: a restart clears what a killed run left, and nothing else.
    name = f"qurl-{hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]}"
    if sync.dir:
        return Path(sync.dir) / name
    memory = Path("/dev/shm")
    if one_machine and memory.is_dir() and os.access(memory, os.W_OK):
        shutil.rmtree(memory / name, ignore_errors=True)
        if shutil.disk_usage(memory).free > bytes_needed:
            return memory / name
    return run_dir / "versions"


def _entry(part: HfShard, file: str) -> dict:
    length = 1 if part.split_dim is None else part.value.shape[part.split_dim]
    return {
        "shape": part.shape,
        "dtype": str(part.value.dtype).removeprefix("torch."),
        "split_dim": part.split_dim,
        "slice": Slice(file, part.offset, length),
    }


def _manifest(version: int, scheme: str, written: list[tuple]) -> Manifest:
    """Join what the ranks report; ``TensorEntry`` checks that the slices of a tensor tile it."""
    slices: dict[str, list[Slice]] = {}
    facts: dict[str, dict] = {}
    for _, _, entries in written:
        for name, entry in entries.items():
            slices.setdefault(name, []).append(entry["slice"])
            facts[name] = entry
    return Manifest(
        version=version,
        scheme=scheme,
        files={file: stat for file, stat, _ in written},
        tensors={
            name: TensorEntry(
                shape=tuple(facts[name]["shape"]),
                dtype=facts[name]["dtype"],
                split_dim=facts[name]["split_dim"],
                slices=tuple(sorted(parts, key=lambda s: s.offset)),
            )
            for name, parts in slices.items()
        },
    )
