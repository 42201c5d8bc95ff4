"""``qurl eval`` as it is typed, with real engines, on models small enough to wait for."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from tests.support.leftovers import Footprint
from tests.support.models import tiny_checkpoint
from tests.support.runs import QURL, Run, make_recipe, qurl
from tests.support.waiting import PATIENCE_S

PROBLEMS, K, NEW = 16, 64, 32  # sampled in four batches of the embedded engine
VOCAB = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random model each of whose tokens reads as its own number."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("eval") / "model", "qwen2")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def bench(model) -> Path:
    """Problems of which greedy decoding, as transformers does it, answers every second one."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    path = model.parent / "numbers.jsonl"
    with path.open("w") as file:
        for index in range(PROBLEMS):
            prompt = [(7 * index + 11 * step) % VOCAB for step in range(2 + index % 3)]
            ids = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=NEW,
                eos_token_id=None,
                pad_token_id=0,
            )
            answer = int(ids[0, -1]) + index % 2
            file.write(json.dumps({"prompt": " ".join(map(str, prompt)), "answer": answer}) + "\n")
    return path


def command(bench: Path, model: Path, out: Path) -> list[str]:
    settings = ["model.dtype=float32", f"rollout.max_new_tokens={NEW}", "--k", str(K)]
    # A random model's distribution is flat: at a low temperature it is right now and then.
    settings += ["rollout.temperature=0.1", "--top-p", "0.9", "reward.kind=last_number"]
    given = ["--model", str(model), "--out", str(out)]
    return ["eval", str(bench), *given, *settings]


def responses(out: Path) -> list[dict]:
    path = out / "numbers.samples.jsonl"
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    found = [json.loads(line) for line in whole.splitlines()[1:]]
    return [{key: value for key, value in one.items() if key != "seconds"} for one in found]


def interrupted(arguments: list[str], out: Path, number: int, *, after: int) -> int:
    """The exit code of an evaluation that got a signal when it had so many responses."""
    with (out.parent / "log").open("a") as log:
        footprint = Footprint()
        process = subprocess.Popen(
            [*QURL, *arguments], stdout=log, stderr=log, env=footprint.env, start_new_session=True
        )
    end = time.monotonic() + 240
    while len(responses(out)) < after:
        assert process.poll() is None and time.monotonic() < end, (out.parent / "log").read_text()
        time.sleep(0.05)
    assert len(footprint.look()) > 1  # engines too
    process.send_signal(number)
    code = process.wait(PATIENCE_S)
    assert footprint.left() == []
    return code


def test_killed_twice_an_evaluation_ends_in_the_same_bits(model, bench, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    done = qurl(*command(bench, model, whole))
    results = json.loads((whole / "results.json").read_text())
    numbers = results["benchmarks"]["numbers"]
    assert numbers["greedy"]["accuracy"] == 0.5
    assert 0 < numbers["sampled"]["accuracy"] < 1
    assert numbers["sampled"]["pass_at"][str(K)] > numbers["sampled"]["accuracy"]
    assert results["engines"][0]["scheme"] == "none"
    assert (whole / "results.md").read_text() in done.stdout

    arguments = command(bench, model, out)
    assert interrupted(arguments, out, signal.SIGINT, after=PROBLEMS + 4 * K) == 130
    first = responses(out)
    assert interrupted(arguments, out, signal.SIGKILL, after=len(first) + 4 * K) == -signal.SIGKILL
    assert len(first) < len(responses(out)) < len(responses(whole))
    done = qurl(*arguments)
    assert responses(out) == responses(whole)
    again = json.loads((out / "results.json").read_text())["benchmarks"]["numbers"]
    assert again | {"tokens_per_s": 0} == numbers | {"tokens_per_s": 0}


def test_a_run_is_evaluated_by_its_own_recipe_before_and_after(tmp_path):
    run = Run(make_recipe(tmp_path), "run", "train.steps=1", "rollout.engines=1")
    run.finish()
    path = tmp_path / "sums.jsonl"
    text = "State the final answer to the following arithmetic problem: 12 + 3 ="
    path.write_text(json.dumps({"prompt": text, "answer": "15"}) + "\n")
    done = qurl("eval", path, "--run", run.dir, "--k", "2", "--before", "--step", "1")

    def read(name: str) -> dict:
        return json.loads((run.dir / "eval" / name).read_text())

    first, results = read("start/results.json"), read("step_000001/results.json")
    assert first["model"] == str(tmp_path / "model")
    assert results["model"] == str(run.dir / "checkpoints/step_000001")
    del first["settings"]["model_files"]
    assert first["settings"].items() <= results["settings"].items()
    expected = {"scheme": "int8", "dtype": "float32", "reward": "exact", "max_new_tokens": 8}
    expected |= {"temperature": 1.0, "top_p": 1.0}
    assert expected.items() <= results["settings"].items()
    assert results["engines"][0]["scheme"] == "int8"
    sums = read("start_to_step_000001.json")["benchmarks"]["sums"]["sampled"]
    assert sums["after"] == results["benchmarks"]["sums"]["sampled"]
    assert sums["before"] == first["benchmarks"]["sums"]["sampled"]
    assert sums["change"] == pytest.approx(sums["after"]["accuracy"] - sums["before"]["accuracy"])
    assert (run.dir / "eval/start_to_step_000001.md").read_text() in done.stdout
