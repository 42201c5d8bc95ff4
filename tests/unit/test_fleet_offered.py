import time
from pathlib import Path

import pytest

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.engines.starting import Launch, Start
from qurl_megatron.fleet.offered import PAUSE_S, Offered, Offering, prepare
from qurl_megatron.fleet.process import EngineProcess, port_file
from qurl_megatron.fleet.tenancy import Member, read_members
from qurl_megatron.kit.errors import ConfigError
from tests.support.waiting import wait_until


def test_where_engines_are_met_only_the_user_can_read_and_a_new_attempt_keeps_the_key(tmp_path):
    meeting = tmp_path / "run/engines"
    prepare(meeting)
    key = (meeting / "key").read_text()
    assert len(key) > 30
    assert meeting.stat().st_mode & 0o777 == 0o700
    assert (meeting / "key").stat().st_mode & 0o777 == 0o600
    (meeting / "node-engine-0.json").write_text('{"url": "http://gone:1"}')
    prepare(meeting)
    assert (meeting / "key").read_text() == key
    assert offers(meeting) == {}


def offers(folder: Path) -> dict[str, Member]:
    wrong: list[ConfigError] = []
    members = read_members(folder, wrong.append)
    assert not wrong
    return members


@pytest.fixture
def engine(tmp_path):
    """A process that says it listens at port 4321, and what offers it."""
    prepare(tmp_path)
    port = port_file(tmp_path, "engine-0")
    launch = Launch(("sh", "-c", f"echo 4321 > {port}; exec sleep 60"), {})
    process = EngineProcess("engine-0", launch, tmp_path)
    yield process, offered(process, tmp_path)
    if process.popen is not None:
        process.end()


def offered(process: EngineProcess, folder: Path, *, restarts: int = 3) -> Offered:
    return Offered(process, folder / "node-engine-0.json", "10.0.0.7", restarts)


def look_until(one: Offered, condition) -> None:
    wait_until(lambda: one.look(time.monotonic()) or condition())


def test_an_engine_is_offered_with_its_key_once_it_listens(engine, tmp_path):
    process, one = engine
    look_until(one, lambda: offers(tmp_path))
    ((url, member),) = offers(tmp_path).items()
    assert url == "http://10.0.0.7:4321"
    assert member.api_key(tmp_path) == (tmp_path / "key").read_text()


def test_an_engine_that_ends_is_withdrawn_and_started_again_after_a_pause(engine, tmp_path):
    process, one = engine
    look_until(one, lambda: offers(tmp_path))
    process.kill()
    look_until(one, lambda: process.popen is None)
    assert offers(tmp_path) == {}
    one.look(time.monotonic())
    assert process.popen is None
    one.look(time.monotonic() + PAUSE_S)
    look_until(one, lambda: offers(tmp_path))


def test_one_that_cannot_be_started_is_tried_again_after_a_pause(tmp_path):
    process = EngineProcess("engine-0", Launch(("./missing",), {}), tmp_path)
    one = offered(process, tmp_path)
    with pytest.raises(ConfigError, match="./missing cannot be started"):
        one.look(0.0)
    one.look(PAUSE_S - 1)
    with pytest.raises(ConfigError, match="cannot be started"):
        one.look(PAUSE_S)


def test_none_is_started_again_while_the_trainer_has_its_memory(tmp_path):
    start = Start(
        config=RolloutConfig(),
        model_dir=tmp_path,
        folder=tmp_path / "logs",
        scheme="int8",
        dtype="float32",
        api_key="key",
        serve_command=("sh", "-c", "exec sleep 60"),
    )
    with Offering(start, tmp_path) as here:
        here.look()
        (one,) = here._engines
        one.process.kill()
        look_until(one, lambda: one.process.popen is None)
        one._start_at = 0.0  # its pause is over
        with here.lent():
            assert here.look() and one.process.popen is None
        assert here.look() and one.process.popen is not None


def test_an_engine_that_ends_again_and_again_is_given_up(engine, tmp_path):
    process, _ = engine
    one = offered(process, tmp_path, restarts=0)
    one.look(time.monotonic())
    process.kill()
    look_until(one, lambda: one.given_up)
    assert process.popen is None
