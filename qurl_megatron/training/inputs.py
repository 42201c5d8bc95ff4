"""The data of a run, read and checked before models load.

``qurl train`` reads the files before it starts a rank, and the leading rank once more, with the
tokenizer, before it loads the model. ``qurl show --dry-run`` does both, as far as files are there.
"""

from pathlib import Path

from qurl_megatron.config import RunConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.questions import data_files, held_out_questions, training_questions
from qurl_megatron.data.tokenizer import FILES, Tokenizer
from qurl_megatron.tensors.arch import read_arch, read_config
from qurl_megatron.training.lengths import longest_prompt
from qurl_megatron.training.state import TrainState
from qurl_megatron.weights.places import description_of


def check_files(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a data file is missing, empty or malformed, or the reward needs answers that a
            row does not have.
    """
    data_files(
        config.data,
        held_out=config.train.eval_prompts > 0,
        answers=config.reward.needs_answers,
    )


def read_prompts(config: RunConfig, state: TrainState | None = None) -> PromptStream:
    """The prompts of a run, encoded.

    Args:
        state: what the run goes on from.

    Raises:
        ConfigError: as ``check_files``; prompts are too long, or not those of ``state``.
    """
    described = description_of(config.model.path)
    prompts = PromptStream(
        config.data,
        Tokenizer(described),
        seed=config.train.seed,
        held_out=config.train.eval_prompts,
        answers=config.reward.needs_answers,
    )
    limit = longest_prompt(config.rollout, read_arch(read_config(described)))
    if limit is not None:
        prompts.refuse_longer(limit)
    if state and state.cursor:
        prompts.load_state_dict(state.cursor)
    return prompts


def describe_data(config: RunConfig) -> list[str]:
    """What a dry run says of the data, a sentence each.

    Raises:
        ConfigError: as ``read_prompts``; a file that is not there yet is a remark instead.
    """
    data, held_out = config.data, config.train.eval_prompts
    asked = ["path", "eval_path"] if held_out else ["path"]
    missing = [key for key in asked if (path := getattr(data, key)) and not Path(path).exists()]
    if data.path and missing:
        return [
            f"data.{key}={getattr(data, key)} is not there, so prompts are not checked: looked for "
            f"{Path(getattr(data, key)).absolute()}"
            for key in missing
        ]
    folder = Path(config.model.path)
    if folder.is_dir():
        described = description_of(folder)
        if any((described / name).is_file() for name in FILES):
            return read_prompts(config).remarks()
    answers = config.reward.needs_answers
    lengths = "how long prompts are is not checked: there is no tokenizer in model.path yet"
    if data.path:
        files = data_files(data, held_out=held_out > 0, answers=answers).values()
        return [*(file.summary for file in files), lengths]
    training_questions(data)
    held_out_questions(data, held_out)
    return [lengths]
