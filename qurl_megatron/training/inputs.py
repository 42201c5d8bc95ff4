"""The inputs of a run, checked before models load: its data, the room for it, its checkpoints.

``qurl train`` reads the files before it starts a rank, and the leading rank once more, with the
tokenizer, before it loads the model; under torchrun or srun that rank does both, and reads them
once. ``qurl show --dry-run`` does both, the second where there is a tokenizer.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.config import AlgoConfig, CorrectionConfig, RolloutConfig, RunConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.questions import data_files, held_out_questions, training_questions
from qurl_megatron.data.rows import DataFile
from qurl_megatron.data.tokenizer import FILES, Tokenizer
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.rewards.own_code import find_named
from qurl_megatron.tensors.arch import Arch, arch_of
from qurl_megatron.training.state import TrainState


@cache
def find_loss(name: str) -> Callable[..., Any]:
    """Return the function that ``algo.function`` names; importing its module runs it.

    Raises:
        ConfigError: there is none.
    """
    return find_named(f"algo.function={name}", "function")


def check_own_loss(algo: AlgoConfig, correction: CorrectionConfig) -> None:
    """Try the user's loss; raise ``ConfigError`` as ``find_loss`` and ``try_loss`` do."""
    if algo.function:
        from qurl_megatron.algo.objective import Limits  # brings torch
        from qurl_megatron.algo.own_loss import try_loss

        limits = Limits.of(algo, correction)
        try_loss(find_loss(algo.function), limits, f"algo.function={algo.function}")


def refuse_without_tokenizer(config: RunConfig) -> None:
    """Raise ``ConfigError`` where the model is there and its tokenizer is not."""
    if Path(config.model.path).is_dir():
        Tokenizer(description_of(config.model.path))


def check_files(config: RunConfig) -> dict[str, DataFile]:
    """Return the data files of a run, by key; none where it has a task.

    Raises:
        ConfigError: a data file is missing, empty or malformed, the reward needs answers that a
            row does not have, or the model to be made has no chat template for its prompts.
    """
    held_out = config.train.eval_prompts > 0
    files = data_files(config.data, held_out=held_out, answers=bool(config.reward.kind))
    _refuse_chats_without_template(config, files)
    return files


def _refuse_chats_without_template(config: RunConfig, files: dict[str, DataFile]) -> None:
    """Raise ``ConfigError`` where the model to be made lacks the chat template that data needs."""
    path = Path(config.model.path)
    if not config.warmstart.steps or path.exists():
        return
    questions = [question for file in files.values() for question in file.questions]
    chat = next((question.place for question in questions if question.turns), None)
    if config.data.chat:
        chat = "data.chat=true"
    if chat:
        raise ConfigError(
            f"{chat}: a chat needs a chat template, which the small model that warmstart.steps "
            f"makes at model.path={path} does not have; set model.path to an instruction-tuned "
            "model, or ask plain text (data.chat=false, and data.prompt_key=prompt.0.content for "
            "one turn)"
        )


def doubts(config: RunConfig, files: dict[str, DataFile]) -> list[str]:
    """Return doubts about data that is valid, but probably not intended, a sentence each."""
    training, held_out = files.get("data.path"), files.get("data.eval_path")
    if not (training and held_out):
        return []
    questions = held_out.questions[: config.train.eval_prompts]
    training_texts = {question.text for question in training.questions}
    same = sum(question.text in training_texts for question in questions)
    if not same:
        return []
    return [
        f"held-out prompts that are in {training.name}, too: {same} of {len(questions)}; a run "
        "trains on them, so take them out of one of the two files"
    ]


def read_prompts(config: RunConfig, state: TrainState | None = None) -> PromptStream:
    """Read and encode the prompts of a run.

    Args:
        state: the state that the run goes on from.

    Raises:
        ConfigError: as ``check_files``; prompts are too long, or differ from the state's.
    """
    described = description_of(config.model.path)
    prompts = PromptStream(
        config.data,
        Tokenizer(described),
        seed=config.train.seed,
        held_out=config.train.eval_prompts,
        answers=bool(config.reward.kind),
    )
    limit = longest_prompt(config.rollout, arch_of(described))
    if limit is not None:
        prompts.refuse_longer(limit)
    if state and state.cursor:
        prompts.load_state_dict(state.cursor)
    return prompts


def describe_data(config: RunConfig) -> list[str]:
    """Return a dry run's remarks on the data, a sentence each.

    Raises:
        ConfigError: as ``read_prompts``.
    """
    folder, unread = Path(config.model.path), "is not there yet"
    if folder.is_dir():
        described = description_of(folder)
        if any((described / name).is_file() for name in FILES):
            prompts = read_prompts(config)
            return [*prompts.remarks(), *doubts(config, prompts.files)]
        unread = f"holds no {FILES[0]}"
    files = check_files(config)
    if not files:
        training_questions(config.data)
        held_out_questions(config.data, config.train.eval_prompts)
    return [
        *(file.summary for file in files.values()),
        *doubts(config, files),
        f"how long prompts are is not checked: model.path={folder} {unread}",
    ]


def longest_prompt(rollout: RolloutConfig, arch: Arch) -> int | None:
    """Return the longest prompt, in tokens, that leaves room for its response.

    None where engines know better: adopted ones, and SGLang with a context length of its own.

    Raises:
        ConfigError: a full response leaves not one token for its prompt.
    """
    own_length = any(argument.startswith("--context-length") for argument in rollout.engine_args)
    if own_length or rollout.adopts:
        return None
    limit = arch.max_position
    if rollout.max_new_tokens >= limit:
        raise ConfigError(
            f"rollout.max_new_tokens={rollout.max_new_tokens} leaves no room for a prompt: the "
            f"model takes {limit} tokens of prompt and response together "
            f"(max_position_embeddings in its config.json); set it below {limit}"
        )
    return limit - rollout.max_new_tokens


def sources(config: RunConfig, *, resumed: bool) -> dict[str, str]:
    """Return the checkpoints whose weights a run uses, by their keys in the recipe.

    Args:
        resumed: it has a checkpoint of its own, which holds all weights but the reference's.
    """
    reference = config.algo.kl_coef > 0
    paths = {}
    if not resumed or (reference and not config.algo.reference):
        paths["model.path"] = config.model.path
    if reference and config.algo.reference:
        paths["algo.reference"] = config.algo.reference
    return paths
