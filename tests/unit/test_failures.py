"""What a rank leaves of its failure, and where it says it was."""

import json

import pytest

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe import failures
from qurl_megatron.observe.failures import FOLDER, Whereabouts, keep, read_failures
from qurl_megatron.observe.metrics import Timer
from tests.support.slurm_runs import submitted


@pytest.fixture
def here(monkeypatch) -> Whereabouts:
    monkeypatch.setattr(failures, "HERE", place := Whereabouts("train", 7, 6))
    return place


def test_a_failure_is_kept_with_its_traceback_and_where_in_the_run_it_was(tmp_path, here):
    def breaks():
        raise RuntimeError("CUDA out of memory")

    env = {FOLDER: str(tmp_path), "RANK": "3", "SLURMD_NODENAME": "train1"}
    try:
        breaks()
    except RuntimeError as error:
        keep(error, env)
    (failure,) = read_failures(tmp_path)
    assert (failure.rank, failure.node) == (3, "train1")
    assert (failure.phase, failure.step, failure.version) == ("train", 7, 6)
    assert (failure.kind, failure.text) == ("RuntimeError", "CUDA out of memory")
    assert "in breaks" in failure.traceback
    assert [path.name for path in tmp_path.iterdir()] == ["failure-3.json"]


def test_outside_of_a_job_and_on_a_bad_disk_nothing_is_kept_and_nothing_raised(tmp_path):
    keep(RuntimeError("x"), {})
    keep(RuntimeError("x"), {FOLDER: str(tmp_path / "gone")})
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_before_there_are_ranks_is_kept_too(tmp_path, monkeypatch):
    from qurl_megatron.cluster import tasks

    monkeypatch.setattr(tasks, "stop_on_usr1", lambda _: None)  # it would block SIGUSR1 in pytest
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("SLURM_PROCID", "1")
    run_dir = submitted(tmp_path / "run", "model.path=nowhere", "warmstart.steps=0")
    with pytest.raises(ConfigError):
        tasks.task(run_dir)
    (failure,) = read_failures(tmp_path)
    assert (failure.rank, failure.kind) == (1, "ConfigError")
    assert "model.path=nowhere does not exist" in failure.text


def test_the_earliest_failure_comes_first_and_a_damaged_one_is_left_out(tmp_path, here):
    for rank in (2, 0, 1):
        keep(RuntimeError(str(rank)), {FOLDER: str(tmp_path), "RANK": str(rank)})
    path = tmp_path / "failure-0.json"
    early = {**json.loads(path.read_text()), "time": 1.0}
    path.write_text(json.dumps(early))
    (tmp_path / "failure-1.json").write_text("{")
    assert [one.rank for one in read_failures(tmp_path)] == [0, 2]


def test_a_phase_that_fails_stays_the_phase_and_one_that_ends_does_not():
    place = Whereabouts()
    timer = Timer(place.enter)
    with timer.phase("train"):
        pass
    with place.doing("saving"):
        assert place.phase == "saving"
    assert place.phase == "train"
    with pytest.raises(OSError), place.doing("saving"):
        raise OSError
    assert place.phase == "saving"
