"""Versions that training ranks publish, held against the quantized whole checkpoint."""

from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from qurl_megatron.actor.megatron import everywhere, megatron_runtime
from qurl_megatron.checkpoints.uaq import fold_uaq
from qurl_megatron.config import QuantConfig, SyncConfig
from qurl_megatron.observe.metrics import merge, values
from qurl_megatron.quant import quantize, rounding_of
from qurl_megatron.quant.export import stored
from qurl_megatron.tensors.arch import read_config
from qurl_megatron.tensors.table import is_quantized
from tests.support.policies import build
from tests.support.publishing import KeepsVersions

SEED = 5


def nudged(policy):
    """The same update to the last bit, however the weights are split."""
    for parameter in policy.gpt.parameters():
        assert parameter.dtype == torch.float32
        parameter.data.add_(parameter.data.square().mul_(2**-10))


@contextmanager
def publisher_of(policy, config, quant, out, *, kept=None, bucket_mb=0.003, sender=None, seed=0):
    """One whose versions are kept in a folder, ``out`` by itself.

    Small buckets: every version takes many rounds, stages have different numbers of them, and
    embeddings come in parts.
    """
    from qurl_megatron.publish.publisher import Publisher, make_sender

    fleet = KeepsVersions(kept or out) if policy.ranks.leads else None
    sync = SyncConfig(transport="files", bucket_mb=bucket_mb, dir=str(out / "root"))
    sender = sender or make_sender(sync, config.rollout, policy, out)
    with Publisher(policy, fleet, quant, sync, sender, seed=seed) as publisher:
        yield publisher


def publish(device, config, scheme, out, updates):
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, uaq_scale=1.5)
        quant = QuantConfig(scheme=scheme, uaq_scale=1.5)
        with publisher_of(policy, config, quant, out) as publisher:
            first = publisher.publish(0)
            assert not any(name.startswith("quant/") for name in first)
            assert first["sync/buffer_mb"].value > 0
            for version in range(1, updates + 1):
                nudged(policy)
                gathered = everywhere(publisher.publish(version))
                if ranks.leads:
                    torch.save(values(merge(gathered)), out / f"metrics-{version}.pt")
        assert not ranks.leads or not list((out / "root").iterdir())


def assert_published(published: Path, checkpoint: Path, scheme: str, **drawn) -> None:
    assert_whole(torch.load(published), checkpoint, scheme, **drawn)


def assert_whole(
    actual: dict[str, torch.Tensor],
    checkpoint: Path,
    scheme: str,
    kind: str = "nearest",
    version: int = 0,
) -> None:
    """That these are the whole checkpoint, folded by 1.5 and quantized."""
    expected = {}
    whole = fold_uaq(load_file(checkpoint / "model.safetensors"), read_config(checkpoint), 1.5)
    for name, weight in whole.items():
        if is_quantized(name) and scheme != "none":
            whole_place = {"shape": weight.shape, "split_dim": None, "offset": 0}
            drawn = rounding_of(kind, seed=SEED, version=version, name=name, **whole_place)
            codes = quantize(weight, scheme, rounding=drawn)
            expected |= stored(name, codes, scheme)
        else:
            expected[name] = weight.bfloat16()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name].float(), value.float()), name
