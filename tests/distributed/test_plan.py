"""The plan's idea of who holds what is what Megatron's ranks hold."""

import pytest

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.publish.routes import Layout, trainer_part
from qurl_megatron.tensors.table import hf_tensor
from tests.support.models import tiny_checkpoint
from tests.support.policies import build, hf_shards, recipe
from tests.support.ranks import run_on_ranks


def compare(device, config):
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        layout = Layout(tensor=ranks.tensor.size, pipeline=ranks.pipeline.size)
        where = ranks.pipeline.rank, ranks.tensor.rank
        held = 0
        for shard in hf_shards(policy):
            tensor = hf_tensor(policy.arch, shard.name)
            planned = trainer_part(policy.arch, tensor, shard.shape, layout, *where)
            if planned is None:  # of a copy, or padding of the vocabulary
                copied = shard.dim is None and ranks.tensor.rank > 0
                assert copied or not shard.part.elements, shard.name
            else:
                assert planned == shard.part, shard.name
            held += 1
        assert held > 10


@pytest.mark.parametrize(
    "family,changes",
    [
        ("qwen2", dict(vocab_size=131, tie_word_embeddings=True)),
        ("qwen3", dict(vocab_size=129)),
        ("qwen3_moe", {}),
    ],
)
def test_the_plan_knows_what_every_training_rank_holds(family, changes, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", family, **changes)
    config = recipe(folder, dict(tensor=2, pipeline=2))
    run_on_ranks(compare, 4, backend, tmp_path, config)
