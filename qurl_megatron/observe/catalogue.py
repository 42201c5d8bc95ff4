"""Every metric that a run logs, with its description and unit; the report lists them in this order.

A metric's name is "group/rest". A name with an asterisk stands for a family: the values of one's
own loss, or the mean, the extremes and the spread of one quantity.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from qurl_megatron.kit.errors import CAUSES

Unit = Literal["", "share", "near 1", "seconds"]
"""share: in [0, 1] and read as a percentage; near 1: the distance from 1 is the news."""


@dataclass(frozen=True)
class Known:
    """One metric."""

    says: str
    unit: Unit = ""


METRICS: dict[str, Known] = {
    "reward/mean": Known("mean reward of the responses that are learnt from"),
    "reward/std": Known("its spread over these responses"),
    "reward/mean_generated": Known("the mean with the groups that dynamic sampling dropped"),
    "reward/overlong_penalty": Known("mean that the penalty for long responses adds"),
    "reward/failed_fraction": Known("responses that got no score", "share"),
    **{f"reward/{cause}": Known(f"responses whose scoring {end}") for cause, end in CAUSES.items()},
    "eval/accuracy": Known("right answers on held-out prompts", "share"),
    "eval/reward": Known("mean reward on held-out prompts, where scores are not 0 or 1"),
    "eval/failed_fraction": Known("held-out responses that got no score", "share"),
    "response/length": Known("mean tokens of a response"),
    "response/truncated": Known("responses that the length limit cut off", "share"),
    "environment/turns": Known("mean turns of a response"),
    "environment/tokens": Known("mean tokens of a response that the environment wrote"),
    "environment/left_out": Known("responses that the environment's words had no room in", "share"),
    "environment/failed_fraction": Known("responses whose environment failed", "share"),
    "environment/timeouts": Known("calls that took too long"),
    "environment/crashes": Known("calls that ended the worker"),
    "environment/exceptions": Known("calls that raised"),
    "environment/invalid": Known("calls that returned no message"),
    "advantage/abs_mean": Known("mean size of a token's advantage; 0 teaches nothing"),
    "policy/loss": Known("policy loss, mean over the step's updates"),
    "policy/clip_fraction": Known("tokens beyond a clip bound that counts", "share"),
    "policy/dual_clip_fraction": Known("tokens at the dual clip", "share"),
    "policy/ratio_mean": Known("mean probability ratio of current to proximal policy", "near 1"),
    "policy/entropy": Known("mean entropy per token, in nats"),
    "rollout/routes_missing_fraction": Known("tokens whose experts no engine told", "share"),
    "policy/expert_load_max": Known("tokens of the busiest expert over the mean of its layer"),
    "policy/experts_idle_fraction": Known("experts that no token went to", "share"),
    "policy/router_aux_loss": Known(
        "auxiliary loss before its coefficient, mean over layers and responses", "near 1"
    ),
    "policy/routes_differ_fraction": Known(
        "tokens and layers whose replayed experts the router would not have chosen", "share"
    ),
    "policy/kl_from_proximal": Known("KL from the policy before the update, k3"),
    "loss/*": Known("mean over tokens of this value of yours"),
    "acr/active_fraction": Known("tokens whose clip bound was raised", "share"),
    "acr/rescued_fraction": Known("tokens that the bound without ACR would have clipped", "share"),
    "acr/gradient_share": Known(
        "rescued tokens in the sum of |w R A| over unclipped ones", "share"
    ),
    "correction/weight_mean": Known("mean importance weight, truncated", "near 1"),
    "correction/banded_fraction": Known("tokens outside IcePop's band", "share"),
    "correction/rejected_responses": Known("responses that were rejected", "share"),
    "correction/rejected_fraction": Known("tokens of rejected responses", "share"),
    "rollout/kl_k1": Known("KL of behaviour from proximal policy, k1"),
    "rollout/kl_k3": Known("KL of behaviour from proximal policy, k3"),
    "rollout/rho_mean": Known("mean ratio of proximal to behaviour policy", "near 1"),
    "rollout/rho_max": Known("largest ratio of a token"),
    "rollout/rho_min": Known("smallest ratio of a token"),
    "rollout/rho_std": Known("spread of the ratio over tokens"),
    "rollout/rho_beyond": Known("tokens whose ratio no quantization explains"),
    "rollout/tokens": Known("tokens that engines sampled and the policy scored"),
    "rollout/ess": Known("effective sample size of the ratios", "share"),
    "rollout/truncated_weight_fraction": Known("tokens whose ratio is above C", "share"),
    "rollout/low_weight_fraction": Known("tokens whose ratio is below 1 / C", "share"),
    "rollout/log_prob_diff_abs": Known("mean size of a token's log ratio"),
    "rollout/prob_diff_*": Known("difference of a token's two probabilities"),
    "rollout/rho_sequence_*": Known("product of the ratios of a response"),
    "rollout/rho_geometric_*": Known("geometric mean of a response's ratios", "near 1"),
    "rollout/ppl_proximal": Known("mean perplexity of a response to the proximal policy"),
    "rollout/ppl_behaviour": Known("mean perplexity of a response to the behaviour policy"),
    "reference/kl": Known("KL from the reference policy"),
    "critic/loss": Known("value loss, mean over the step's updates"),
    "critic/value_mean": Known("mean value of a token before the update"),
    "critic/return_mean": Known("mean return of a token"),
    "critic/explained_variance": Known("share of the returns' variance that values explain"),
    "critic/clip_fraction": Known("values beyond the clip range", "share"),
    "critic/grad_norm": Known("norm of the critic's gradient, before clipping"),
    "critic/lr": Known("learning rate of the critic"),
    "optimizer/grad_norm": Known("norm of the policy's gradient, before clipping"),
    "optimizer/lr": Known("learning rate of the policy"),
    "optimizer/weight_norm": Known("norm of all weights after the step"),
    "quant/code_flip_rate": Known("codes that changed since the version before", "share"),
    "quant/weight_update": Known("squared size of the update, relative to the weights (Eq. 13)"),
    "quant/weight_error": Known("squared quantization error, relative to the weights (Eq. 14)"),
    "quant/update_passed": Known("how much of the update reaches the quantized policy; 1: all"),
    "quant/update_cosine": Known("cosine of the update and what the quantized policy sees of it"),
    "train/passes": Known("forward/backward passes of the busiest rank"),
    "train/padding_fraction": Known("positions that hold padding", "share"),
    "throughput/rollout_tokens_per_s": Known("tokens that engines generated, per second"),
    "throughput/train_tokens_per_s": Known(
        "tokens of prompts and responses trained on, per second"
    ),
    "time/step": Known("the whole step, without saving and evaluating", "seconds"),
    "time/rollout": Known("waiting for responses", "seconds"),
    "time/reward": Known("waiting for scores", "seconds"),
    "time/score": Known("log-probs and values before the update", "seconds"),
    "time/train": Known("forward, backward and optimizer", "seconds"),
    "time/publish": Known("sending the new version to the engines", "seconds"),
    "sync/version": Known("version that responses should come from"),
    "sync/staleness": Known("versions between that and the oldest token"),
    "sync/quantize_s": Known("quantizing, on the slowest rank", "seconds"),
    "sync/put_s": Known("handing over the bytes, on the slowest rank", "seconds"),
    "sync/send_s": Known("the same, and waiting for ranks and engines", "seconds"),
    "sync/load_s": Known("engines loading", "seconds"),
    "sync/paused_s": Known("engines paused", "seconds"),
    "sync/bytes": Known("bytes that were sent"),
    "sync/loaded_bytes": Known("bytes that engines loaded, all together"),
    "sync/buffer_mb": Known("MiB of the buckets on one rank"),
    "fleet/serving": Known("engines that serve"),
    "fleet/restarts": Known("engines that were restarted"),
    "fleet/retries": Known("responses that another engine had to finish"),
    "sampling/kept_fraction": Known("groups whose rewards differ", "share"),
    "sampling/all_right_fraction": Known("groups that are all right", "share"),
    "sampling/all_wrong_fraction": Known("groups that are all wrong", "share"),
    "sampling/refills": Known("further rounds of prompts"),
    "sampling/surplus": Known("useful groups more than the step takes"),
    "sampling/unfilled": Known("useful groups that are missing"),
    "guard/tripped": Known("1 while a threshold is crossed for long enough"),
    "guard/*": Known("steps in a row beyond this threshold of the section guard"),
}


def known(name: str) -> Known:
    """Return the entry of a metric; an empty one if no run of ours logs it."""
    families = (entry for pattern, entry in METRICS.items() if fnmatchcase(name, pattern))
    return METRICS.get(name) or next(families, Known(""))
