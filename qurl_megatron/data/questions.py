"""Questions with exact answers, from a file or from a procedural task.

A hash of its text puts each question of a task on the training or the held-out side, so the two are
disjoint whatever sizes and seeds are asked for.
"""

import dataclasses
import hashlib
from difflib import get_close_matches
from pathlib import Path

from qurl_megatron.config import DataConfig
from qurl_megatron.data.rows import Columns, DataFile, Question, read_file
from qurl_megatron.kit.errors import ConfigError

TRAIN_SEED, HELD_OUT_SEED = 1, 1_000_000_001  # far apart: item i of a task is drawn with seed + i
HELD_OUT_SHARE = 8  # one text in eight is held out


def data_file(config: DataConfig, key: str, *, answers: bool = True) -> DataFile:
    """Read the file that data.path or data.eval_path names.

    Args:
        answers: every row must have one; else those without have an empty one.

    Raises:
        ConfigError: a missing, empty or malformed file.
    """
    path = getattr(config, key)
    columns = Columns(config.prompt_key, config.answer_key, needed=answers)
    return read_file(Path(path), f"data.{key}={path}", columns)


def training_questions(config: DataConfig) -> list[Question]:
    """All of them, in the order of the file or the task.

    Raises:
        ConfigError: a missing, empty or malformed file; an unknown task, or wrong arguments for it.
    """
    if config.path:
        return data_file(config, "path").questions
    return _task_questions(config, config.task_size, held_out=False)


def held_out_questions(config: DataConfig, count: int, *, answers: bool = True) -> list[Question]:
    """The first ``count`` held-out questions; all there are where a file has fewer.

    Args:
        answers: as for ``data_file``.

    Raises:
        ConfigError: as for training; no data.eval_path beside data.path; a task too small.
    """
    if config.path:
        return held_out_file(config, answers=answers).questions[:count]
    return _task_questions(config, count, held_out=True)


def held_out_file(config: DataConfig, *, answers: bool = True) -> DataFile:
    """
    Args:
        answers: as for ``data_file``.

    Raises:
        ConfigError: as ``data_file``; none is named beside data.path.
    """
    if not config.eval_path:
        raise ConfigError(
            "held-out prompts are asked for, but data.eval_path is missing beside data.path; "
            "set it or train.eval_prompts=0"
        )
    return data_file(config, "eval_path", answers=answers)


def data_files(config: DataConfig, *, held_out: bool, answers: bool = True) -> dict[str, DataFile]:
    """The files that a run reads, by key; none where it has a task.

    Args:
        held_out: it asks held-out prompts, too.
        answers: as for ``data_file``.

    Raises:
        ConfigError: as ``held_out_file``.
    """
    if not config.path:
        return {}
    files = {"data.path": data_file(config, "path", answers=answers)}
    if held_out:
        files["data.eval_path"] = held_out_file(config, answers=answers)
    return files


def _task_questions(config: DataConfig, count: int, *, held_out: bool) -> list[Question]:
    """Training questions follow the task's own distribution; held-out ones are distinct."""
    # A task may have few questions: draw on, but not for ever, until enough fall on the right side.
    draws = (8 if held_out else 2) * HELD_OUT_SHARE * count + 1000
    task = _Task(config, seed=HELD_OUT_SEED if held_out else TRAIN_SEED, size=draws)
    questions: list[Question] = []
    seen_texts: set[str] = set()
    for i in range(draws):
        if len(questions) == count:
            return questions
        question = task.question(i)
        if _is_held_out(question.text) == held_out and not (
            held_out and question.text in seen_texts
        ):
            seen_texts.add(question.text)
            questions.append(question)
    kind = "distinct held-out" if held_out else "training"
    raise ConfigError(
        f"data.task={config.task} with data.task_args={config.task_args} gave {len(questions)} "
        f"{kind} questions in {draws} draws, {count} are asked for; widen its arguments or ask for "
        "fewer"
    )


def _is_held_out(text: str) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


class _Task:
    """A reasoning-gym task whose arguments have been checked."""

    def __init__(self, config: DataConfig, *, seed: int, size: int) -> None:
        from reasoning_gym.factory import DATASETS, create_dataset  # 2 s to import

        import qurl_megatron.data.sort_digits  # noqa: F401 - it registers itself

        self.name = config.task
        if config.task not in DATASETS:
            close = get_close_matches(config.task, DATASETS, n=3)
            hint = (
                f"did you mean {' or '.join(close)}?" if close else "known: " + ", ".join(DATASETS)
            )
            raise ConfigError(f"data.task={config.task} is not a reasoning-gym task; {hint}")
        known_arguments = {f.name for f in dataclasses.fields(DATASETS[config.task][1])} - {
            "seed",
            "size",
        }
        for name in config.task_args:
            if name not in known_arguments:
                raise ConfigError(
                    f"data.task_args: {config.task} takes no {name}; "
                    f"it takes {', '.join(sorted(known_arguments))}"
                )
        try:
            self.items = create_dataset(config.task, seed=seed, size=size, **config.task_args)
            self.items[0]
        except Exception as error:  # tasks check their arguments by asserts, or stumble over them
            raise ConfigError(
                f"data.task_args={config.task_args} does not suit data.task={config.task}: {error}"
            ) from None

    def question(self, index: int) -> Question:
        item = self.items[index]
        if not isinstance(item["answer"], str):
            raise ConfigError(
                f"data.task={self.name} has no single written answer (got {item['answer']!r:.80}); "
                "only tasks with exact answers can be scored"
            )
        return Question(item["question"], item["answer"])
