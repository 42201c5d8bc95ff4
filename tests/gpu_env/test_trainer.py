"""The real Transformer Engine beside the tests' stand-in, where there is no GPU: no kernel is run.

Models are built on the CPU, in ranks of their own, with the library and with the stand-in.
"""

import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.models import FAMILIES, tiny_checkpoint
from tests.support.ranks import run_on_ranks, with_stand_in
from tests.support.transformer_engine import MODULES, plain
from tests.support.transformer_engine.optimizers import FusedAdam

STAND_INS = {
    f"{module}:{name}": getattr(source, name)
    for module, entries in MODULES.items()
    for source, name in entries
}


@pytest.mark.parametrize("place", STAND_INS)
def test_the_library_takes_what_its_stand_in_takes(place):
    real, stand_in = pkgutil.resolve_name(place), STAND_INS[place]
    pairs = [(real, stand_in)]
    if inspect.isclass(stand_in):
        own = [base for base in stand_in.__mro__ if base.__module__.startswith("tests.")]
        names = {name for base in own for name, value in vars(base).items() if callable(value)}
        names = {name for name in names if name[0] != "_" or hasattr(real, name)}
        pairs = [(getattr(real, name), getattr(stand_in, name)) for name in names]
    for theirs, ours in pairs:
        assert_takes(inspect.signature(theirs).parameters, inspect.signature(ours).parameters)


def assert_takes(theirs, ours) -> None:
    takes_any = any(each.kind == each.VAR_KEYWORD for each in theirs.values())
    for name, parameter in ours.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        assert name in theirs or takes_any, name
        if name in theirs:
            assert parameter.default == theirs[name].default, name


def with_the_library(device, body, *args) -> None:
    """Call ``body`` where the library's layers can be built although there is no GPU."""
    import transformer_engine.pytorch  # noqa: F401
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule as Layer

    sys.modules["transformer_engine"].runs_without_cuda = True  # ``config.env`` asks
    torch.cuda.Stream = plain.NoStream
    construct = Layer.__init__

    def construct_without_gpu(self, *args, **options) -> None:
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            construct(self, *args, **options)

    Layer.__init__ = construct_without_gpu
    body(device, *args)


MARKS = (
    *("tensor_model_parallel", "partition_dim", "partition_stride"),
    *("sequence_parallel", "allreduce", "shared"),
)
SHARD = (
    *("key", "global_shape", "global_offset", "local_shape", "axis_fragmentations"),
    *("replica_id", "dtype", "allow_shape_mismatch", "prepend_axis_num"),
)


def describe_models(device, folder, out) -> None:
    from qurl_megatron.actor.build import build_model, transformer_config
    from qurl_megatron.actor.megatron import megatron_runtime
    from qurl_megatron.config import ModelConfig, ParallelConfig
    from qurl_megatron.tensors.arch import read_arch, read_config

    parallel, rows = ParallelConfig(tensor=dist.get_world_size()), []
    with megatron_runtime(parallel) as ranks:
        for family in FAMILIES:
            path = folder / family
            arch = read_arch(read_config(path))
            config = transformer_config(arch, ModelConfig(path=str(path)), parallel)
            for kind, name, values in describe(build_model(arch, config, ranks)):
                rows.append((f"{family} rank {dist.get_rank()}", kind, name, values))
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(rows))


def describe(model: nn.Module) -> Iterator[tuple[str, str, dict[str, str]]]:
    for name, parameter in model.named_parameters():
        yield "parameter", name, attributes(parameter, MARKS)
    for name, value in model.state_dict().items():
        yield "state", name, attributes(value)
    for name, shard in model.sharded_state_dict().items():
        yield "shard", name, attributes(shard, SHARD)
    for name, module in model.named_modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            yield "layer", name, {"adds gradients in place": str(module.fuse_wgrad_accumulation)}


def attributes(value, names: tuple[str, ...] = ()) -> dict[str, str]:
    stated = {name: str(getattr(value, name)) for name in names if hasattr(value, name)}
    if isinstance(value, Tensor):
        stated |= {"shape": str(value.shape), "dtype": str(value.dtype)}
    return stated


@pytest.mark.parametrize("tp", [1, 2])
def test_models_of_every_family_have_the_same_parameters_and_state(tp, tmp_path):
    for family in FAMILIES:
        tiny_checkpoint(tmp_path / family, family)
    rows = []
    for install in (with_the_library, with_stand_in):
        out, bare = tmp_path / install.__name__, ("torch.distributed",)
        call = (describe_models, tmp_path, out)
        run_on_ranks(install, tp, "gloo", tmp_path, *call, preload=bare, timeout_s=600)
        rows.append(
            [r for rank in range(tp) for r in json.loads(Path(f"{out}.{rank}").read_text())]
        )
    library, stand_in = rows
    assert any(kind == "shard" for _, kind, *_ in library)
    assert [row for row in library if row not in stand_in] == []
    assert [row for row in stand_in if row not in library] == []


def test_fused_adam_keeps_the_state_that_its_stand_in_keeps(monkeypatch):
    make = torch.tensor  # the library makes a flag on a GPU
    monkeypatch.setattr(torch, "tensor", lambda *args, device=None, **kw: make(*args, **kw))
    library = pkgutil.resolve_name("transformer_engine.pytorch.optimizers:FusedAdam")
    assert describe_adam(library) == describe_adam(FusedAdam)


def describe_adam(kind: type) -> dict:
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    saved = kind([weight], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    saved.initialize_state(weight, False)
    saved.set_scaled_state(weight, "exp_avg", torch.full((3, 2), 0.3))
    loaded = kind([weight])
    loaded.load_state_dict(saved.state_dict())
    moments = loaded.state_dict()["state"][0]
    for name in moments:
        assert torch.equal(loaded.get_unscaled_state(weight, name), moments[name])
    values = {name: (str(value.dtype), value.tolist()) for name, value in moments.items()}
    return {"groups": loaded.state_dict()["param_groups"], "moments": values}
