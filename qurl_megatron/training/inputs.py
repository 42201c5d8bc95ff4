"""The data of a run, read and checked before models load.

``qurl train`` reads the files before it starts a rank, and the leading rank once more, with the
tokenizer, before it loads the model; under torchrun or srun that rank does both, and reads them
once. ``qurl show --dry-run`` does both, the second where there is a tokenizer.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.config import RunConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.questions import data_files, held_out_questions, training_questions
from qurl_megatron.data.rows import DataFile
from qurl_megatron.data.tokenizer import FILES, Tokenizer
from qurl_megatron.engines.starting import refuse_not_installed
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.text import how_many
from qurl_megatron.rewards import check_rewards
from qurl_megatron.rewards.environment import check_environment
from qurl_megatron.tensors.arch import arch_of
from qurl_megatron.training.footprint import find_models
from qurl_megatron.training.state import TrainState
from qurl_megatron.training.too_long import longest_prompt, refuse_endless_responses


@dataclass(frozen=True)
class LookedOver:
    """Findings on a run before it starts."""

    mistakes: list[str]  # each of them prevents the start
    data: list[str]  # remarks on the data, a sentence each


def look_over(config: RunConfig, model_config: Path | None) -> LookedOver:
    """Check all that ``qurl train`` refuses before it loads a model, but for layouts.

    Args:
        model_config: as of ``find_models``.

    Raises:
        ConfigError: there is no config.json to check against.
    """
    arch = find_models(config, model_config).policy
    data: list[str] = []
    checks = (
        partial(arch.refuse_without_engine, f"model.path={config.model.path}: "),
        partial(refuse_endless_responses, config.rollout, arch),
        partial(refuse_without_tokenizer, config),
        partial(refuse_not_installed, config.rollout),
        partial(check_rewards, config.reward),
        partial(check_environment, config.rollout),
        partial(check_own_loss, config),
        lambda: data.extend(describe_data(config)),
    )
    mistakes = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            mistakes.append(str(error))
    return LookedOver(list(dict.fromkeys(mistakes)), data)


def check_own_loss(config: RunConfig) -> None:
    """Try the user's loss; raises ``ConfigError`` as ``own_loss.check_loss``."""
    if config.algo.function:
        from qurl_megatron.training.own_loss import check_loss  # brings torch

        check_loss(config.algo, config.correction)


def refuse_without_tokenizer(config: RunConfig) -> None:
    """Raise ``ConfigError`` where the model is there and its tokenizer is not."""
    if Path(config.model.path).is_dir():
        Tokenizer(description_of(config.model.path))


def check_files(config: RunConfig) -> dict[str, DataFile]:
    """The data files of a run, by key; none where it has a task.

    Raises:
        ConfigError: a data file is missing, empty or malformed, the reward needs answers that a
            row does not have, or the model to be made has no chat template for its prompts.
    """
    files = data_files(
        config.data,
        held_out=config.train.eval_prompts > 0,
        answers=config.reward.needs_answers,
    )
    _refuse_chats_without_template(config, files)
    return files


def _refuse_chats_without_template(config: RunConfig, files: dict[str, DataFile]) -> None:
    """Before a model is made that has no chat template."""
    path = Path(config.model.path)
    if not config.warmstart.steps or path.exists():
        return
    lacks = f"the small model that warmstart.steps makes at model.path={path} has no chat template"
    model = "set model.path to an instruction-tuned model"
    if config.data.chat:
        raise ConfigError(f"data.chat=true, but {lacks}; set data.chat=false, or {model}")
    for file in files.values():
        if chat := next((question for question in file.questions if question.turns), None):
            text = f"{file.prompt_key}.{len(chat.turns) - 1}.content"
            raise ConfigError(
                f"{chat.place}: the prompt is a chat, but {lacks}; take the text of one turn alone "
                f"(data.prompt_key={text}), or {model}"
            )


def doubts(config: RunConfig, files: dict[str, DataFile]) -> list[str]:
    """Return doubts about data that is valid, but probably not intended, a sentence each."""
    data, eval_prompts, remarks = config.data, config.train.eval_prompts, []
    training, held_out = files.get("data.path"), files.get("data.eval_path")
    source = training.name if training else f"data.task_size={data.task_size}"
    count = len(training.questions) if training else data.task_size
    if count < data.prompts_per_step:
        remarks.append(
            f"{source}: {how_many(count, 'prompt')}, fewer than data.prompts_per_step="
            f"{data.prompts_per_step}, so one step asks them again and again; lower that, or add "
            "prompts"
        )
    if training and held_out:
        questions = held_out.questions[:eval_prompts]
        if len(questions) < eval_prompts:
            remarks.append(
                f"{held_out.name}: {how_many(len(questions), 'prompt')}, fewer than "
                f"train.eval_prompts={eval_prompts}; evaluations ask these {len(questions)}"
            )
        training_texts = {question.text for question in training.questions}
        if same := sum(question.text in training_texts for question in questions):
            remarks.append(
                f"held-out prompts that are in {training.name}, too: {same} of {len(questions)}; a "
                "run trains on them, so take them out of one of the two files"
            )
    return remarks


def read_prompts(
    config: RunConfig,
    state: TrainState | None = None,
    files: dict[str, DataFile] | None = None,
) -> PromptStream:
    """Read and encode the prompts of a run.

    Args:
        state: the state that the run goes on from.
        files: as of ``check_files``, where this process has read them already.

    Raises:
        ConfigError: as ``check_files``; prompts are too long, or differ from the state's.
    """
    described = description_of(config.model.path)
    prompts = PromptStream(
        config.data,
        Tokenizer(described),
        seed=config.train.seed,
        held_out=config.train.eval_prompts,
        answers=config.reward.needs_answers,
        files=files,
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
    data, held_out = config.data, config.train.eval_prompts
    folder = Path(config.model.path)
    if folder.is_dir():
        described = description_of(folder)
        if any((described / name).is_file() for name in FILES):
            prompts = read_prompts(config)
            return [*prompts.remarks(), *doubts(config, prompts.files)]
    files = check_files(config)
    if not files:
        training_questions(data)
        held_out_questions(data, held_out)
    return [
        *(file.summary for file in files.values()),
        *doubts(config, files),
        f"how long prompts are is not checked: model.path={folder} "
        + (f"holds no {FILES[0]}" if folder.is_dir() else "is not there yet"),
    ]
