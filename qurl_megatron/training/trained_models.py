"""The models that a recipe trains, as a rank holds them."""

from qurl_megatron.actor.critic import Critic
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.actor.policy import Policy
from qurl_megatron.actor.reference import Reference
from qurl_megatron.config import RunConfig
from qurl_megatron.training.alignment import alignment


def models_of(config: RunConfig, ranks: Ranks) -> tuple[Policy, Critic | None]:
    """The policy, with a reference where the recipe holds it to one; and its critic, if any."""
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
    """The policy alone, its layers aligned with the engines' where ``train.align`` asks for it."""
    return Policy.build(
        config.model,
        config.parallel,
        config.policy_optimizer,
        ranks,
        uaq_scale=config.quant.uaq_scale,
        reference=reference,
        align=alignment(config, ranks.device),
    )
