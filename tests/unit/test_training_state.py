"""A run's folder: claimed in one piece, and what is wrong with it said in one sentence."""

import os
import shutil
import subprocess
from dataclasses import replace

import pytest

from qurl_megatron.config import DataConfig, load
from qurl_megatron.data.rows import checksum_of
from qurl_megatron.errors import ConfigError
from qurl_megatron.training.finite import Growth
from qurl_megatron.training.sources import sources
from qurl_megatron.training.start import _already_done
from qurl_megatron.training.state import RECIPE, STATE, TrainState, claim, folders, latest
from tests.disks import fill, small_disk
from tests.unit.test_damaged_files import RECIPE_TEXT


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
    for run_dir in (tmp_path / "file", tmp_path / "file/run", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=rf"{run_dir} cannot be written \(.*train\.run_dir"):
            claim(run_dir, config)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_that_is_read_only_is_one_sentence(config, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for run_dir in (disk, disk / "run"):
            with pytest.raises(ConfigError, match="Read-only file system.*that is not read-only"):
                claim(run_dir, config)


def test_a_recipe_is_replaced_whole_or_stays_as_it_was(config, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        claim(disk, config).close()
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
    assert _already_done(config) and "changed" not in capsys.readouterr().out
    path.write_text('{"prompt": "a", "answer": "2"}\n')
    assert _already_done(config)
    assert (
        f"data.path={path} has changed since this run read it, and nothing was trained on what it "
        "holds now; restore the file, or train on it in another train.run_dir\n"
    ) in capsys.readouterr().out


@pytest.fixture
def begun(config, tmp_path):
    """The recipe that a run of two steps keeps in its folder."""
    claim(tmp_path / "run", config).close()
    checkpoint(tmp_path / "run", 2)
    return tmp_path / "run" / RECIPE


def cut_at(text: str) -> int:
    return len((text[: text.index("[quant]")]).encode())


@pytest.mark.parametrize("kept", [lambda text: 0, lambda text: 100, cut_at])
def test_a_recipe_that_was_cut_off_is_named(kept, config, begun):
    """Also where what is left of it is TOML."""
    os.truncate(begun, kept(begun.read_text()))
    with pytest.raises(ConfigError, match=f"{begun}, which says what run .*, is damaged .*delete"):
        claim(begun.parent, config)
    begun.unlink()
    claim(begun.parent, config)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("uaq_scale = 0.5", "quant.uaq_scale must be"),
        ("uaq_scales = 1.5", "unknown key quant.uaq_scales"),
    ],
)
def test_a_recipe_of_other_rules_is_not_called_damaged(written, reason, config, begun):
    text = begun.read_text().replace(f"uaq_scale = {config.quant.uaq_scale}", written)
    begun.write_text(text)
    with pytest.raises(ConfigError, match=f"{begun}, which .*: {reason}.*; .*new folder") as said:
        claim(begun.parent, config)
    assert "damaged" not in str(said.value)
    assert begun.read_text() == text


def test_a_recipe_that_cannot_be_read_is_not_called_damaged(config, begun):
    begun.unlink()
    begun.symlink_to("/proc/self/mem")  # whose first bytes are an input/output error
    with pytest.raises(ConfigError, match=f"{begun} cannot be read .Input/output error.") as said:
        claim(begun.parent, config)
    assert "damaged" not in str(said.value)


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
    assert _already_done(done)
    (folder / STATE).write_text("{")
    assert not _already_done(done)


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
        (
            ["algo.advantage=gae", "critic.path=c"],
            {"model.path": "m", "critic.path": "c"},
            {},
        ),
    ],
)
def test_a_resumed_run_needs_no_checkpoint_but_its_own_and_the_references(
    overrides, begun, resumed, config, tmp_path
):
    given = load(tmp_path / "recipe.toml", overrides)
    assert sources(given, resumed=False) == begun
    assert sources(given, resumed=True) == resumed


def test_weights_that_double_are_told_once_for_each_doubling():
    growth = Growth(10.0)
    said = [growth.noticed(norm) for norm in (10.1, 19.0, 21.0, 22.0, 41.0, 1e9, 1e9)]
    assert said == [
        None,
        None,
        "the norm of the weights has grown from 10 to 21",
        None,
        None,
        "the norm of the weights has grown from 21 to 1e+09",
        None,
    ]
