"""Which checkpoints a run takes its weights from, by its recipe alone."""

from qurl_megatron.config import RunConfig


def sources(config: RunConfig, *, resumed: bool) -> dict[str, str]:
    """The checkpoints whose weights a run uses, by their keys in the recipe.

    Args:
        resumed: it has a checkpoint of its own, which holds all weights but the reference's.
    """
    reference = config.algo.kl_coef > 0
    paths = {}
    if not resumed or (reference and not config.algo.reference):
        paths["model.path"] = config.model.path
    if reference and config.algo.reference:
        paths["algo.reference"] = config.algo.reference
    if not resumed and config.algo.advantage == "gae" and config.critic.path:
        paths["critic.path"] = config.critic.path
    return paths
