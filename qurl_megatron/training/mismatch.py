"""How far the quantized behaviour policy is from the full-precision one it was made from.

All of it comes from two log-probs per response token. It covers all that peers log about the
mismatch of engine and trainer; docs/algorithms.md maps our names to theirs.

Shapes: N = response tokens of a microbatch, R = its responses that have any.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qurl_megatron.algo.kl import k1, k3
from qurl_megatron.algo.ratios import bounded_exp
from qurl_megatron.algo.segments import mean_per_response, sum_per_response
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.observe.metrics import EffectiveSampleSize, Max, Mean, Metric, Min, StdDev, Sum
from qurl_megatron.observe.text import how_many

BEYOND = 1e4
"""A ratio that quantization does not explain. The largest that were measured with honest engines
are 7.7 at 8 bits (docs/mismatch.md) and 1090 at 4 simulated bits (docs/results/study.md); but an
engine that reports -90 where it had -0.1 gives exp(90)."""


FAR = 1.0
"""Mean size of a step's log ratios that quantization does not explain. The quickstart's model at 4
bits, trained uncorrected with ten times its learning rate until it had collapsed, came to 0.46."""

MARGIN, ERRORS, FEWEST = 0.05, 6.0, 1000
"""By how much the mean ratio of a step may differ from 1, plus so many standard errors; and the
fewest tokens that can tell.

Whatever the two policies are, a token sampled from one has a mean ratio of 1, so the sum of these
differences is a martingale, and its error follows from the spread of tokens alone. With heavy tails
too few tokens miss the largest ratios, and with them the mean and its error come out too small: of
log ratios with a deviation of 2, far beyond ``FAR``, 1,000 tokens are 7 errors away at most. Groups
that are chosen by their rewards (``algo.dynamic_sampling``) may move it by some hundredths."""


class Alarms:
    """Warnings of results that no correct engine gives, at the 1st, 2nd, 4th, ... such step.

    A fault tends to recur in every step, and a warning for each says no more.
    """

    def __init__(self) -> None:
        self._steps = dict.fromkeys(_ALARMS, 0)

    def noticed(self, metrics: Mapping[str, float]) -> str | None:
        """Return the gravest warning on a step, where one is due.

        Args:
            metrics: of one step, all ranks together.
        """
        if not metrics.get(_TOKENS):
            return None
        for alarm in _ALARMS:
            if sentence := alarm(metrics):
                self._steps[alarm] += 1
                return sentence if self._steps[alarm].bit_count() == 1 else None  # a power of two
        return None


def _beyond(metrics: Mapping[str, float]) -> str | None:
    tokens = int(metrics[_COUNT])
    if not tokens:
        return None
    have, their = ("has", "its") if tokens == 1 else ("have", "their")
    return (
        f"{how_many(tokens, 'token')} {have} more than {BEYOND:.0f} times the probability that "
        f"{their} engine reported, the largest ratio is {metrics['rollout/rho_max']:.3g}: "
        "quantization does not explain that, so an engine reports wrong log-probs or has other "
        "weights than this run publishes; train.save_rollouts=true shows which tokens, "
        "guard.rho_above with guard.action=halt ends a run after guard.patience such steps in "
        "a row"
    )


def _far(metrics: Mapping[str, float]) -> str | None:
    mean = metrics["rollout/log_prob_diff_abs"]
    if mean <= FAR:
        return None
    return (
        f"the log ratio of a token is {mean:.3g} on average (rollout/log_prob_diff_abs), and "
        f"quantization explains none above {FAR:g}: an engine computes another model than this run "
        "trains, or has other weights than it publishes; compare the config.json that the engines "
        "read with that of model.path"
    )


def _biased(metrics: Mapping[str, float]) -> str | None:
    tokens, mean = metrics[_TOKENS], metrics["rollout/rho_mean"]
    error = metrics["rollout/rho_std"] / math.sqrt(tokens)
    if tokens < FEWEST or abs(mean - 1) <= MARGIN + ERRORS * error:
        return None
    return (
        f"the mean ratio of the {tokens:.0f} tokens is {mean:.3g}, with an error of {error:.2g}, "
        "and it is 1 for an engine that reports the probabilities it samples from, however its "
        "weights are rounded: an engine samples with settings of its own "
        "(--preferred-sampling-params), or reports log-probs without the temperature "
        "(SGLANG_RETURN_ORIGINAL_LOGPROB)"
    )


_ALARMS = (_beyond, _far, _biased)
_COUNT, _TOKENS = "rollout/rho_beyond", "rollout/tokens"


def mismatch(
    proximal: Tensor, behaviour: Tensor, owners: Tensor, responses: int, *, cap: float
) -> dict[str, Metric]:
    """Return one microbatch's metrics; merged over a step, they are the whole batch's.

    Args:
        proximal: log-probs of the full-precision policy before this update, [N].
        behaviour: log-probs the quantized engine reported while sampling, [N].
        owners: response of each token, [N] int64.
        responses: how many responses there are; empty ones do not count.
        cap: C; tokens beyond it, and below 1 / C, are counted.

    Ratios are bounded as in the objective, so every value is finite. Without tokens there is
    nothing to compare, and no largest or smallest value either.
    """
    # On the host from the start: fetched one by one, each number would wait for the device.
    proximal, behaviour = (x.detach().double().cpu() for x in (proximal, behaviour))
    owners = owners.cpu()
    log_rho = proximal - behaviour
    rho = bounded_exp(log_rho)
    prob_diff = (proximal.exp() - behaviour.exp()).abs()
    # Of responses that have tokens, each counting once, however long it is.
    some = sum_per_response(torch.ones_like(proximal), owners, responses) > 0
    log_product = sum_per_response(log_rho, owners, responses)[some]
    log_ppl_proximal = -mean_per_response(proximal, owners, responses)[some]
    log_ppl_behaviour = -mean_per_response(behaviour, owners, responses)[some]
    geometric = bounded_exp(log_ppl_behaviour - log_ppl_proximal)
    return {
        "rollout/kl_k1": _mean(k1(behaviour, proximal)),
        "rollout/kl_k3": _mean(k3(behaviour, proximal)),
        **_mean_and_extremes("rollout/rho", rho),
        _COUNT: Sum((rho > BEYOND).sum().item()),
        _TOKENS: Sum(float(len(rho))),
        "rollout/rho_std": _std(rho),
        "rollout/ess": EffectiveSampleSize(
            rho.sum().item(), rho.square().sum().item(), float(len(rho))
        ),
        "rollout/truncated_weight_fraction": _mean(rho > cap),
        "rollout/low_weight_fraction": _mean(rho < 1 / cap),
        "rollout/log_prob_diff_abs": _mean(log_rho.abs()),
        **_mean_and_max("rollout/prob_diff", prob_diff),
        "rollout/prob_diff_std": _std(prob_diff),
        **_mean_and_extremes("rollout/rho_sequence", bounded_exp(log_product)),
        **_mean_and_extremes("rollout/rho_geometric", geometric),
        # Perplexities are averaged after exp, as slime and verl do: of a response, not of a batch.
        "rollout/ppl_proximal": _mean(bounded_exp(log_ppl_proximal)),
        "rollout/ppl_behaviour": _mean(bounded_exp(log_ppl_behaviour)),
    }


def batch_mismatch(batch: TokenBatch, cap: float) -> dict[str, Metric]:
    """Return the metrics of a microbatch that has proximal log-probs."""
    responses = len(batch.lengths)
    return mismatch(batch.proximal, batch.behaviour, batch.owners, responses, cap=cap)


def _mean(values: Tensor) -> Mean:
    return Mean(values.double().sum().item(), float(len(values)))


def _std(values: Tensor) -> StdDev:
    return StdDev(values.sum().item(), values.square().sum().item(), float(len(values)))


def _mean_and_max(name: str, values: Tensor) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {f"{name}_mean": _mean(values)}
    if len(values):
        metrics[f"{name}_max"] = Max(values.max().item())
    return metrics


def _mean_and_extremes(name: str, values: Tensor) -> dict[str, Metric]:
    metrics = _mean_and_max(name, values)
    if len(values):
        metrics[f"{name}_min"] = Min(values.min().item())
    return metrics
