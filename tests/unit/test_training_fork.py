"""A fork begins with what another run has learnt, and leaves that run as it is."""

import errno
import os
from dataclasses import replace

import pytest

from qurl_megatron.checkpoints.integrity import damaged, read_record, write_record
from qurl_megatron.config import load
from qurl_megatron.data.rows import checksum_of
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.samples import SAMPLES_FILE
from qurl_megatron.observe.sinks import WANDB_ID, JsonlSink
from qurl_megatron.observe.timeline import Timeline
from qurl_megatron.training import checkpoint
from qurl_megatron.training import fork as forking
from qurl_megatron.training.fork import fork
from qurl_megatron.training.start import _prepare
from qurl_megatron.training.state import TrainState, claim, latest, recipe_of
from tests.support.descriptions import RECIPE_TEXT
from tests.support.disks import contents
from tests.support.examples import example, keep

STATE = TrainState(
    step=3, cursor={"epoch": 1}, accuracy_before=0.1, accuracy=0.2, guard={"kl_above": 2}
)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE_TEXT)
    return lambda *overrides: load(path, [f"train.run_dir={tmp_path / 'new'}", *overrides])


@pytest.fixture
def source(tmp_path, recipe):
    """A run of three steps, with logs of a fourth that no checkpoint has."""
    run = tmp_path / "old"
    claim(run, recipe(f"train.run_dir={run}")).lock.close()
    folder = run / "checkpoints/step_000003"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/weights.distcp").write_bytes(b"weights")
    STATE.write(folder)
    write_record(folder, {})
    metrics, timeline = JsonlSink(run / "metrics.jsonl"), Timeline(run / "timeline.jsonl")
    keep(run, example(step=3), example(step=4))
    (run / WANDB_ID).write_text("theirs")
    for step in (1, 2, 3, 4):
        metrics.write(step, {"reward/mean": 0.5})
        timeline.event("guard", "warning: x", step)
    metrics.close()
    timeline.close()
    return run


def test_a_fork_has_the_checkpoint_the_logs_and_a_word_on_where_it_comes_from(
    source, recipe, capsys
):
    before = contents(source)
    config = recipe("algo.objective=tis", "optimizer.lr=1e-3")
    fork(source, config)
    new = source.parent / "new"
    newest = latest(new)
    assert newest.name == "step_000003" and recipe_of(new) == config
    record = read_record(newest)
    assert (newest / "inner/weights.distcp").read_bytes() == b"weights"
    assert (
        damaged(newest, record, record) is None
        and record.keys() == read_record(latest(source)).keys()
    )
    state = TrainState.read(newest)
    assert state == TrainState(3, {"epoch": 1}, begun=3)  # the guard counts anew
    told = (
        f"goes on from step 3 of {source}, with optimizer.lr 1e-06 -> 0.001, "
        "algo.objective acr -> tis"
    )
    assert capsys.readouterr().out == f"{new} {told}\n"
    events = Timeline.read(new / "timeline.jsonl")
    assert [span.step for span in events] == [1, 2, 3, 3]
    assert (events[-1].lane, events[-1].name) == ("run", f"fork: {told}")
    for name in ("metrics.jsonl", SAMPLES_FILE):
        assert (new / name).read_bytes() == (source / name).read_bytes()
    assert not (new / WANDB_ID).exists()  # a run of its own there, too
    assert contents(source) == before


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("data.task_args={min_terms=3}", False),
        ("data.task_size=99", False),
        ("train.seed=5", False),
        ("data.prompts_per_step=16", True),
        ("rollout.temperature=0.5", True),
        ("optimizer.lr=0.5", True),
        ("rollout.max_new_tokens=9", True),
        ("reward.kind=exact", True),
    ],
)
def test_prompts_begin_anew_where_they_are_others(source, recipe, override, kept):
    fork(source, recipe(override))
    state = TrainState.read(latest(source.parent / "new"))
    assert (state.cursor is not None) == kept and state.accuracy is state.accuracy_before is None


def test_prompts_begin_anew_where_their_file_holds_others(source, recipe, tmp_path):
    """A run refuses to go on then, and a fork of it begins; held-out prompts may be the same."""
    path, held_out = tmp_path / "data.jsonl", tmp_path / "eval.jsonl"
    for file in (path, held_out):
        file.write_text('{"prompt": "a", "answer": "1"}')
    files = {"data.path": checksum_of(path), "data.eval_path": checksum_of(held_out)}
    folder = latest(source)
    replace(STATE, cursor={"epoch": 1, "files": files}).write(folder)
    (source / "config.toml").unlink()
    data = (f"data.path={path}", f"data.eval_path={held_out}", "data.task=")
    claim(source, recipe(f"train.run_dir={source}", *data)).lock.close()
    path.write_text('{"prompt": "b", "answer": "2"}')
    fork(source, recipe(*data))
    state = TrainState.read(latest(tmp_path / "new"))
    assert state.cursor is None
    event = Timeline.read(tmp_path / "new/timeline.jsonl")[-1]
    assert event.name.endswith(f"with other data in data.path={path}")


def test_asked_for_again_a_fork_goes_on(source, recipe, tmp_path):
    fork(source, recipe())
    before = contents(tmp_path / "new")
    fork(source, recipe())
    assert contents(tmp_path / "new") == before


def test_a_fork_that_was_cut_off_is_made_again(source, recipe, monkeypatch):
    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(forking, "write_record", cut)
    with pytest.raises(KeyboardInterrupt):
        fork(source, recipe())
    monkeypatch.undo()
    assert latest(source.parent / "new") is None
    fork(source, recipe("train.seed=4"))
    assert recipe_of(source.parent / "new").train.seed == 4
    assert len(Timeline.read(source.parent / "new/timeline.jsonl")) == 4  # one event, not two


def test_what_cannot_be_forked_is_one_sentence_and_leaves_no_folder(source, recipe, tmp_path):
    for config, run, message in (
        (recipe("quant.uaq_scale=1.0"), source, r"quant.uaq_scale 1.5 -> 1.0.*no --fork"),
        (recipe("train.steps=3"), source, "has done 3 steps, and train.steps=3 leaves none"),
        (recipe(), tmp_path / "none", "none has no checkpoint to begin with; set train.run_dir"),
    ):
        with pytest.raises(ConfigError, match=message):
            fork(run, config)
        assert not (tmp_path / "new").exists()


def test_files_are_copied_where_they_cannot_be_linked(source, recipe, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(forking.os, "link", refuse)
    fork(source, recipe())
    weights = latest(source.parent / "new") / "inner/weights.distcp"
    assert weights.read_bytes() == b"weights" and weights.stat().st_nlink == 1


def test_a_fork_is_not_begun_with_what_cannot_be_used(source, recipe, tmp_path):
    with pytest.raises(ConfigError, match="data.path=typo.jsonl"):
        _prepare(source, recipe("data.path=typo.jsonl", "data.task="))
    with pytest.raises(ConfigError, match="gone.py does not exist"):
        _prepare(source, recipe(f"rollout.environment={tmp_path}/gone.py:Tool"))
    assert not (tmp_path / "new").exists()


def whole(folder) -> bool:
    record = read_record(folder)
    return record is None or not damaged(folder, record, [*record])


def test_an_evaluation_that_cannot_be_added_leaves_its_checkpoint_whole(source, monkeypatch):
    folder = latest(source)
    told = replace(STATE, accuracy=0.75)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_record", refuse)
        with pytest.raises(ConfigError, match="No space left on device"):
            checkpoint.add_evaluation(source, told)
        assert whole(folder) and [*folder.parent.iterdir()] == [folder]
    checkpoint.add_evaluation(source, told)
    assert TrainState.read(folder) == told and whole(folder)


@pytest.mark.parametrize(
    ("state", "before"),
    [
        (TrainState(step=0), 0.7),
        (TrainState(step=3, begun=3, unevaluated=True), 0.7),  # a fork
        (TrainState(step=60, accuracy_before=0.2, unevaluated=True), 0.2),
        # Its scores are measured otherwise since step 40, so there is none of before.
        (TrainState(step=60, unevaluated=True), None),
    ],
)
def test_only_what_a_run_began_with_is_the_score_before(state, before):
    after = state.scored(0.7)
    assert (after.accuracy_before, after.accuracy, after.unevaluated) == (before, 0.7, False)
