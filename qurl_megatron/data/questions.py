"""Questions with exact answers, from a file or from a procedural task.

A hash of its text puts each question of a task on the training or the held-out side, so the two are
disjoint whatever sizes and seeds are asked for.
"""

import dataclasses
import hashlib
import random
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qurl_megatron.config import DataConfig
from qurl_megatron.data.rows import Columns, DataFile, Question, read_file
from qurl_megatron.kit.errors import ConfigError

TRAIN_SEED, HELD_OUT_SEED = 1, 1_000_000_001  # far apart: item i of a task is drawn with seed + i
HELD_OUT_SHARE = 8  # one text in eight is held out


def data_files(config: DataConfig, *, held_out: bool, answers: bool) -> dict[str, DataFile]:
    """Read the files of a run, by key; none where it has a task.

    Args:
        held_out: it asks held-out prompts, too.
        answers: every row must have one; otherwise a missing one is empty.

    Raises:
        ConfigError: a missing, empty or malformed file; no data.eval_path beside data.path.
    """
    if not config.path:
        return {}
    files = {"data.path": _data_file(config, "path", answers)}
    if held_out:
        files["data.eval_path"] = _data_file(config, "eval_path", answers)
    return files


def training_questions(config: DataConfig) -> list[Question]:
    """Return all of them, in the order of the file or the task.

    Raises:
        ConfigError: as ``data_files``; an unknown task, or wrong arguments for it.
    """
    if config.path:
        return _data_file(config, "path").questions
    return _task_questions(config, config.task_size, held_out=False)


def held_out_questions(config: DataConfig, count: int, *, answers: bool = True) -> list[Question]:
    """Return the first ``count`` held-out questions; all of them if a file has fewer.

    Args:
        answers: as for ``data_files``.

    Raises:
        ConfigError: as for training; a task too small.
    """
    if config.path:
        return _data_file(config, "eval_path", answers).questions[:count]
    return _task_questions(config, count, held_out=True)


def _data_file(config: DataConfig, key: str, answers: bool = True) -> DataFile:
    path = getattr(config, key)
    if not path:
        raise ConfigError(
            "held-out prompts are asked for, but data.eval_path is missing beside data.path; "
            "set it or train.eval_prompts=0"
        )
    columns = Columns(config.prompt_key, config.answer_key, needed=answers)
    return read_file(Path(path), f"data.{key}={path}", columns)


def _task_questions(config: DataConfig, count: int, *, held_out: bool) -> list[Question]:
    """Training questions follow the task's own distribution; held-out ones are distinct."""
    kind, seed, patience = "training", TRAIN_SEED, 2
    if held_out:
        kind, seed, patience = "distinct held-out", HELD_OUT_SEED, 8
    # A task may have few questions: draw on, but not for ever, until enough fall on the right side.
    draws = patience * HELD_OUT_SHARE * count + 1000
    items = _task(config, seed=seed, size=draws)
    questions: list[Question] = []
    seen_texts: set[str] = set()
    for i in range(draws):
        if len(questions) == count:
            return questions
        text, answer = items[i]["question"], items[i]["answer"]
        if not isinstance(answer, str):
            raise ConfigError(
                f"data.task={config.task} has no single written answer (got {answer!r:.80}); only "
                "tasks with exact answers can be scored"
            )
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
        text_is_held_out = int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0
        if text_is_held_out == held_out and not (held_out and text in seen_texts):
            seen_texts.add(text)
            questions.append(Question(text, answer))
    raise ConfigError(
        f"data.task={config.task} with data.task_args={config.task_args} gave {len(questions)} "
        f"{kind} questions in {draws} draws, {count} are asked for; widen its arguments or ask for "
        "fewer"
    )


def _task(config: DataConfig, *, seed: int, size: int) -> Any:
    """Return the items of a reasoning-gym task, or of our own, by their numbers.

    Raises:
        ConfigError: there is none of that name, or it takes no such arguments.
    """
    tasks: dict[str, tuple[Any, Any]] = {"sort_digits": (SortDigits, SortDigitsConfig)}
    if config.task not in tasks:
        from reasoning_gym.factory import DATASETS  # 2 s to import

        tasks |= DATASETS
    if config.task not in tasks:
        hint = f"known: {', '.join(tasks)}"
        if close := get_close_matches(config.task, tasks, n=3):
            hint = f"did you mean {' or '.join(close)}?"
        raise ConfigError(f"data.task={config.task} is not a reasoning-gym task; {hint}")
    dataset, settings = tasks[config.task]
    known_arguments = {f.name for f in dataclasses.fields(settings)} - {"seed", "size"}
    for name in config.task_args:
        if name not in known_arguments:
            raise ConfigError(
                f"data.task_args: {config.task} takes no {name}; "
                f"it takes {', '.join(sorted(known_arguments))}"
            )
    try:
        items = dataset(config=settings(seed=seed, size=size, **config.task_args))
        items[0]
    except Exception as error:  # tasks check their arguments by asserts, or stumble over them
        raise ConfigError(
            f"data.task_args={config.task_args} does not suit data.task={config.task}: {error}"
        ) from None
    return items


@dataclass
class SortDigitsConfig:
    digits: int = 16
    seed: int = 0
    size: int = 500


class SortDigits:
    """A task of our own among reasoning-gym's: write a list of digits in order.

    Its answers are as long as one likes while its prompts stay short, and one wrong token spoils
    the whole: the horizon over which a rollout policy's errors add up is an argument. A small model
    learns it in a minute. Item i is drawn with seed + i, as reasoning-gym's own tasks do.

        sort 3 1 4 1 =   ->   1 1 3 4
    """

    def __init__(self, config: SortDigitsConfig) -> None:
        assert config.digits >= 1, "digits must be 1 or more"
        self.config = config

    def __getitem__(self, index: int) -> dict[str, str]:
        draw = random.Random(self.config.seed + index)
        digits = [draw.randrange(10) for _ in range(self.config.digits)]
        return {
            "question": f"sort {' '.join(map(str, digits))} =",
            "answer": " ".join(map(str, sorted(digits))),
        }
