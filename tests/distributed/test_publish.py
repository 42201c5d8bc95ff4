"""A version published from any layout holds exactly the quantized whole model."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import everywhere, megatron_runtime
from qurl_megatron.config import QuantConfig, SyncConfig
from qurl_megatron.kit.errors import ConfigError
from tests.support.models import FAMILIES, tiny_checkpoint
from tests.support.policies import EXPERT_LAYOUTS, build, recipe
from tests.support.published import SEED, assert_published, assert_whole, publish, publisher_of
from tests.support.ranks import run_on_ranks
from tests.support.versions import joined

DRIFT = {
    "quant/code_flip_rate",
    "quant/weight_update",
    "quant/weight_error",
    "quant/update_passed",
    "quant/update_cosine",
}


SQUARES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
SQUARES |= {"head_dim": 128, "num_hidden_layers": 2, "shared_expert_intermediate_size": 256}
SIZES = {"fp8_block": SQUARES}
"""Of whole squares on each of two ranks."""


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_block", "none"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [dict(tensor=2, pipeline=2), dict(tensor=2, context=2)])
def test_shards_join_into_the_quantized_whole_bit_for_bit(
    scheme, family, layout, backend, tmp_path
):
    changes = SIZES.get(scheme, {})
    folder = tiny_checkpoint(tmp_path / "model", family, vocab_size=131, **changes)
    config = recipe(folder, layout, dtype="bfloat16")
    run_on_ranks(publish, 4, backend, tmp_path, config, scheme, tmp_path / "out", 0)

    assert_published(tmp_path / "out/0.pt", folder, scheme)


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", ["int8", "none", "fp8_block"])
@pytest.mark.parametrize(
    "family, layout",
    [
        ("qwen3_moe", "EP2 x TP2"),
        ("qwen3_moe", "EP2 x DP4"),
        ("qwen3_moe", "EP4 x TP2 x DP2"),
        ("qwen3_moe", "EP2 x PP2 x CP2"),
        ("qwen2_moe", "EP2 x TP2"),
    ],
)
def test_experts_of_different_ranks_join_into_the_quantized_whole(
    scheme, family, layout, backend, tmp_path
):
    changes = SIZES.get(scheme, {})
    folder = tiny_checkpoint(tmp_path / "model", family, vocab_size=131, **changes)
    config = recipe(folder, EXPERT_LAYOUTS[layout], dtype="bfloat16")
    ranks = config.parallel.world_size
    run_on_ranks(publish, ranks, backend, tmp_path, config, scheme, tmp_path / "out", 0)

    assert_published(tmp_path / "out/0.pt", folder, scheme)


def publish_by_chance(device, config, kind, out):
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, uaq_scale=1.5)
        quant = QuantConfig(scheme="fp8", rounding=kind, uaq_scale=1.5)
        for turn, versions in (("first", (0, 1)), ("resumed", (1,))):
            places = {"kept": out / turn, "seed": SEED}
            with publisher_of(policy, config, quant, out, **places) as publisher:
                for version in versions:
                    publisher.publish(version)


@pytest.mark.crossed
@pytest.mark.parametrize("kind", ["stochastic", "dithered"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("layout", [dict(tensor=2, pipeline=2), dict(tensor=2, data=2)])
def test_a_version_rounded_by_chance_is_the_same_from_every_layout_and_when_it_is_published_again(
    kind, family, layout, backend, tmp_path
):
    folder = tiny_checkpoint(tmp_path / "model", family, vocab_size=131)
    config = recipe(folder, layout, dtype="bfloat16")
    run_on_ranks(publish_by_chance, 4, backend, tmp_path, config, kind, tmp_path)
    for place, version in (("first/0", 0), ("first/1", 1), ("resumed/1", 1)):
        assert_published(tmp_path / f"{place}.pt", folder, "fp8", kind=kind, version=version)


def publish_to_memory(device, config, scheme, out):
    from qurl_megatron.wire.message import piece_of
    from qurl_megatron.wire.shared_memory import MemorySender

    sent = []

    class Keeps(MemorySender):
        def begin(self, version):
            self.version = version

        def put(self, index, parts, *, to=None):
            blob = super().put(index, parts)
            memory = self.room(index)
            for part, piece in zip(parts, blob.pieces, strict=True):
                found = piece_of(memory, piece)
                if device.type == "cpu" and self.version:  # slots grow with the first one
                    assert part.value.data_ptr() == found.data_ptr(), f"{part.name} was copied"
                sent.append((piece, found.clone()))
            return blob

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, uaq_scale=1.5)
        quant = QuantConfig(scheme=scheme, uaq_scale=1.5)
        sender = Keeps("test", ranks.rank, leads=ranks.leads, root=out)
        with publisher_of(policy, config, quant, out, sender=sender) as publisher:
            publisher.publish(0)
            sent.clear()
            publisher.publish(1)
    torch.save(sent, out / f"sent-{ranks.rank}.pt")


@pytest.mark.parametrize("scheme", ["int8", "none"])
@pytest.mark.parametrize("layout", [dict(tensor=2), dict(data=2)])
def test_a_version_is_made_in_the_memory_that_engines_map(scheme, layout, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", vocab_size=131)
    config = recipe(folder, layout, dtype="bfloat16")
    run_on_ranks(publish_to_memory, 2, backend, tmp_path, config, scheme, tmp_path)

    parts: list = []
    for rank in range(2):
        parts += torch.load(tmp_path / f"sent-{rank}.pt", weights_only=False, map_location="cpu")
    assert_whole(joined(parts), folder, scheme)


def choose_where_stages_differ(device, config, out):
    from qurl_megatron.publish import publisher
    from qurl_megatron.wire import SLOTS

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        sizes = everywhere(sum(p.numel() for p in policy.gpt.parameters()))
        assert sizes[0] != sizes[1]
        # Room for the buckets of the smaller stage, and not for those of the larger.
        free = SimpleNamespace(free=4 * SLOTS * ranks.world_size * sum(sizes) // 2)
        publisher.shutil = SimpleNamespace(disk_usage=lambda _: free)
        sender = publisher.make_sender(SyncConfig(), config.rollout, policy, out)
        (out / f"{ranks.rank}.kind").write_text(sender.kind)
        dist.barrier()
        sender.close()


def test_stages_of_different_size_choose_one_transport(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "llama", vocab_size=131)
    config = recipe(folder, dict(pipeline=2))
    run_on_ranks(choose_where_stages_differ, 2, "gloo", tmp_path, config, tmp_path)
    assert len({path.read_text() for path in tmp_path.glob("*.kind")}) == 1


def test_drift_metrics_do_not_depend_on_the_layout(backend, qwen2, tmp_path):
    def measured(layout: dict) -> dict[str, float]:
        config, out = recipe(qwen2, layout), tmp_path / "-".join(("out", *layout))
        arguments = (config, "int8", out, 1)
        run_on_ranks(publish, config.parallel.world_size, backend, tmp_path, *arguments)
        return torch.load(out / "metrics-1.pt")

    alone = measured({})
    drift = {name: value for name, value in alone.items() if name.startswith("quant/")}
    assert drift.keys() == DRIFT
    assert 0 < drift["quant/code_flip_rate"] < 1 and 0.9 < drift["quant/update_passed"] < 1.1
    for layout in (dict(context=2), dict(tensor=2, pipeline=2), dict(tensor=2, data=2)):
        split = measured(layout)
        assert {name: split[name] for name in DRIFT} == pytest.approx(drift, rel=1e-12), layout
        # Norms and row-parallel scales are there once, however they are split: twice, they would
        # add 3,200 bytes. Parts begin at multiples of 64 bytes, which leaves gaps.
        assert split["sync/bytes"] == pytest.approx(alone["sync/bytes"], abs=1024), layout


def publish_nan(device, config, out):
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, uaq_scale=1.0)
        if ranks.tensor.rank == 1:
            name = "decoder.layers.0.self_attention.linear_qkv.weight"
            dict(policy.gpt.named_parameters())[name].data[0, 0] = float("nan")
        # One bucket: collectives come after the mistake.
        quant = QuantConfig(scheme="int8")
        with publisher_of(policy, config, quant, out, bucket_mb=256.0) as publisher:
            with pytest.raises(ConfigError, match=r"q_proj.weight.* inf or nan"):
                publisher.publish(0)
            dist.barrier()  # all are still in step


def test_weights_of_one_rank_that_cannot_be_quantized_are_named_on_all(backend, qwen2, tmp_path):
    config = recipe(qwen2, dict(tensor=2, data=2))
    run_on_ranks(publish_nan, 4, backend, tmp_path, config, tmp_path / "out")
    assert not list((tmp_path / "out").glob("[0-9]*"))  # nothing was published
