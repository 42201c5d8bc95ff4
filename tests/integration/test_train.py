"""The real command line, real ranks, real engines, on a model small enough to wait for."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.weight_changes import changes
from qurl_megatron.data.rows import Question
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.observe.catalogue import known
from qurl_megatron.observe.samples import read_samples
from qurl_megatron.observe.sinks import read_metrics
from qurl_megatron.observe.timeline import Timeline, overlap
from qurl_megatron.tensors.arch import read_eos
from tests.support.disks import contents
from tests.support.engine_models import engine_for, finish, sequence
from tests.support.plain_transformers import Answer, answers
from tests.support.runs import LEARNING, Run, metrics, qurl, rollouts
from tests.support.tools import tool


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("train")
    path = root / "recipe.toml"
    path.write_text(LEARNING.format(root=root))
    return path


def unknown(run_dir: Path) -> set[str]:
    """Metrics that a run has logged and the catalogue lacks."""
    logged = {name for record in read_metrics(run_dir / "metrics.jsonl") for name in record.metrics}
    return {name for name in logged if not known(name).says}


@pytest.fixture(scope="module")
def uninterrupted(recipe) -> Path:
    run_dir = recipe.parent / "whole"
    options = ("parallel.tensor=2", "checkpoint.every=2", f"train.run_dir={run_dir}")
    done = qurl("train", recipe, *options)
    assert "held-out accuracy" in done.stdout and "report:" in done.stdout
    return run_dir


def test_engines_that_pass_versions_on_serve_what_those_with_shared_memory_do(recipe):
    """One training rank feeds the first of three engines."""
    seen = {}
    for transport in ("group", "memory"):
        run_dir = recipe.parent / transport
        options = ("rollout.engines=3", f"sync.transport={transport}", "train.steps=2")
        qurl("train", recipe, *options, f"train.run_dir={run_dir}")
        seen[transport] = metrics(run_dir)
        for step in seen[transport].values():
            step.pop("sync/bytes", None)  # padded to 64 bytes, and cut or not
            step.pop("sync/buffer_mb", None)
    assert seen["group"] == seen["memory"]


def test_a_run_leaves_metrics_report_and_checkpoint_and_no_process(uninterrupted):
    seen = metrics(uninterrupted)
    assert list(seen) == [0, 1, 2, 3, 4]
    assert unknown(uninterrupted) == set()
    for name in (
        "reward/mean",
        "policy/clip_fraction",
        "rollout/kl_k3",
        "rollout/rho_max",
        "quant/code_flip_rate",
        "quant/weight_update",
        "quant/weight_error",
        "quant/update_passed",
        "quant/update_cosine",
        "optimizer/grad_norm",
    ):
        assert name in seen[4], name
    assert seen[4]["optimizer/grad_norm"] > 0
    assert abs(seen[1]["rollout/kl_k1"]) < 0.05  # behaviour and proximal are nearly one policy
    assert (uninterrupted / "report.html").stat().st_size > 10_000
    assert (uninterrupted / "checkpoints/step_000004/state.json").is_file()
    left = subprocess.run(["pgrep", "-f", str(uninterrupted.parent / "model")], capture_output=True)
    assert left.returncode == 1, left.stdout


def test_between_checkpoints_the_weights_have_moved_as_the_run_measured(uninterrupted):
    """Of whole weights here, of the shards of two ranks there."""
    (change,) = changes(uninterrupted, "int8")
    assert (change.first, change.last) == (2, 4)
    seen = metrics(uninterrupted)
    assert change.error == pytest.approx(seen[4]["quant/weight_error"], rel=1e-5)
    steps = [seen[step]["quant/weight_update"] ** 0.5 for step in (3, 4)]
    assert max(steps) - min(steps) < change.update**0.5 < 1.0001 * sum(steps)
    assert 0 < change.flips < 1


def test_from_a_converted_checkpoint_a_run_measures_the_same_and_converts_back(
    recipe, uninterrupted
):
    """Folded at conversion or while loading, the run is one; its checkpoint becomes a model."""
    root = recipe.parent
    folded, exported = root / "folded", root / "exported"
    fold = ("--hf", root / "model", "--out", folded, "--uaq-scale", 1.5)
    assert tool("convert", *fold) == 0
    run_dir = root / "from-megatron"
    qurl("train", recipe, "parallel.tensor=2", f"model.path={folded}", f"train.run_dir={run_dir}")
    assert metrics(run_dir) == metrics(uninterrupted)
    unfold = ("--ckpt", run_dir, "--out", exported, "--unfold-uaq", "--dtype", "float32")
    assert tool("export", *unfold) == 0
    assert tool("diff", uninterrupted, exported, "--tol", 1e-6) == 0
    assert tool("diff", root / "model", exported, "--tol", 1e-6) == 1  # it has been trained


TASK = "State the final answer to the following arithmetic problem:"
PROMPTS = [
    *(f"{TASK} {a} {sign} {b} =" for a in (3, 17, 98) for sign in "+-" for b in (0, 6, 45)),
    f"{TASK} 4 + 4 + 4 =",
    "1 + 2",
    "-12",
    "007 =",
    f"  {TASK}  12\n-  3 =",
    "Hello, 5 caf\u00e9s and 6 \u4e2d\u6587 =",
]
# What a run's model is written as: the tool, what its engines would quantize it to, and which share
# of the answers must be the same.
FOLDERS = {
    "warm start": (None, "none", 1.0),
    "unfolded BF16": (("export", "--unfold-uaq"), "none", 1.0),
    "FP8": (("quantize", "--scheme", "fp8", "--dtype", "float32"), "fp8", 1.0),
    # transformers rounds INT8 activations by another scale than engines do.
    "INT8": (("quantize", "--scheme", "int8", "--dtype", "float32"), "int8", 0.75),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_plain_transformers_answer_as_the_engine_does(kind, recipe, uninterrupted, tmp_path):
    made, scheme, share = FOLDERS[kind]
    folder = source = recipe.parent / "model"
    if made is not None:
        folder = source = tmp_path / "out"
        given = "--model" if made[0] == "quantize" else "--ckpt"
        assert tool(*made, given, uninterrupted, "--out", folder) == 0
    if scheme != "none":
        source = tmp_path / "masters"  # which the engine quantizes itself
        assert tool("export", "--ckpt", uninterrupted, "--out", source) == 0
    tokenizer, stop = Tokenizer(folder), frozenset(read_eos(folder))
    read = tokenizer.read([Question(prompt, "") for prompt in PROMPTS], chat=False)
    asked = [sequence(ids, 12, temperature=0.0, stop_ids=stop) for ids in read]
    finish(engine_for(source, scheme=scheme), *asked)
    here = [Answer(one.prompt, one.output_ids, tokenizer.decode(one.output_ids)) for one in asked]
    assert len({one.text for one in here}) > 4
    plain = answers(folder, PROMPTS, 12)
    assert [one.prompt for one in plain] == [one.prompt for one in here]
    same = sum(one == other for one, other in zip(plain, here, strict=True))
    assert same >= share * len(PROMPTS)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)]
)
def test_stopped_by_a_signal_and_started_again_it_measures_the_same(recipe, uninterrupted, number):
    calls, fakes = recipe.parent / f"wandb-{number.name}", Path(__file__).parents[1] / "fakes"
    path = os.pathsep.join([str(fakes), os.environ.get("PYTHONPATH", "")])
    options = ("parallel.tensor=2", "observe.wandb_project=rl")
    run = Run(recipe, f"stopped-{number.name}", *options, FAKE_WANDB=str(calls), PYTHONPATH=path)
    with run.process() as process:
        run.wait(lambda: run.step() >= 2)
        process.send_signal(number)
        assert run.ended() == 128 + number, run.stderr()
    by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    stopped = rf"^stopped by {by}: step [23] of 4 is saved; the same command goes"
    assert re.search(stopped, run.stdout(), re.M)
    assert 2 <= max(run.metrics()) < 4

    run.finish()
    assert "resuming" in run.stdout()
    assert run.metrics() == metrics(uninterrupted)
    samples = (run.dir / "samples.jsonl").read_bytes()
    assert samples == (uninterrupted / "samples.jsonl").read_bytes()

    called = [json.loads(line) for line in calls.read_text().splitlines()]
    begun, resumed = (call for call in called if call["call"] == "init")
    assert begun["id"] == resumed["id"] and begun["name"] == run.dir.name
    assert begun["config"]["quant"]["scheme"] == "int8"
    logs = [call for call in called if call["call"] == "log"]
    assert [log["step"] for log in logs if "reward/mean" in log["data"]] == [1, 2, 3, 4]
    tables = [(log["step"], name) for log in logs for name in log["data"] if "samples" in name]
    held_out = [(step, "samples/held-out") for step in (0, 4)]
    assert sorted(tables) == sorted([*held_out, (1, "samples/train"), (4, "samples/train")])
    assert [call["exit_code"] for call in called if call["call"] == "finish"] == [0, 0]


def test_whatever_is_killed_nothing_is_left_and_it_goes_on_at_once(recipe, uninterrupted):
    run = Run(recipe, "killed", "parallel.tensor=2", "checkpoint.every=1")
    with run.process() as launcher:
        run.wait(lambda: "step 0: held-out" in run.stdout())
        run.processes()  # takes as long as several steps where the machine is busy
        run.wait(lambda: 2 in run.saved())
        launcher.kill()
        launcher.wait()
        assert run.left() == []
    with run.process():
        run.wait(lambda: "resuming" in run.stdout())
        os.kill(run.rank(1), signal.SIGKILL)
        assert run.ended() == 128 + signal.SIGKILL
        assert run.left() == []
    assert re.fullmatch(
        r"qurl: rank 1 was killed by SIGKILL in step \d, as Linux does where memory runs out "
        r"\(`dmesg` says so\); the newest checkpoint is of step [23]: start the same command again"
        r"\n",
        run.stderr(),
    )
    run.finish()
    assert metrics(run.dir) == metrics(uninterrupted)


def flip_some_bytes(checkpoint: Path) -> None:
    for path in checkpoint.glob("*.distcp"):
        damaged = bytearray(path.read_bytes())
        for part in range(4):
            start = part * len(damaged) // 4
            damaged[start : start + 64] = bytes(255 - byte for byte in damaged[start : start + 64])
        path.write_bytes(damaged)


def test_damage_in_the_newest_checkpoint_is_named_and_the_one_before_goes_on(recipe, uninterrupted):
    run_dir = recipe.parent / "damaged"
    shutil.copytree(uninterrupted, run_dir)
    flip_some_bytes(run_dir / "checkpoints/step_000004")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:-4]))  # step 2 is no longer there
    assert json.loads(lines[-5])["step"] == 1
    command = ("train", recipe, "parallel.tensor=2", f"train.run_dir={run_dir}", "train.steps=5")
    done = qurl(*command)
    assert re.search(
        r"step_000004/__\d_0\.distcp has changed since it was written: .*step_000004 is set aside "
        r"as step_000004\.damaged, and the run goes on from step_000002, the newest whole check",
        done.stdout,
    )
    assert f"resuming {run_dir} after step 2\n" in done.stdout
    assert "settings changed: train.steps 4 -> 5" in done.stdout
    assert "\nsteps = 5\n" in (run_dir / "config.toml").read_text()  # since it has a checkpoint
    assert "metrics.jsonl ends with step 1, and the checkpoint is of step 2" in done.stdout
    seen, expected = metrics(run_dir), metrics(uninterrupted)
    assert list(seen) == [0, 1, 3, 4, 5] and seen[3] == expected[3]
    assert seen[4] == {k: v for k, v in expected[4].items() if k != "eval/accuracy"}

    shutil.rmtree(run_dir / "checkpoints/step_000002", ignore_errors=True)
    flip_some_bytes(run_dir / "checkpoints/step_000005")
    before = contents(run_dir)
    done = qurl(*command[:-1], "train.steps=6", code=2)
    assert re.fullmatch(
        r"qurl: no checkpoint in \S+ is whole: \S+/step_000005/__\d_0\.distcp has changed since it "
        r"was written: its checksum differs; restore these files, or start from scratch in another "
        r"train\.run_dir\n",
        done.stderr,
    )
    after = contents(run_dir)
    assert {name for name in before if before[name] != after[name]} <= {"config.toml"}

    # No other run begins with it either.
    new = (f"model.path={run_dir}", f"train.run_dir={recipe.parent / 'begun'}", "train.steps=1")
    done = qurl("train", recipe, "parallel.tensor=2", *new, code=2)
    assert re.fullmatch(
        r"qurl: \S+/step_000005/__\d_0\.distcp has changed since it was written: its checksum "
        r"differs; copy the checkpoint again, or name an older one\n",
        done.stderr,
    )


def test_weights_that_a_step_breaks_are_not_saved(recipe, uninterrupted):
    run_dir = recipe.parent / "broken"
    options = ("parallel.tensor=2", "train.steps=2", "checkpoint.every=1")
    options += ("optimizer.lr=1e9", "optimizer.warmup_steps=4", f"train.run_dir={run_dir}")
    done = qurl("train", recipe, *options, code=3)
    assert re.fullmatch(
        r"qurl: step 1 broke the policy: .*weight on rank \d has .*; nothing of it is published or "
        r"saved; start again with a smaller optimizer\.lr\n",
        done.stderr,
    )
    assert not list((run_dir / "checkpoints").glob("*"))


def test_batches_are_generated_while_the_policy_trains_and_never_get_too_old(recipe):
    run_dir = recipe.parent / "ahead"
    options = ("rollout.max_staleness=2", "train.save_rollouts=true", "train.eval_prompts=0")
    qurl("train", recipe, f"train.run_dir={run_dir}", *options)
    seen = metrics(run_dir)
    assert [seen[step]["sync/staleness"] for step in (1, 2, 3, 4)][0] == 0
    assert 1 <= max(seen[step]["sync/staleness"] for step in (2, 3, 4)) <= 2
    for step in (1, 2, 3, 4):
        samples = rollouts(run_dir, step)
        assert len(samples) == 64
        assert {s["prompt"]["index"] for s in samples} == set(range(8 * (step - 1), 8 * step))
        assert min(min(s["versions"]) for s in samples) >= step - 1 - 2
    assert overlap(Timeline.read(run_dir / "timeline.jsonl")) > 0
    assert (run_dir / "trace.json").is_file()


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tensor=2", "parallel.pipeline=2", "quant.rounding=dithered"],
        [
            *("quant.scheme=fp8", "train.align=full", "parallel.context=2"),
            *("train.max_tokens=96", "train.packed=true"),
        ],
        [
            *("quant.scheme=none", "model.dtype=bfloat16", "parallel.data=2"),
            *("algo.name=ppo", "algo.kl_coef=0.01", "algo.epochs=2"),
        ],
    ],
    ids=" ".join,
)
def test_variants_run(recipe, uninterrupted, overrides):
    run_dir = recipe.parent / "_".join(overrides)
    options = (*overrides, "train.steps=2", f"train.run_dir={run_dir}")
    qurl("train", recipe, *options)
    assert list(metrics(run_dir)) == [0, 1, 2]
    assert unknown(run_dir) == set()


def test_a_fork_goes_on_from_the_checkpoint_with_what_may_not_change_and_tells_of_it(
    recipe, uninterrupted
):
    new = recipe.parent / "fork"
    changes = ("train.seed=7", "optimizer.lr=1e-5", "train.steps=5")
    changes += ("reward.kind=last_number",)  # with which other answers are right
    done = qurl("train", recipe, f"train.run_dir={uninterrupted}", "--fork", new, *changes)
    told = f"goes on from step 4 of {uninterrupted}, with "
    assert f"{new} {told}" in done.stdout and "train.seed 0 -> 7" in done.stdout
    assert told in (new / "report.html").read_text()
    before, seen = metrics(uninterrupted), metrics(new)
    assert {step: seen[step] for step in range(4)} == {step: before[step] for step in range(4)}
    # As a run that begins: what it begins with is evaluated, by its own reward and once.
    lines = map(json.loads, (new / "metrics.jsonl").read_text().splitlines())
    (first,) = (
        one["metrics"] for one in lines if one["step"] == 4 and "eval/accuracy" in one["metrics"]
    )
    assert (seen[4]["optimizer/lr"], seen[5]["optimizer/lr"]) == (1e-4, 1e-5)
    assert seen[5]["optimizer/grad_norm"] > 0
    accuracies = f"{first['eval/accuracy']:.1%} before, {seen[5]['eval/accuracy']:.1%} after"
    assert f"step 5 done; held-out accuracy {accuracies}" in done.stdout
    asked = [one.index for one in read_samples(new) if (one.step, one.of) == (4, "held-out")]
    assert len(set(asked)) == len(asked) >= 8


def test_a_host_of_another_machine_is_a_mistake_before_models_and_engines(
    recipe, uninterrupted, tmp_path
):
    options = ("sync.transport=group", "sync.host=192.0.2.7", f"train.run_dir={tmp_path / 'run'}")
    done = qurl("train", recipe, "parallel.tensor=2", *options, code=2)
    assert "set sync.host to" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "loading" not in done.stdout and "starting 2 embedded" not in done.stdout, done.stdout
