"""Responses that no engine has room for, found before one is started."""

from qurl_megatron.config import RolloutConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import Arch


def room(rollout: RolloutConfig, arch: Arch) -> int | None:
    """Tokens of a prompt and its response together that engines take.

    None where they know better: adopted ones, and SGLang with a context length of its own.
    """
    own = any(argument.startswith("--context-length") for argument in rollout.engine_args)
    adopted = rollout.urls or rollout.rendezvous
    return None if own or adopted else arch.max_position


def refuse_endless_responses(rollout: RolloutConfig, arch: Arch) -> None:
    """
    Raises:
        ConfigError: a response of full length leaves not one token for its prompt.
    """
    most = room(rollout, arch)
    if most is not None and rollout.max_new_tokens >= most:
        raise ConfigError(
            f"rollout.max_new_tokens={rollout.max_new_tokens} leaves no room for a prompt: the "
            f"model takes {most} tokens of prompt and response together "
            f"(max_position_embeddings in its config.json); set it below {most}"
        )


def longest_prompt(rollout: RolloutConfig, arch: Arch) -> int | None:
    """Tokens of a prompt that leave room for its response; None: engines know better."""
    most = room(rollout, arch)
    return None if most is None else most - rollout.max_new_tokens


def no_room_for_the_environment(rollout: RolloutConfig, arch: Arch, longest: int) -> str:
    """Return the reason why conversations ended before the environment's next words, and advice.

    Args:
        longest: tokens of the longest prompt.
    """
    most = longest_prompt(rollout, arch)
    fix = "raise it, or have the environment say less"
    if most is not None and longest >= most:
        fix = (
            f"the model takes no more than {arch.max_position} tokens with the prompt: have the "
            "environment say less, or leave out long prompts (data.max_prompt_tokens) and raise it"
        )
    return (
        "what the environment said next did not fit into rollout.max_new_tokens="
        f"{rollout.max_new_tokens}, which all turns and its words share; {fix}"
    )
