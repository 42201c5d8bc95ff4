"""Whole runs by the command line, on emulated GPUs: they measure what runs on the CPU measure.

The two add in different orders, and weights differ by 1e-7 after a step. Of some 70,000 codes one
then lies on the other side of a tie, and all roundings of activations behind it fall anew: that is
half as large as quantization's own noise, and may sooner or later draw another token. So quantized
runs are compared closely up to the update of the first step, and unquantized ones throughout.
"""

from pathlib import Path

import pytest

from qurl_megatron.training.state import TrainState, latest
from tests.support.runs import as_if_killed_after, metrics, qurl

QUICKSTART = Path(__file__).parents[2] / "launch" / "recipes" / "quickstart.toml"

# The recipe that ships, made small.
SMALL = (
    "warmstart.steps=150",
    "warmstart.hidden=64",
    "warmstart.layers=2",
    "warmstart.intermediate=128",
    "warmstart.batch=64",
    "data.task_size=2000",
    "data.task_args={ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 2 }",
    "data.prompts_per_step=8",
    "optimizer.lr=3e-4",
    "optimizer.warmup_steps=0",
    "algo.entropy_coef=0.01",
    "train.steps=3",
    "train.max_tokens=256",
    "train.eval_prompts=16",
    "checkpoint.every=1",
    "checkpoint.keep=3",
)
CLOSE = dict(rel=1e-4, abs=1e-5)
NOISE = dict(rel=0.5, abs=0.1)


class Room:
    """A folder with a recipe and a model, in which runs are done on either device."""

    def __init__(self, root: Path, recipe: str, *options: str) -> None:
        self.recipe = root / "recipe.toml"
        self.recipe.write_text(recipe)
        self.options = (f"model.path={root / 'model'}", *options)

    def run(self, name: str, *options: str, gpus: dict[str, str] | None = None) -> Path:
        """Run to the end, and return the run's folder."""
        run_dir = self.recipe.parent / name
        words = ("train", self.recipe, *self.options, *options, f"train.run_dir={run_dir}")
        qurl(*words, **(gpus or {}))
        return run_dir


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Room:
    return Room(tmp_path_factory.mktemp("quickstart"), QUICKSTART.read_text(), *SMALL)


@pytest.fixture(scope="module")
def on_cpu(room) -> Path:
    """First, because it makes the model."""
    return room.run("cpu")


@pytest.fixture(scope="module")
def on_gpus(room, on_cpu, gpus) -> Path:
    return room.run("gpus", gpus=gpus)


def assert_same_metrics(actual: Path, expected: Path, *, quantized: bool) -> None:
    found, right = metrics(actual), metrics(expected)
    assert found.keys() == right.keys()
    for step, names in right.items():
        assert found[step].keys() >= names.keys()  # a run that ended here was evaluated
        exact = {name for name in names if name.startswith("reward/") and step == 1}
        tolerance = NOISE if quantized and step > 1 else CLOSE
        for name, value in names.items():
            close = value if name in exact else pytest.approx(value, **tolerance)
            assert found[step][name] == close, (step, name)


def test_the_quickstart_measures_on_gpus_what_it_measures_on_the_cpu(on_cpu, on_gpus):
    assert_same_metrics(on_gpus, on_cpu, quantized=True)
    seen = metrics(on_gpus)
    assert 0 < seen[1]["reward/mean"] < 1 and seen[3]["quant/code_flip_rate"] > 0


def test_a_checkpoint_of_either_device_is_resumed_on_the_other(room, on_cpu, gpus):
    plain = "quant.scheme=none"
    whole = room.run("unquantized", plain)
    again = as_if_killed_after(1, whole)
    room.run(again.name, plain, "train.steps=2", gpus=gpus)
    assert TrainState.read(latest(again)).step == 2
    room.run(again.name, plain)
    assert_same_metrics(again, whole, quantized=False)


PPO = (
    "algo.name=ppo",
    "algo.kl_coef=0.01",
    "algo.reference_memory=host",  # pinned
    "parallel.context=2",
    "parallel.tensor=1",
    "train.max_tokens=96",
    "train.packed=true",
    "quant.scheme=none",
    "train.steps=2",
)


def test_a_critic_packed_sequences_and_a_pinned_reference_measure_what_they_do_on_the_cpu(
    room, on_cpu, gpus
):
    on_gpus, on_cpu = room.run("ppo-gpus", *PPO, gpus=gpus), room.run("ppo-cpu", *PPO)
    assert_same_metrics(on_gpus, on_cpu, quantized=False)


def test_batches_are_generated_on_gpus_while_the_policy_trains(room, on_cpu, gpus):
    options = ("rollout.max_staleness=1", "model.dtype=bfloat16", "quant.scheme=fp8")
    run_dir = room.run("ahead", *options, gpus=gpus)
    seen = metrics(run_dir)
    assert seen[1]["sync/staleness"] == 0
    assert max(seen[step]["sync/staleness"] for step in (2, 3)) == 1
