"""Every metric that a run logs: where the report lists it, how its value reads, what it says.

A metric's name is "group/rest". Families have a name that is only known to the run, such as a
reward's in a mix; they are listed with an ellipsis.
"""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["", "share", "near 1", "seconds", "name"]
"""share: in [0, 1] and read as a percentage; near 1: the distance from 1 is the news; name: a whole
number that counts nothing."""


@dataclass(frozen=True)
class Known:
    """One metric."""

    says: str
    unit: Unit = ""


@dataclass(frozen=True)
class MetricGroup:
    """Metrics whose names begin alike."""

    heading: str
    metrics: dict[str, Known]  # by the rest of the name


def _share(says: str) -> Known:
    return Known(says, "share")


def _seconds(says: str) -> Known:
    return Known(says, "seconds")


GROUPS: dict[str, MetricGroup] = {
    "data": MetricGroup(
        "Prompts",
        {
            "too_long": Known("training prompts that are too long"),
            "held_out_too_long": Known("held-out prompts that are too long"),
        },
    ),
    "reward": MetricGroup(
        "Reward",
        {
            "mean": Known("mean reward of the responses that are learnt from"),
            "std": Known("its spread over these responses"),
            "mean_generated": Known("the mean with the groups that dynamic sampling dropped"),
            "overlong_penalty": Known("mean that the penalty for long responses adds"),
            "failed_fraction": _share("responses that got no score"),
            "timeouts": Known("responses whose scoring took too long"),
            "crashes": Known("responses whose scoring ended the worker"),
            "exceptions": Known("responses whose scoring raised"),
            "invalid": Known("responses whose score was no finite number"),
            "unanswered": Known("responses that a reward server did not answer"),
            "refused": Known("responses that a reward server answered with something else"),
            "environment": Known("responses that got no score because their environment failed"),
            "measured_since": Known("step after which rewards are measured as they are now"),
        },
    ),
    "eval": MetricGroup(
        "Evaluation",
        {
            "accuracy": _share("right answers on held-out prompts"),
            "reward": Known("mean reward on held-out prompts, where scores are not 0 or 1"),
            "measured_since": Known("step after which evaluations are measured as they are now"),
            "failed_fraction": _share("held-out responses that got no score"),
        },
    ),
    "response": MetricGroup(
        "Responses",
        {
            "length": Known("mean tokens of a response"),
            "truncated": _share("responses that the length limit cut off"),
        },
    ),
    "environment": MetricGroup(
        "Environment",
        {
            "turns": Known("mean turns of a response"),
            "tokens": Known("mean tokens of a response that the environment wrote"),
            "left_out": _share("responses that ended as the environment's words had no room"),
            "failed_fraction": _share("responses whose environment failed"),
            "timeouts": Known("calls that took too long"),
            "crashes": Known("calls that ended the worker"),
            "exceptions": Known("calls that raised"),
            "invalid": Known("calls that returned no message"),
        },
    ),
    "advantage": MetricGroup(
        "Advantages", {"abs_mean": Known("mean size of a token's advantage; 0 teaches nothing")}
    ),
    "policy": MetricGroup(
        "Policy",
        {
            "loss": Known("policy loss, mean over the step's updates"),
            "clip_fraction": _share("tokens beyond a clip bound that counts"),
            "dual_clip_fraction": _share("tokens at the dual clip"),
            "ratio_mean": Known("mean probability ratio of current to proximal policy", "near 1"),
            "entropy": Known("mean entropy per token, in nats"),
            "kl_from_proximal": Known("KL from the policy before the update, k3"),
        },
    ),
    "loss": MetricGroup("Your own loss", {"...": Known("mean over tokens of this value of yours")}),
    "acr": MetricGroup(
        "Adaptive clip range",
        {
            "active_fraction": _share("tokens whose clip bound was raised"),
            "rescued_fraction": _share("tokens that the bound without ACR would have clipped"),
        },
    ),
    "correction": MetricGroup(
        "Correction of the mismatch",
        {
            "weight_mean": Known("mean importance weight, truncated and scaled", "near 1"),
            "weight_scale": Known("what weights are multiplied by to have a mean of 1", "near 1"),
            "banded_fraction": _share("tokens outside IcePop's band"),
            "rejected_responses": _share("responses that were rejected"),
            "rejected_fraction": _share("tokens of rejected responses"),
        },
    ),
    "rollout": MetricGroup(
        "Behaviour and proximal policy",
        {
            "kl_k1": Known("KL of behaviour from proximal policy, k1"),
            "kl_k3": Known("KL of behaviour from proximal policy, k3"),
            "rho_mean": Known("mean ratio of proximal to behaviour policy", "near 1"),
            "rho_max": Known("largest ratio of a token"),
            "rho_min": Known("smallest ratio of a token"),
            "rho_std": Known("spread of the ratio over tokens"),
            "rho_deviation": Known("mean distance of the ratio from 1"),
            "rho_beyond": Known("tokens whose ratio no quantization explains"),
            "tokens": Known("tokens that engines sampled and the policy scored"),
            "ess": _share("effective sample size of the ratios"),
            "chi2_token": Known("mean squared ratio of tokens, less 1"),
            "chi2_sequence": Known("mean squared product of ratios of a response, less 1"),
            "truncated_weight_fraction": _share("tokens whose ratio is above C"),
            "low_weight_fraction": _share("tokens whose ratio is below 1 / C"),
            "log_prob_diff_abs": Known("mean size of a token's log ratio"),
            "mult_prob_error": Known("mean of exp of that size", "near 1"),
            "prob_diff_mean": Known("mean difference of a token's two probabilities"),
            "prob_diff_max": Known("largest difference of a token's two probabilities"),
            "prob_diff_std": Known("spread of the difference of the two probabilities"),
            "prob_correlation": Known("correlation of the two probabilities", "near 1"),
            "rho_sequence_mean": Known("mean product of the ratios of a response"),
            "rho_sequence_max": Known("largest product of the ratios of a response"),
            "rho_sequence_min": Known("smallest product of the ratios of a response"),
            "rho_geometric_mean": Known("mean geometric mean of a response's ratios", "near 1"),
            "rho_geometric_max": Known("largest geometric mean of a response's ratios", "near 1"),
            "rho_geometric_min": Known("smallest geometric mean of a response's ratios", "near 1"),
            "ppl_proximal": Known("mean perplexity of a response to the proximal policy"),
            "ppl_behaviour": Known("mean perplexity of a response to the behaviour policy"),
            "ppl_ratio": Known("mean ratio of these, proximal over behaviour", "near 1"),
            "log_ppl_proximal": Known("mean log perplexity to the proximal policy"),
            "log_ppl_behaviour": Known("mean log perplexity to the behaviour policy"),
            "log_ppl_diff_mean": Known("mean difference of the log perplexities"),
            "log_ppl_diff_abs": Known("mean size of their difference"),
            "log_ppl_diff_max": Known("largest difference of the log perplexities"),
            "log_ppl_diff_min": Known("smallest difference of the log perplexities"),
        },
    ),
    "reference": MetricGroup("Reference policy", {"kl": Known("KL from the reference policy")}),
    "critic": MetricGroup(
        "Critic",
        {
            "loss": Known("value loss, mean over the step's updates"),
            "value_mean": Known("mean value of a token before the update"),
            "return_mean": Known("mean return of a token"),
            "explained_variance": Known("share of the returns' variance that values explain"),
            "clip_fraction": _share("values beyond the clip range"),
            "grad_norm": Known("norm of the critic's gradient, before clipping"),
            "lr": Known("learning rate of the critic"),
        },
    ),
    "optimizer": MetricGroup(
        "Optimizer",
        {
            "grad_norm": Known("norm of the policy's gradient, before clipping"),
            "lr": Known("learning rate of the policy"),
            "weight_norm": Known("norm of all weights after the step"),
        },
    ),
    "quant": MetricGroup(
        "Quantization",
        {
            "code_flip_rate": _share("codes that changed since the version before"),
            "weight_update": Known("squared size of the update, relative to the weights (Eq. 13)"),
            "weight_error": Known("squared quantization error, relative to the weights (Eq. 14)"),
            "update_passed": Known("how much of the update reaches the quantized policy; 1: all"),
            "update_cosine": Known("cosine of the update and what the quantized policy sees of it"),
        },
    ),
    "train": MetricGroup(
        "Passes",
        {
            "passes": Known("forward/backward passes of the busiest rank"),
            "padding_fraction": _share("positions that hold padding"),
        },
    ),
    "throughput": MetricGroup(
        "Throughput, tokens/s",
        {
            "rollout_tokens_per_s": Known("tokens that engines generated, per second"),
            "train_tokens_per_s": Known("tokens of prompts and responses trained on, per second"),
        },
    ),
    "time": MetricGroup(
        "Seconds",
        {
            "step": _seconds("the whole step, without saving and evaluating"),
            "rollout": _seconds("waiting for responses"),
            "reward": _seconds("waiting for scores"),
            "score": _seconds("log-probs and values before the update"),
            "train": _seconds("forward, backward and optimizer"),
            "publish": _seconds("sending the new version to the engines"),
            "restart": _seconds("starting engines for unquantized weights"),
        },
    ),
    "sync": MetricGroup(
        "Weight versions",
        {
            "version": Known("version that responses should come from", "name"),
            "staleness": Known("versions between that and the oldest token"),
            "quantize_s": _seconds("quantizing, on the slowest rank"),
            "put_s": _seconds("handing over the bytes, on the slowest rank"),
            "send_s": _seconds("the same, and waiting for ranks and engines"),
            "load_s": _seconds("engines loading"),
            "paused_s": _seconds("engines paused"),
            "bytes": Known("bytes that were sent"),
            "loaded_bytes": Known("bytes that engines loaded, all together"),
            "buffer_mb": Known("MiB of the buckets on one rank"),
        },
    ),
    "fleet": MetricGroup(
        "Fleet",
        {
            "serving": Known("engines that serve"),
            "restarts": Known("engines that were restarted"),
            "retries": Known("responses that another engine had to finish"),
            "aborted": Known("responses that were aborted for taking too long"),
        },
    ),
    "sampling": MetricGroup(
        "Dynamic sampling",
        {
            "kept_fraction": _share("groups whose rewards differ"),
            "all_right_fraction": _share("groups that are all right"),
            "all_wrong_fraction": _share("groups that are all wrong"),
            "refills": Known("further rounds of prompts"),
            "surplus": Known("useful groups more than the step takes"),
            "unfilled": Known("useful groups that are missing"),
        },
    ),
    "guard": MetricGroup(
        "Collapse guard",
        {
            "tripped": Known("1 while a threshold is crossed for long enough"),
            "kl": Known("steps in a row beyond guard.kl_above"),
            "rho": Known("steps in a row beyond guard.rho_above"),
            "reward": Known("steps in a row below guard.reward_below"),
            "entropy_low": Known("steps in a row below guard.entropy_below"),
            "entropy_high": Known("steps in a row beyond guard.entropy_above"),
        },
    ),
}
"""In the order of the report, by the first part of a metric's name."""


def known(name: str) -> Known | None:
    """What is known of a metric; None of one that no run of ours logs."""
    prefix, _, suffix = name.partition("/")
    metrics = GROUPS[prefix].metrics if prefix in GROUPS else {}
    return metrics.get(suffix) or metrics.get("...")


def unit(name: str) -> Unit:
    """How a metric's value reads; plainly where it is not known."""
    entry = known(name)
    return entry.unit if entry else ""
