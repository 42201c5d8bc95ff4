"""A run's folder: claimed in one piece, and what is wrong with it said in one sentence."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.checkpoints.places import folders
from qurl_megatron.config import DataConfig, load
from qurl_megatron.data.rows import checksum_of
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.training.inputs import sources
from qurl_megatron.training.loop import with_advice
from qurl_megatron.training.start import _already_done
from qurl_megatron.training.state import (
    RECIPE,
    STATE,
    TrainState,
    claim,
    latest,
    recipe_of,
    refuse_other_run,
    score_sentence,
)
from qurl_megatron.training.train import adapt
from tests.support.descriptions import RECIPE_TEXT
from tests.support.disks import fill, small_disk


@pytest.fixture
def config(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE_TEXT)
    return load(tmp_path / "recipe.toml")


def checkpoint(run_dir, step):
    folder = run_dir / f"checkpoints/step_{step:06d}"
    folder.mkdir(parents=True)
    TrainState(step=step).write(folder)
    return folder


def test_a_folder_that_cannot_be_made_is_one_sentence(config, tmp_path):
    (tmp_path / "file").write_text("in the way")
    proc = Path("/proc/run")
    for run_dir in (tmp_path / "file", tmp_path / "file/run", tmp_path / ("x" * 300), proc):
        with pytest.raises(ConfigError, match=rf"{run_dir} cannot be written \(.*train\.run_dir"):
            claim(run_dir, config)
    with pytest.raises(ConfigError, match="set train.run_dir to another folder, or move the file"):
        claim(tmp_path / "file", config)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_that_is_read_only_is_one_sentence(config, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for run_dir in (disk, disk / "run"):
            with pytest.raises(ConfigError, match="Read-only file system.*that is not read-only"):
                claim(run_dir, config)


def test_a_recipe_is_replaced_whole_or_stays_as_it_was(config, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        claim(disk, config).lock.close()
        before = (disk / RECIPE).read_text()
        fill(disk)
        with pytest.raises(ConfigError, match="config.toml cannot be written .No space left"):
            claim(disk, config)
        assert (disk / RECIPE).read_text() == before
        assert {path.name for path in disk.iterdir()} == {"filler", ".lock", RECIPE}


def test_a_finished_run_tells_that_its_data_has_changed_since(config, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n')
    run_dir, data = tmp_path / "run", DataConfig(path=str(path))
    config = replace(config, data=data, train=replace(config.train, run_dir=str(run_dir), steps=2))
    state = TrainState(step=2, cursor={"files": {"data.path": checksum_of(path)}})
    state.write(checkpoint(run_dir, 2))
    assert _already_done(config, []) and "changed" not in capsys.readouterr().out
    path.write_text('{"prompt": "a", "answer": "2"}\n')
    assert _already_done(config, [])
    assert f"data.path={path} has changed since this run read it" in capsys.readouterr().out


def test_a_finished_run_tells_what_was_not_used(begun, tmp_path, capsys):
    run = begun.parent
    asked = load(
        tmp_path / "recipe.toml", [f"train.run_dir={run}", "train.steps=1", "optimizer.lr=1e-3"]
    )
    assert _already_done(asked, refuse_other_run(run, asked))
    assert "optimizer.lr 1e-06 -> 0.001; set train.steps above 2" in capsys.readouterr().out
    same = load(tmp_path / "recipe.toml", [f"train.run_dir={run}", "train.steps=2"])
    assert _already_done(same, refuse_other_run(run, same))
    assert "used" not in capsys.readouterr().out


@pytest.fixture
def begun(config, tmp_path):
    """The recipe that a run of two steps keeps in its folder."""
    claim(tmp_path / "run", config).lock.close()
    checkpoint(tmp_path / "run", 2)
    return tmp_path / "run" / RECIPE


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("uaq_scale = 0.5", "quant.uaq_scale must be"),
        ("uaq_scales = 1.5", "unknown key quant.uaq_scales"),
        ("uaq_scale =", "not valid TOML"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_named(written, reason, config, begun):
    text = begun.read_text().replace(f"uaq_scale = {config.quant.uaq_scale}", written)
    begun.write_text(text)
    with pytest.raises(ConfigError, match=f"{begun}, which .*: .*{reason}.*; .*new folder"):
        claim(begun.parent, config)
    assert begun.read_text() == text


def test_what_is_set_aside_or_unfinished_is_no_checkpoint(tmp_path):
    whole = checkpoint(tmp_path, 2)
    for name in ("step_000004.damaged", ".step_000006", "step_x"):
        shutil.copytree(whole, whole.with_name(name))
    assert folders(tmp_path) == [whole] and latest(tmp_path) == whole
    later = checkpoint(tmp_path, 1_000_000)
    assert latest(tmp_path) == later


def test_a_newest_checkpoint_without_a_readable_state_does_not_pass_for_the_last_step(
    config, tmp_path
):
    done = load(tmp_path / "recipe.toml", [f"train.run_dir={tmp_path}", "train.steps=4"])
    folder = checkpoint(tmp_path, 4)
    assert _already_done(done, [])
    (folder / STATE).write_text("{")
    assert not _already_done(done, [])


@pytest.mark.parametrize(
    ("overrides", "begun", "resumed"),
    [
        ([], {"model.path": "m"}, {}),
        (["algo.kl_coef=0.1"], {"model.path": "m"}, {"model.path": "m"}),
        (
            ["algo.kl_coef=0.1", "algo.reference=r"],
            {"model.path": "m", "algo.reference": "r"},
            {"algo.reference": "r"},
        ),
    ],
)
def test_a_resumed_run_needs_no_checkpoint_but_its_own_and_the_references(
    overrides, begun, resumed, config, tmp_path
):
    given = load(tmp_path / "recipe.toml", overrides)
    assert sources(given, resumed=False) == begun
    assert sources(given, resumed=True) == resumed


def test_a_run_that_failed_before_its_first_step_pins_nothing(config, tmp_path):
    claim(tmp_path / "run", config).lock.close()
    other = load(tmp_path / "recipe.toml", ["quant.scheme=fp8", "data.task_size=7"])
    claim(tmp_path / "run", other).lock.close()
    assert recipe_of(tmp_path / "run") == other


def test_the_refusal_names_the_keys_and_both_ways_out(begun, tmp_path):
    run = begun.parent
    other = load(tmp_path / "recipe.toml", ["train.seed=7", "quant.scheme=fp8", "train.steps=9"])
    with pytest.raises(ConfigError) as refusal:
        claim(run, other)
    message = str(refusal.value)
    assert message.startswith(f"{run} holds another run (quant.scheme int8 -> fp8, train.seed 0 ->")
    assert f"train.run_dir={run} --fork NEW_RUN_DIR" in message


def test_a_run_directory_in_use_is_refused(config, tmp_path):
    message = "run is in use by a run that has not ended"
    with claim(tmp_path / "run", config), pytest.raises(ConfigError, match=message):
        claim(tmp_path / "run", config)


def test_changes_are_told_again_until_they_are_kept(config, begun, tmp_path):
    """A run may be stopped while its model loads, long before it can tell of them."""
    changed = load(tmp_path / "recipe.toml", ["optimizer.lr=1e-3"])
    for _ in range(2):
        with claim(begun.parent, changed) as claimed:
            assert [str(one) for one in claimed.changes] == ["optimizer.lr 1e-06 -> 0.001"]
        assert recipe_of(begun.parent) == config
    with claim(begun.parent, changed) as claimed:
        claimed.keep_recipe()
    with claim(begun.parent, changed) as claimed:
        assert claimed.changes == []


def test_accuracies_on_other_prompts_are_not_compared(config, begun, tmp_path):
    state = TrainState(step=2, cursor={}, accuracy_before=0.25, accuracy=0.5)

    def resumed(override):
        with claim(begun.parent, load(tmp_path / "recipe.toml", [override])) as claimed:
            return replace(adapt(config, claimed, state)[0], own_code={})

    assert resumed("train.eval_every=3") == state
    assert resumed("train.eval_prompts=8") == TrainState(step=2, cursor={})


def test_scores_are_compared_only_with_scores_measured_alike():
    state = TrainState(step=10, accuracy_before=0.25, accuracy=0.5)
    assert "25.0% before, 50.0% after (+25.0 points)" in state.summary(right_or_wrong=True)
    assert "reward 0.250 before, 0.500 after" in state.summary(right_or_wrong=False)
    state = replace(state, accuracy_step=9)
    sentence = score_sentence(state, 0.4375, right_or_wrong=True)
    assert sentence.endswith("43.8% (-6.2 points since step 9)")
    now = state.scored(0.4375)
    later = replace(now, step=12)
    assert later.summary(right_or_wrong=False).endswith("0.250 before, 0.438 after step 10")
    changed = replace(later, accuracy_before=None)
    assert changed.summary(right_or_wrong=True).endswith("held-out accuracy 43.8% after step 10")
    assert now.without_scores().accuracy_step is None


@pytest.mark.parametrize(
    ("status", "step", "kind", "then"),
    [
        (None, 3, EngineError, "step 3 is saved, start again to go on from it"),
        (400, 3, ConfigError, "step 3 is saved, change what the engines refuse before you start"),
        (400, 0, ConfigError, "no step was done"),
        (503, 0, EngineError, "no step was done"),
    ],
)
def test_who_asked_for_what_cannot_be_is_not_told_to_start_again(status, step, kind, then):
    error = with_advice(EngineError("7 + 100000 tokens > 1024", status=status), step)
    assert type(error) is kind
    assert str(error).startswith(f"7 + 100000 tokens > 1024; {then}")


def test_a_folder_that_is_not_the_one_of_the_lock_any_more_is_refused(config, tmp_path):
    with claim(tmp_path / "run", config) as claimed:
        claimed.refuse_another_folder()
        (tmp_path / "run").rename(tmp_path / "other")
        refusal = "run was renamed, deleted or replaced while the run was at work"
        with pytest.raises(ConfigError, match=refusal):
            claimed.refuse_another_folder()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".lock").touch()  # of another run that has begun there
        with pytest.raises(ConfigError, match=refusal):
            claimed.refuse_another_folder()
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "other").rename(tmp_path / "run")
        claimed.refuse_another_folder()
