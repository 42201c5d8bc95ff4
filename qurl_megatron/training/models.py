"""The models that a recipe trains, as a rank holds them."""

import torch

from qurl_megatron.actor.aligned import Align
from qurl_megatron.actor.critic import Critic
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.actor.policy import Policy, Reference
from qurl_megatron.config import RunConfig


def models_of(config: RunConfig, ranks: Ranks) -> tuple[Policy, Critic | None]:
    """Load the policy, with a reference where the recipe has one; and its critic, if any."""
    algo = config.algo
    reference = Reference(algo.reference, algo.reference_memory) if algo.kl_coef > 0 else None
    policy = policy_of(config, ranks, reference)
    if algo.advantage != "gae":
        return policy, None
    critic = Critic.build(
        config.model, config.parallel, config.critic, config.critic_optimizer, ranks
    )
    return policy, critic


def policy_of(config: RunConfig, ranks: Ranks, reference: Reference | None = None) -> Policy:
    """Load the policy, its layers aligned with the engines' where ``train.align`` asks for it."""
    return Policy.build(
        config.model,
        config.parallel,
        config.policy_optimizer,
        ranks,
        uaq_scale=config.quant.uaq_scale,
        reference=reference,
        align=alignment(config, ranks.device),
    )


def alignment(config: RunConfig, device: torch.device) -> Align | None:
    """Return how linear layers follow the engines'; None: they compute with weights as they are.

    Args:
        device: of the policy; SGLang engines of a run on a CPU have the embedded engine's kernels.
    """
    if config.train.align == "none":
        return None
    return Align(
        scheme=config.quant.scheme,
        activations=config.train.align == "full",
        arithmetic=config.rollout.kind.arithmetic if device.type == "cuda" else "exact",
        engine_tensor=config.engine_tensor,
    )
