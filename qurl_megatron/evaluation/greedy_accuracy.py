"""How good the trained policy itself is: unquantized and greedy, on a cell's held-out questions.

What a run measures is the accuracy of its rollouts, at their precision. What one trains for is the
last checkpoint, so the study has ``qurl eval`` answer the same questions with it:

OUT/runs/naive-int4-seed-0/trained/step_000080/   held_out.jsonl, which is asked, and what it writes

It lies in the run's own folder: whoever deletes a run, to train another policy or to ask it other
questions, deletes its accuracy too.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from qurl_megatron.checkpoints.integrity import RECORD
from qurl_megatron.config import load
from qurl_megatron.data.questions import held_out_questions
from qurl_megatron.evaluation.plan import Cell, Study
from qurl_megatron.evaluation.runs import run_dir
from qurl_megatron.training.state import STATE, folders, latest

BENCHMARK = "held_out"


def due(study: Study, cell: Cell, out: Path) -> bool:
    """True where a trained cell can be evaluated like this, and has not been yet.

    Its newest checkpoint must be of the last step, else another run length was asked for meanwhile;
    SGLang cannot load it at all before it is converted, and an embedded engine in its place, which
    may take hours for a large model, must be asked for.
    """
    loadable = cell.loads_runs or study.settings.trained_by_embedded
    if not (cell.evaluated and loadable) or accuracy(cell, out) is not None:
        return False
    newest = latest(run_dir(out, cell))
    return newest is not None and newest.name == _last_step(cell)


def evaluation(study: Study, cell: Cell, out: Path, qurl: Sequence[str]) -> list[str]:
    """The ``qurl eval`` of one cell; writes what it asks."""
    folder = _folder(out, cell)
    folder.mkdir(parents=True, exist_ok=True)
    config = load(study.recipe, cell.overrides)
    questions = held_out_questions(
        config.data, config.train.eval_prompts, answers=config.reward.needs_answers
    )
    rows = [
        json.dumps({**q.metadata, "prompt": list(q.turns) or q.text, "answer": q.answer}) + "\n"
        for q in questions
    ]
    questions_file = folder / f"{BENCHMARK}.jsonl"
    questions_file.write_text("".join(rows), encoding="utf-8")
    run = ["--run", str(run_dir(out, cell)), "--out", str(folder)]
    engine = [] if cell.loads_runs else ["--backend", "embedded", "--engines", "1"]
    keys = ["--prompt-key", "prompt", "--answer-key", "answer"]
    command = [*qurl, "eval", str(questions_file), *keys, *run, *engine]
    return [*command, "--scheme", "none", "--k", "1"]


def accuracy(cell: Cell, out: Path) -> float | None:
    """Share of questions that are answered rightly; None where they have not been asked."""
    results = _folder(out, cell) / "results.json"
    if not results.is_file():
        return None
    return json.loads(results.read_text(encoding="utf-8"))["benchmarks"][BENCHMARK]["greedy"][
        "accuracy"
    ]


def empty_checkpoints(run_dir: Path) -> None:
    """Delete what a run has trained; its state and its list of files stay, so that it is known
    which run it was and resuming is refused."""
    for checkpoint in folders(run_dir):
        for path in checkpoint.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (STATE, RECORD):
                path.unlink()


def _folder(out: Path, cell: Cell) -> Path:
    return run_dir(out, cell) / "trained" / _last_step(cell)


def _last_step(cell: Cell) -> str:
    return f"step_{cell.steps:06d}"
