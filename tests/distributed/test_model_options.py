"""Options that make training faster or more exact change nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.checkpoints.huggingface import HfReader
from qurl_megatron.config import ModelConfig, ParallelConfig
from qurl_megatron.tensors.arch import read_arch, read_config
from tests.support.logits import forward
from tests.support.models import tiny_checkpoint
from tests.support.policies import ALGO, assert_same_training, recipe, relative, run, train_twice
from tests.support.ranks import run_on_ranks

PARAMETERS_A_BUCKET = 5_000  # of some 60,000: the tiny model goes in one otherwise


def train_in_buckets(device, config, samples, out: Path) -> None:
    from functools import partial

    from qurl_megatron.actor import trained

    plain = trained.DistributedDataParallelConfig
    trained.DistributedDataParallelConfig = partial(plain, bucket_size=PARAMETERS_A_BUCKET)
    sent = []
    buffers = trained.DistributedDataParallel
    begin = buffers.__init__

    def seen(self, *args, **kwargs) -> None:
        begin(self, *args, **kwargs)
        sent.append(len(self.bucket_groups))

    buffers.__init__ = seen
    train_twice(device, config, samples, out)
    # Later pipeline stages send all at once: nobody waits for them.
    if config.optimizer.overlap_grad_reduce and dist.get_rank() == 0:
        assert sent[0] > 3, sent


@pytest.mark.parametrize(
    "family, layout",
    [("qwen2", dict(data=2)), ("qwen3_moe", dict(data=2)), ("llama", dict(pipeline=2, data=2))],
)
def test_gradients_added_up_along_the_way_are_those_added_up_afterwards(
    family, layout, backend, tmp_path
):
    folder = tiny_checkpoint(tmp_path / "model", family, tie_word_embeddings=family == "llama")
    found = []
    for overlap in (False, True):
        config = recipe(folder, layout, **ALGO)
        optimizer = replace(config.optimizer, overlap_grad_reduce=overlap)
        config = replace(config, optimizer=optimizer)
        found.append(run(tmp_path, backend, config, f"{overlap}", body=train_in_buckets))
    after, along = found
    for name, value in after["gradients"].items():
        assert torch.equal(along["gradients"][name], value), name
    for name, value in after["weights"].items():  # the norm is summed in another order
        assert relative(along["weights"][name], value) < 1e-6, name


def check_output(device, folder, parallel, ids) -> None:
    """FP32 logits are what BF16 logits are rounded from."""
    from qurl_megatron.actor.build import build_model, load_weights, transformer_config

    with megatron_runtime(parallel) as ranks:
        arch = read_arch(read_config(folder))
        found = []
        for wide in (False, True):
            model_config = ModelConfig(path=str(folder), dtype="bfloat16", fp32_output=wide)
            config = transformer_config(arch, model_config, parallel)
            model = build_model(arch, config, ranks, fp32_output=model_config.fp32_output)
            load_weights(model, arch, ranks, HfReader(folder), 1.0)
            found.append(forward(model, arch, ranks, ids.to(device)))
        if ranks.last_stage:
            narrow, wide = found
            assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
            # Sums in another order may round the other way.
            assert (narrow == wide.bfloat16()).float().mean() > 0.99
            assert wide.abs().max() > 16
            noise = narrow.float().log_softmax(-1) - wide.log_softmax(-1)
            assert 0.03 < noise.abs().max() < 0.2


@pytest.mark.parametrize(
    "tied, layout", [(False, dict(tensor=2)), (True, dict(pipeline=2)), (True, dict(tensor=2))]
)
def test_logits_in_fp32_are_not_rounded(tied, layout, backend, tmp_path):
    folder = scaled_output(tiny_checkpoint(tmp_path / "model", "qwen2", tie_word_embeddings=tied))
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    parallel = ParallelConfig(**layout)
    run_on_ranks(check_output, parallel.world_size, backend, tmp_path, folder, parallel, ids)


def scaled_output(folder: Path) -> Path:
    """Make the largest logits about 20, as those of trained models are."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check_products(device, folder, parallel) -> None:
    """Of BF16 numbers: exact, but for sums in FP32, and a gradient that is rounded to BF16."""
    from qurl_megatron.actor.build import build_model, transformer_config

    with megatron_runtime(parallel) as ranks:
        arch = read_arch(read_config(folder))
        config = transformer_config(arch, ModelConfig(path=str(folder), dtype="bfloat16"), parallel)
        layer = build_model(arch, config, ranks, fp32_output=True).output_layer
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(n, 64, generator=generator) for n in (16, arch.vocab)]
        hidden, weight = (x.to(torch.bfloat16) for x in tensors)
        upstream = torch.randn(16, arch.vocab, generator=generator)
        exact_hidden, exact_weight = (x.double().requires_grad_() for x in (hidden, weight))
        exact = exact_hidden @ exact_weight.t()
        exact.backward(upstream.double())

        rank, size = ranks.tensor.rank, ranks.tensor.size
        part = arch.vocab // size
        rows = slice(rank * part, (rank + 1) * part)
        layer.weight.data.copy_(weight[rows])
        own = hidden.chunk(size)[rank][:, None].to(device, copy=True).requires_grad_()
        logits, _ = layer(own)
        logits.backward(upstream[:, None, rows].to(device))
        assert logits.dtype == torch.float32
        assert relative(logits[:, 0].cpu().double(), exact[:, rows]) < 1e-6
        assert relative(own.grad[:, 0].cpu().double(), exact_hidden.grad.chunk(size)[rank]) < 4e-3
        assert relative(layer.weight.grad.cpu().double(), exact_weight.grad[rows]) < 4e-3


@pytest.mark.parametrize("tensor", [1, 2])
def test_fp32_logits_and_their_gradients_are_those_of_float64(tensor, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", tie_word_embeddings=False)
    parallel = ParallelConfig(tensor=tensor)
    run_on_ranks(check_products, tensor, backend, tmp_path, folder, parallel)


@pytest.mark.parametrize("tied", [True, False])
def test_training_with_fp32_logits_is_the_same_training(tied, backend, tmp_path):
    """In FP32 throughout, so that nothing else rounds."""
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    found = []
    for wide, layout in ((False, {}), (True, dict(tensor=2))):
        config = recipe(folder, layout, **ALGO)
        config = replace(config, model=replace(config.model, fp32_output=wide))
        found.append(run(tmp_path, backend, config, f"{wide}"))
    assert_same_training(found[1], found[0])
