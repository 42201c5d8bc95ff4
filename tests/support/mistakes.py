"""Mistakes of somebody's first hour, as command lines, and a folder in which to make them.

``tests.unchanged`` gives another commit the same command lines.
"""

import contextlib
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from qurl_megatron.config import load, to_toml
from qurl_megatron.data.rows import Question
from qurl_megatron.training.state import TrainState
from qurl_megatron.training.warmstart import build_tokenizer
from tests.support.models import tiny_checkpoint
from tests.support.your_own_page import FILES, blocks


class Mistake(NamedTuple):
    name: str
    command: str  # behind `qurl`, given in the folder; PORT is one that is taken
    thing: str  # what the sentence says is wrong
    mend: str  # what it says to do, or what there is


TRAIN = "train mine/recipe.toml"
EVAL = "eval mine/held_out.jsonl"
MISTAKES = [
    # Recipe and command line.
    Mistake("no such command", "trian mine/recipe.toml", "'trian'", "did you mean train?"),
    Mistake("no such recipe", "train mine/recipe.tml", "mine/recipe.tml", "these ship: "),
    Mistake("text without quotes", "train mine/quotes.toml", "mine/quotes.toml", "at line 3"),
    Mistake(
        "a key misspelt",
        "train mine/typo.toml",
        "data.prompts_per_stp",
        "did you mean data.prompts_per_step?",
    ),
    Mistake("a section misspelt", "train mine/section.toml", "rewards", "did you mean reward?"),
    Mistake("an override without =", f"{TRAIN} train.steps", "'train.steps'", "section.key=value"),
    Mistake("no section", f"{TRAIN} steps=3", "'steps=3'", "did you mean train.steps=3?"),
    Mistake("a setting with dashes", f"{TRAIN} --steps 3", "--steps", ": train.steps=3"),
    # Data.
    Mistake(
        "no such file", f"{TRAIN} data.path=train.jsonl", "data.path=train.jsonl", "so that is"
    ),
    Mistake(
        "chats for a model without a template",
        f"{TRAIN} data.path=mine/chats.jsonl",
        "mine/chats.jsonl line 1",
        "data.prompt_key=prompt.0.content",
    ),
    Mistake(
        "no held-out data", f"{TRAIN} data.eval_path=", "data.eval_path", "train.eval_prompts=0"
    ),
    # Reward and environment.
    Mistake(
        "no such file of rewards",
        f"{TRAIN} reward.function=reward.py:change",
        "mine/reward.py does not exist",
        "begins at the recipe's folder",
    ),
    Mistake(
        "a reward of another name",
        f"{TRAIN} reward.function=rewards.py:chnge",
        "rewards.py has no chnge",
        "did you mean change?",
    ),
    Mistake("a file alone", f"{TRAIN} reward.function=rewards.py", "'rewards.py'", "file.py:name"),
    Mistake(
        "a reward that is no Python",
        f"{TRAIN} reward.function=syntax.py:change",
        "mine/syntax.py, line 1",
        "invalid syntax",
    ),
    Mistake(
        "no such environment",
        f"{TRAIN} rollout.environment=tool.py:Tool",
        "mine/tool.py does not exist",
        "begins at the recipe's folder",
    ),
    # Shapes and what is installed.
    Mistake(
        "heads that cannot be split",
        f"{TRAIN} parallel.tensor=3",
        "parallel.tensor=3",
        "use one of [1, 2]",
    ),
    Mistake(
        "minibatches that do not divide",
        f"{TRAIN} algo.minibatches=7",
        "256 responses must be a multiple of algo.minibatches",
        "change one of them",
    ),
    Mistake(
        "responses longer than the context",
        f"{TRAIN} rollout.max_new_tokens=4096",
        "rollout.max_new_tokens=4096",
        "set it below 1024",
    ),
    Mistake(
        "SGLang without SGLang",
        f"{TRAIN} rollout.backend=sglang rollout.sglang_python=mine/python",
        "rollout.sglang_python = mine/python does not exist",
        "make sglang",
    ),
    # The model.
    Mistake(
        "no such model",
        f"{TRAIN} model.path=Qwen/Qwen3-0.6B warmstart.steps=0",
        "model.path=Qwen/Qwen3-0.6B does not exist",
        "put the model there",
    ),
    Mistake(
        "a model of an unknown family",
        f"{TRAIN} model.path=mine/bert",
        "model_type 'bert' is not supported",
        "known: llama",
    ),
    Mistake(
        "a folder that is no model",
        f"{TRAIN} model.path=mine/nothing",
        "mine/nothing/config.json is missing",
        "must be a Hugging Face checkpoint folder",
    ),
    Mistake(
        "the tokenizer of another model",
        f"{EVAL} --model mine/foreign",
        "the tokenizer in mine/foreign",
        "copy tokenizer.json",
    ),
    # Folders of runs, and what is asked of them.
    Mistake(
        "the folder of another run",
        f"{TRAIN} train.run_dir=mine/other",
        "mine/other holds another run (quant.scheme fp8 -> int8)",
        "set train.run_dir to a new folder",
    ),
    Mistake("samples of no run", "samples mine/run", "mine/run/samples.jsonl", "`qurl train`"),
    Mistake("a report of no run", "report mine/run", "mine/run/metrics.jsonl", "`qurl train`"),
    Mistake("an evaluation of no model", EVAL, "qurl eval needs --model", "or --run"),
    Mistake(
        "an evaluation of no run",
        f"{EVAL} --run mine/run",
        "--run mine/run does not exist",
        "name the folder of a run",
    ),
    Mistake(
        "a checkpoint that is not there",
        f"{EVAL} --run mine/other --step 7",
        "--step 7",
        "it has those of steps 1",
    ),
    Mistake(
        "a reward of no such name",
        f"{EVAL} --model mine/foreign reward.kind=maths",
        "reward.kind must be one of",
        "did you mean 'math'?",
    ),
    Mistake(
        "a port that is taken",
        "serve mine/lfs --port PORT",
        "127.0.0.1, port PORT",
        "give another --port",
    ),
]


ROW = '{"prompt": "paid 9 for 7:", "answer": 2, "price": 7}\n'
DATA = {
    "train.jsonl": ROW,
    "held_out.jsonl": ROW.replace("9", "8").replace("2", "1"),
    "chats.jsonl": ROW.replace('"paid 9 for 7:"', '[{"role": "user", "content": "paid 9"}]'),
    "syntax.py": "def change(:\n",
}


@contextlib.contextmanager
def mistaken(root: Path) -> Iterator[list[Mistake]]:
    """Make the folder ``mine`` of docs/your_own.md, with mistakes, and listen at a port.

    Yields:
        The mistakes, with the number of that port.
    """
    mine = root / "mine"
    mine.mkdir()
    for name, text in zip(FILES, blocks("python", "toml"), strict=True):
        (root / name).write_text(text)
    for name, text in DATA.items():
        (mine / name).write_text(text)
    recipe = (mine / "recipe.toml").read_text()
    (mine / "quotes.toml").write_text(recipe.replace('"float32"', "float32"))
    (mine / "typo.toml").write_text(recipe.replace("per_step", "per_stp"))
    (mine / "section.toml").write_text(recipe.replace("[reward]", "[rewards]"))

    whole = tiny_checkpoint(mine / "whole", "llama")
    build_tokenizer([Question("9 7", "2")]).save_pretrained(whole)
    for name in ("foreign", "lfs", "bert"):
        shutil.copytree(whole, mine / name)
    (mine / "nothing").mkdir()
    tiny_checkpoint(mine / "foreign", "llama", vocab_size=4)
    (mine / "lfs/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (mine / "bert/config.json").write_text(json.dumps({"model_type": "bert"}))

    checkpoint = mine / "other/checkpoints/step_000001"
    checkpoint.mkdir(parents=True)
    TrainState(step=1).write(checkpoint)
    with contextlib.chdir(root):
        other = load(Path("mine/recipe.toml"), ["quant.scheme=fp8", "train.run_dir=mine/other"])
    (mine / "other/config.toml").write_text(to_toml(other))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        yield [Mistake(*(text.replace("PORT", port) for text in one)) for one in MISTAKES]
