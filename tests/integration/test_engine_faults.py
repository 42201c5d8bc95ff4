"""Whole runs whose engines lie, or belong to somebody else; the real command line."""

import contextlib
import json
import math
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qurl_megatron.config import load
from qurl_megatron.training.warmstart import warmstart
from tests.support.proxy import COULD_BE_TRUE, FAULTS, LOCKED_OUT, Proxy
from tests.support.runs import QURL, Run, make_recipe

SMALL = (
    "data.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "train.micro_batch=8",
    "train.eval_prompts=0",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A recipe whose model is there already."""
    recipe = make_recipe(tmp_path_factory.mktemp("liars"))
    config = load(recipe, ["warmstart.steps=1"])
    warmstart(Path(config.model.path), config.data, config.warmstart, log=lambda line: None)
    return recipe


@contextlib.contextmanager
def serving(recipe: Path, count: int) -> Iterator[list[str]]:
    """Embedded engines of nobody's, as ``qurl serve`` starts them; their URLs."""
    files = [recipe.parent / f"port-{time.monotonic_ns()}-{index}" for index in range(count)]
    command = [*QURL, "serve", str(recipe.parent / "model"), "--dtype", "float32", "--threads", "1"]
    engines = [
        subprocess.Popen(
            [*command, "--port-file", str(file), "--exit-with-stdin"], stdin=subprocess.PIPE
        )
        for file in files
    ]
    try:
        while not all(file.exists() for file in files):
            assert all(engine.poll() is None for engine in engines)
            time.sleep(0.05)
        yield [f"http://127.0.0.1:{file.read_text().strip()}" for file in files]
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()


def urls(*found: str) -> str:
    return f"rollout.urls={json.dumps(found)}"


def trained(run: Run, vocabulary: int) -> None:
    """Nothing that was trained on is anything but an engine's true answer."""
    steps = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        metrics = step["metrics"]
        assert all(map(math.isfinite, metrics.values())), step
        assert metrics["rollout/rho_max"] < 2 and metrics["rollout/kl_k3"] < 0.01
        for sample in run.samples(step["step"]):
            assert all(0 <= token < vocabulary for token in sample["response_ids"])
            assert all(-104 < value <= 1e-4 for value in sample["behaviour_log_probs"])
            assert set(sample["versions"]) == {step["step"] - 1}


@pytest.mark.thorough
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_run_holds_every_answer_that_an_engine_must_never_give(tensor, tiny):
    first, second = ([name for name in FAULTS if name != out] for out in reversed(LOCKED_OUT))
    with serving(tiny, 3) as (good, behind, other), Proxy(behind) as liar, Proxy(other) as stranger:
        liar.play(first)
        stranger.play(second[-1:])
        run = Run(
            tiny,
            f"liars-{tensor}",
            urls(liar.url, good, stranger.url),
            f"parallel.tensor={tensor}",
            f"train.steps={len(first) + 2}",
            "rollout.timeout_s=5",
            *SMALL,
        )
        with run.process():
            assert run.ended(550) == 0, run.stdout()[-2000:] + run.stderr()[-2000:]
            assert not run.left()
    assert liar.played == first and stranger.played == second[-1:]
    config = json.loads((tiny.parent / "model" / "config.json").read_text())
    trained(run, config["vocab_size"])
    said = [line for line in run.stdout().splitlines() if line.startswith("*** fleet, step")]
    for name in first:
        mine = [line for line in said if re.search(FAULTS[name].says, line) and liar.url in line]
        assert mine, name
    assert len(said) == len(first) + 1
    assert run.happened("engine-0 gave up") == run.happened("engine-2 gave up") == 1
    assert run.happened("engine-1 failed") == 0


def test_a_run_does_not_get_the_engine_of_another_and_leaves_it_in_peace(tiny):
    with serving(tiny, 1) as (engine,):
        first = Run(tiny, "one", urls(engine), "train.steps=100000", *SMALL)
        with first.process() as process:
            first.wait(lambda: first.step() >= 2)
            second = Run(tiny, "two", urls(engine), "train.steps=2", "train.seed=5", *SMALL)
            second.finish(2)
            assert re.fullmatch(
                rf"qurl: {engine} belongs to a run that is at work \({first.dir} on \S+\); give "
                r"this run engines of its own, stop that one, or set rollout.take_over=true\n",
                second.stderr(),
            )
            since = first.step()
            first.wait(lambda: first.step() >= since + 2)
            process.send_signal(signal.SIGINT)
            assert first.ended() == 128 + signal.SIGINT
            assert first.saved() == [first.step()]
    for step in range(1, since + 3):
        versions = {version for sample in first.samples(step) for version in sample["versions"]}
        assert versions == {step - 1}


@pytest.mark.thorough
def test_a_log_prob_that_is_wrong_but_could_be_true_is_told_of(tiny):
    with serving(tiny, 1) as (engine,), Proxy(engine) as liar:
        run = Run(tiny, "could-be", urls(liar.url), "train.steps=3", *SMALL)
        liar.play(["log-prob -90"])
        run.finish()
    [said] = [line for line in run.stdout().splitlines() if line.startswith("*** rollout, step")]
    assert said.startswith("*** rollout, step 1: ")
    assert re.search(COULD_BE_TRUE["log-prob -90"].says, said)
    assert said.partition(": ")[2] in (run.dir / "report.html").read_text()


@pytest.mark.thorough
def test_a_run_whose_engines_all_refuse_its_key_ends_with_the_users_mistake(tiny):
    with serving(tiny, 1) as (engine,), Proxy(engine) as liar:
        run = Run(tiny, "refused", urls(liar.url), "train.steps=5", *SMALL)
        liar.play(["401"])
        run.finish(2)
    assert re.search(r"^qurl: .*answered 401.*QURL_API_KEY", run.stderr())
    assert run.stderr().count("\n") == 1
