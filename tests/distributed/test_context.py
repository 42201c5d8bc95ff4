"""Sequences split over context-parallel ranks give what whole sequences give."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor.context import ContextPart, zigzag
from qurl_megatron.actor.megatron import Axis, megatron_runtime
from qurl_megatron.config import TrainConfig
from qurl_megatron.data.responses import Responses
from tests.support.models import random_samples, tiny_checkpoint
from tests.support.policies import build, hf_scores, recipe
from tests.support.ranks import run_on_ranks


def part_of(rank: int, size: int, *starts: int) -> ContextPart:
    return ContextPart(Axis(None, rank, size), starts)


def test_a_rank_has_an_early_and_a_late_chunk_of_every_sequence():
    whole = torch.arange(20)[None]
    # Sequences [0, 8) and [8, 20): chunks of 2 and of 3 positions.
    first, second = part_of(0, 2, 0, 8, 20), part_of(1, 2, 0, 8, 20)
    assert first.cut(whole).tolist() == [[0, 1, 6, 7, 8, 9, 10, 17, 18, 19]]
    assert second.cut(whole).tolist() == [[2, 3, 4, 5, 11, 12, 13, 14, 15, 16]]
    assert second.runs == [(0, 2, 4), (0, 4, 6), (8, 11, 14), (8, 14, 17)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_all_positions_and_the_work_of_causal_attention(size):
    starts = (0, 24, 24, 72)  # the second sequence is empty
    by_rank = [zigzag(starts, rank, size) for rank in range(size)]
    places = [place for runs in by_rank for r in runs for place in range(r.first, r.stop)]
    assert sorted(places) == list(range(72))
    work = [sum(p - r.sequence + 1 for r in runs for p in range(*r[1:])) for runs in by_rank]
    assert len(set(work)) == 1


def test_a_sequence_that_does_not_divide_into_chunks_is_a_bug():
    with pytest.raises(AssertionError, match="6 positions do not divide into 4 chunks"):
        zigzag((0, 6), 0, 2)


def join_parts(device) -> None:
    size = dist.get_world_size()
    axis = Axis(dist.group.WORLD, dist.get_rank(), size)
    place = ContextPart(axis, (0, 4 * size, 10 * size))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 10 * size, 5, generator=generator).to(device)
    weights = torch.randn(size, *whole.shape, generator=generator).to(device)  # one for each rank

    mine = place.cut(whole).requires_grad_()
    joined = place.join(mine)
    assert torch.equal(joined, whole)
    (joined.square() * weights[0]).sum().backward()  # the same loss everywhere
    torch.testing.assert_close(mine.grad, place.cut(2 * whole * weights[0]))

    mine.grad = None
    gathered = place.gather(mine)
    assert torch.equal(gathered, whole)
    (gathered.square() * weights[axis.rank]).sum().backward()  # everywhere another one
    torch.testing.assert_close(mine.grad, place.cut(2 * whole * weights.sum(0)))


def test_parts_join_into_the_whole_and_get_their_gradient(backend, tmp_path):
    run_on_ranks(join_parts, 2, backend, tmp_path)


def scores(device, config, samples, expected) -> None:
    """Every rank knows log-probs and entropies of all response tokens of its samples."""
    from qurl_megatron.training.layout import lay_out
    from qurl_megatron.training.losses import Scorer

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        score = Scorer(policy, config.rollout.temperature)
        updates = lay_out(ranks, Responses.of(samples), config, step=1)
        laid = [batch for update in updates for batch in update]
        found = policy.score(laid, lambda logits, batch: torch.stack(score(logits, batch)))
        assert len(found) == len(laid) if ranks.last_stage else not found
        for batch, both in zip(laid, found, strict=False):
            right = torch.cat([expected[i] for i in batch.indices], dim=1)
            torch.testing.assert_close(both.cpu(), right.float(), rtol=0, atol=1e-4)


@pytest.mark.crossed
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(
    "layout", [dict(context=2), dict(tensor=2, context=2), dict(pipeline=2, context=2)]
)
@pytest.mark.parametrize(
    "train", [dict(), dict(max_tokens=48), dict(max_tokens=48, packed=True)], ids=str
)
def test_scores_equal_hugging_face(backend, family, layout, train, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", family)
    config = replace(recipe(folder, layout), train=TrainConfig(micro_batch=2, **train))
    samples = random_samples(16)
    expected = hf_scores(folder, samples, config.rollout.temperature)
    run_on_ranks(scores, config.parallel.world_size, backend, tmp_path, config, samples, expected)
