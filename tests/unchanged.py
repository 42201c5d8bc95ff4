"""Compare what another commit computes with what this checkout computes, on the same machine.

For changes that must not change anything: moved code, shorter code, other names.

    python -m tests.unchanged ca9e816               # every part; some ten minutes
    python -m tests.unchanged ca9e816 show codes    # some of them

Both sides are asked through their command lines alone, each with its own recipes and in its own
checkout; the other commit gets one for the time, and both run in this environment. The results are
kept as JSON under ``runs/unchanged/COMMIT``, so that a second call asks the other side nothing.

Exit code 0: all equal; 1: the differences are listed; 2: a side could not be asked.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.support.mistakes import mistaken
from tests.support.runs import metrics

HERE = Path(__file__).parents[1]
LISTED = 20  # differences of one part

Values = dict[str, Any]
"""Whatever a part computes, by name, as JSON has it."""


class Side:
    """One checkout, and a folder for what its commands write."""

    def __init__(self, tree: Path, work: Path) -> None:
        self.tree, self.work = tree, work
        self._env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    def call(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run ``python COMMAND`` in the checkout, to its end."""
        return subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=self.tree,
            env=self._env,
            capture_output=True,
            text=True,
        )

    def qurl(self, *arguments: str | Path) -> list[str | Path]:
        return ["-m", "qurl_megatron.cli", *arguments]

    def must(self, *command: str | Path) -> str:
        """Its output.

        Raises:
            SystemExit: with exit code 2, where the command fails.
        """
        done = self.call(*command)
        if done.returncode != 0:
            print(f"{' '.join(map(str, command))} in {self.tree} failed:\n{done.stderr}")
            raise SystemExit(2)
        return done.stdout

    def start(self, *command: str | Path) -> subprocess.Popen[bytes]:
        """Start the command in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=self.tree,
            env=self._env,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def plain(self, text: str) -> str:
        """The text without the names of this side's folders."""
        return text.replace(str(self.work), "WORK").replace(str(self.tree), "TREE")


def quickstart(side: Side) -> Values:
    """Return every metric of every step of the quickstart but seconds and speeds."""
    run_dir = side.work / "quickstart"
    side.must(*_quickstart(side, run_dir))
    return _metrics(run_dir)


def interrupted(side: Side) -> Values:
    """Return the same metrics of a quickstart that is killed after step 15 and started again.

    They equal those of the other commit's uninterrupted one.
    """
    run_dir = side.work / "interrupted"
    process = side.start(*_quickstart(side, run_dir))
    log = run_dir / "metrics.jsonl"
    while not (log.is_file() and log.read_text().count("\n") > 15):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    side.must(*_quickstart(side, run_dir))
    return _metrics(run_dir)


def _quickstart(side: Side, run_dir: Path) -> list[str | Path]:
    where = [f"model.path={side.work / 'arithmetic'}", f"train.run_dir={run_dir}"]
    return side.qurl("train", "launch/recipes/quickstart.toml", *where)


def _metrics(run_dir: Path) -> Values:
    by_step = metrics(run_dir)  # of a step that is done again, its last
    return {f"step {step}: {name}": v for step in by_step for name, v in by_step[step].items()}


def codes(side: Side) -> Values:
    """Return digests of SmolLM2's tensors: converted, back again, and as codes and scales."""
    model = side.work / "smollm2"
    side.must(Path(__file__).parents[1] / "benchmarks/smollm2.py", model)
    values = {}
    for tensor in (1, 3):  # it has nine heads
        megatron = side.work / f"tp{tensor}"
        cut = ["--tensor", str(tensor), "--uaq-scale", "1.5"]
        side.must("checkpoints_tools/hf_to_megatron.py", "--hf", model, *cut, "--out", megatron)
        for file in sorted(megatron.rglob("*.distcp")):
            name = f"TP {tensor}, {file.relative_to(megatron)}"
            values[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        back = side.work / f"tp{tensor}-hf"
        side.must("checkpoints_tools/megatron_to_hf.py", "--ckpt", megatron, "--out", back)
        values |= {f"TP {tensor}, back: {k}": v for k, v in _digests(back).items()}
        for scheme in ("int8", "fp8"):
            out = side.work / f"tp{tensor}-{scheme}"
            how = ["--model", megatron, "--scheme", scheme]
            side.must("checkpoints_tools/quantize.py", *how, "--out", out)
            values |= {f"TP {tensor}, {scheme}: {k}": v for k, v in _digests(out).items()}
            shutil.rmtree(out)
        shutil.rmtree(megatron)
        shutil.rmtree(back)
    return values


def _digests(folder: Path) -> dict[str, str]:
    """Of every tensor of a Hugging Face folder: its format, shape and bytes."""
    digests = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name).contiguous()
                head = f"{tensor.dtype} {list(tensor.shape)} ".encode()
                body = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                digests[name] = hashlib.sha256(head + body).hexdigest()
    return digests


def show(side: Side) -> Values:
    """Return the resolved keys and the dry run of every recipe, line by line."""
    values = {}
    for recipe in sorted((side.tree / "launch" / "recipes").glob("*.toml")):
        for options in ([], ["--dry-run"]):
            done = side.call(*side.qurl("show", f"launch/recipes/{recipe.name}", *options))
            name = " ".join([recipe.stem, *options])
            values[f"{name}: exit code"] = done.returncode
            for number, line in enumerate((done.stdout + done.stderr).splitlines(), 1):
                values[f"{name}, line {number}"] = side.plain(line)
    return values


ASK_EACH = """
import contextlib, io, json, os, sys
from qurl_megatron.cli import main
os.chdir(sys.argv[1])
answers = {}
for name, command in json.loads(sys.argv[2]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command)
        except SystemExit as left:
            code = left.code
        except Exception as error:
            code = repr(error)
    answers[name] = [code, err.getvalue().partition(chr(10))[0]]
print(json.dumps(answers))
"""
"""Run by Python with a folder and named command lines of ``qurl``; all in one process, as each then
takes milliseconds. Prints exit codes and first lines of stderr."""


def mistakes(side: Side) -> Values:
    """Return the exit code and the sentence with which each mistake of a new user is answered."""
    with mistaken(side.work) as made:
        commands = {mistake.name: shlex.split(mistake.command) for mistake in made}
        answers = json.loads(side.must("-c", ASK_EACH, side.work, json.dumps(commands)))
    values = {}
    for name, (code, sentence) in answers.items():
        values[f"{name}: exit code"] = code
        values[f"{name}: sentence"] = re.sub(r"\bport \d+", "port N", side.plain(sentence))
    return values


PARTS: dict[str, Callable[[Side], Values]] = {
    part.__name__: part for part in (show, mistakes, codes, quickstart, interrupted)
}


COMPARED_WITH = {"interrupted": "quickstart"}
"""The part of the other commit that a part here must equal, where that is not the same one."""


def differences(before: Values, after: Values) -> list[str]:
    """Return one sentence per name whose values differ."""
    names = list(before) + [name for name in after if name not in before]
    return [
        f"{name}: {before.get(name, 'absent')} before, {after.get(name, 'absent')} now"
        for name in names
        if before.get(name, "absent") != after.get(name, "absent")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.unchanged", description=__doc__)
    parser.add_argument("commit", help="what to compare this checkout with")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    commit = _git("rev-parse", "--verify", f"{arguments.commit}^{{commit}}")
    status = 0
    for name in arguments.parts or PARTS:
        other = COMPARED_WITH.get(name, name)
        record = HERE / "runs" / "unchanged" / commit / f"{other}.json"
        if not record.is_file():
            with _checkout(commit) as tree, _work() as work:
                values = PARTS[other](Side(tree, work))
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(values, indent=1))
        with _work() as work:
            now = PARTS[name](Side(HERE, work))
        before = json.loads(record.read_text())
        different = differences(before, json.loads(json.dumps(now)))
        print(f"{name}: {len(before)} values before, {len(different)} differ", flush=True)
        for line in different[:LISTED]:
            print(f"  {line}")
        status = 1 if different else status
    return status


@contextlib.contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    """A checkout of the commit, with its extension built where there is a compiler."""
    with _work() as work:
        tree = work / "tree"
        _git("worktree", "add", "--detach", str(tree), commit)
        try:
            Side(tree, work).must("setup.py", "--quiet", "build_ext", "--inplace")
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


@contextlib.contextmanager
def _work() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder:
        yield Path(folder)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr.strip())
        raise SystemExit(2)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
