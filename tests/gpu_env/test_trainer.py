"""The real Transformer Engine beside the tests' stand-in, without a GPU: no kernel is run."""

import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.models import FAMILIES, tiny_checkpoint
from tests.support.ranks import run_on_ranks, with_stand_in
from tests.support.transformer_engine import MODULES, optimizers, plain

STAND_INS = {f"{m}:{name}": getattr(source, name) for m in MODULES for source, name in MODULES[m]}


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
        taken = inspect.signature(theirs).parameters
        takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken.values())
        for name, parameter in inspect.signature(ours).parameters.items():
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                assert name in taken or takes_any, (theirs, name)
                if name in taken and parameter.default is not parameter.empty:
                    assert parameter.default == taken[name].default, (theirs, name)


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


MARKS = "tensor_model_parallel partition_dim partition_stride sequence_parallel allreduce shared"
SHARD = "key global_shape global_offset local_shape axis_fragmentations replica_id dtype"


def describe_models(device, folder, out) -> None:
    from qurl_megatron.actor.build import build_model, transformer_config
    from qurl_megatron.actor.megatron import megatron_runtime
    from qurl_megatron.config import ModelConfig, ParallelConfig
    from qurl_megatron.tensors.arch import read_arch, read_config

    parallel, rows = ParallelConfig(tensor=dist.get_world_size()), []
    with megatron_runtime(parallel) as ranks:
        for family in FAMILIES:
            arch = read_arch(read_config(folder / family))
            config = transformer_config(arch, ModelConfig(path=str(folder / family)), parallel)
            rows += [(family, *row) for row in describe(build_model(arch, config, ranks))]
    (out / str(dist.get_rank())).write_text(json.dumps(rows))


def describe(model: nn.Module) -> Iterator[tuple[str, str, dict[str, str]]]:
    for name, parameter in model.named_parameters():
        yield "parameter", name, attributes(parameter, MARKS)
    for name, value in model.state_dict().items():
        yield "state", name, attributes(value)
    for name, shard in model.sharded_state_dict().items():
        yield "shard", name, attributes(shard, SHARD)
    for name, module in model.named_modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            yield "layer", name, attributes(module, "fuse_wgrad_accumulation")


def attributes(value, names: str = "") -> dict[str, str]:
    names += " shape dtype" if isinstance(value, Tensor) else ""
    return {name: str(getattr(value, name)) for name in names.split() if hasattr(value, name)}


@pytest.mark.parametrize("tp", [1, 2])
def test_models_of_every_family_have_the_same_parameters_and_state(tp, tmp_path):
    rows = []
    for family in FAMILIES:
        tiny_checkpoint(tmp_path / family, family)
    for install in (with_the_library, with_stand_in):
        out, bare = tmp_path / install.__name__, ("torch.distributed",)
        out.mkdir()
        call = (describe_models, tmp_path, out)
        run_on_ranks(install, tp, "gloo", tmp_path, *call, preload=bare, timeout_s=600)
        rows.append([(i, *r) for i in range(tp) for r in json.loads((out / str(i)).read_text())])
    library, stand_in = rows
    assert any("shard" in row for row in library)
    assert [row for row in library if row not in stand_in] == []
    assert [row for row in stand_in if row not in library] == []


def test_fused_adam_keeps_the_state_that_its_stand_in_keeps(monkeypatch):
    make = torch.tensor  # the library makes a flag on a GPU
    monkeypatch.setattr(torch, "tensor", lambda *args, device=None, **kw: make(*args, **kw))
    library = pkgutil.resolve_name("transformer_engine.pytorch.optimizers:FusedAdam")
    assert describe_adam(library) == describe_adam(optimizers.FusedAdam)


def describe_adam(kind: type) -> dict:
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    saved, loaded = (kind([weight], lr=lr, betas=(0.9, 0.95)) for lr in (1e-4, 1e-3))
    saved.initialize_state(weight, False)
    saved.set_scaled_state(weight, "exp_avg", torch.full((3, 2), 0.3))
    loaded.load_state_dict(saved.state_dict())
    state = loaded.state_dict()
    moments = {n: (v.dtype, v.tolist()) for n, v in state["state"][0].items()}
    values = {n: loaded.get_unscaled_state(weight, n).tolist() for n in moments}
    return {"groups": state["param_groups"], "moments": moments, "values": values}
