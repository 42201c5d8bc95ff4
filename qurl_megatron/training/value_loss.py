"""The critic's side of an update: values of the response tokens, and the loss that fits them.

The value of a token is the value of the state before it, so it is read at the same position as
the token's log-prob.

Shapes: B = rows, S = their length, s = this context-parallel rank's part of it, N = tokens
of the microbatch that the policy wrote.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from qurl_megatron.actor.context import ContextPart
from qurl_megatron.actor.critic import Critic
from qurl_megatron.actor.megatron import Axis
from qurl_megatron.algo import value_loss
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.observe.metrics import ExplainedVariance, Mean, Metric
from qurl_megatron.training.sums import fetched_sums


def read_values(output: Tensor, batch: TokenBatch, *, context: Axis) -> Tensor:
    """A critic's output [B, s, 1] -> values of the response tokens, [N] float32."""
    return ContextPart.of(context, batch).join(output)[..., 0][batch.mask]


def attach_values(critic: Critic, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    """The same microbatches with values, [N]; only the last pipeline stage has and reads them."""
    context = critic.ranks.context
    values = critic.score(
        batches, lambda output, batch: read_values(output, batch, context=context)
    )
    if not values:
        return list(batches)
    return [replace(b, values=v) for b, v in zip(batches, values, strict=True)]


class ValueLoss:
    """One microbatch's share of the critic's loss, and its metrics.

    Means and explained variance are of the values before the update, which the advantages were made
    with: they tell how good a baseline those had.
    """

    def __init__(self, context: Axis, *, clip: float) -> None:
        """
        Args:
            clip: distance that a value may move from its value before the update; 0 does not clip.
        """
        self.context = context
        self.clip = clip

    def __call__(self, output: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        """[B, s, 1] -> (share, metrics); the microbatch has values and returns."""
        current = read_values(output, batch, context=self.context)
        terms, clipped = value_loss(current, batch.values, batch.returns, clip=self.clip)
        loss = (batch.weights * terms).sum()
        returns, errors = batch.returns.double(), batch.returns.double() - batch.values.double()
        count = float(len(returns))
        total, value, moved, target, target_squares, error, error_squares = fetched_sums(
            *(loss, batch.values, clipped),
            *(returns, returns.square(), errors, errors.square()),
        )
        return loss, {
            "critic/loss": Mean(total, 0.0),
            "critic/value_mean": Mean(value, count),
            "critic/return_mean": Mean(target, count),
            "critic/clip_fraction": Mean(moved, count),
            "critic/explained_variance": ExplainedVariance(
                target, target_squares, error, error_squares, count
            ),
        }
