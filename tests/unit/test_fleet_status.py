import io
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from qurl_megatron import cli
from qurl_megatron.fleet import fleet_status
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.kit.errors import ConfigError
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S, wait_until


def shown(*urls, **options) -> tuple[int, list[str]]:
    out = io.StringIO()
    code = fleet_status.show(urls, console=Console(file=out, width=160), **options)
    return code, [line.rstrip() for line in out.getvalue().splitlines()]


def test_embedded_and_sglang_engines_share_a_table():
    with FakeEngine(embedded=True, version="7") as own, FakeEngine(version="8") as sglang:
        own.running = sglang.running = 3
        own.paused.set()
        code, (head, first, second) = shown(own.url, sglang.url)
        assert code == 0
        assert head.split() == [
            *("engine", "health", "version", "running", "queued", "tokens/s", "model")
        ]
        assert first.split() == [own.url, "paused", "7", "3", "0", "0", "fake"]
        assert second.split() == [sglang.url, "ok", "8", "3", "2", "123", "fake"]


def test_the_speed_of_an_engine_that_counts_comes_from_two_looks():
    with FakeEngine(embedded=True) as engine:
        client = EngineClient(engine.url)
        before = fleet_status.look([client])
        assert before[0].tokens_per_s is None
        engine.generated += 1000
        [row] = fleet_status.look([client], before)
        assert row.tokens_per_s == pytest.approx(1000 / (row.time - before[0].time))
        engine.generated = 0  # restarted
        assert fleet_status.look([client], [row])[0].tokens_per_s == 0


def test_one_silent_engine_of_two_is_shown_and_gives_exit_code_1(monkeypatch):
    monkeypatch.setattr(fleet_status, "PATIENCE_S", 1.5)
    with FakeEngine() as good, FakeEngine() as deaf:
        deaf.deaf.set()
        code, lines = shown(good.url, deaf.url)
        assert code == 1
        assert "ok" in lines[1] and "no answer" in lines[2] and "within 1.5 s" in " ".join(lines)


def test_a_path_that_looks_like_markup_is_shown_as_it_is():
    with FakeEngine() as engine:
        code, lines = shown(engine.url, f"{engine.url}/[/x]")
    assert code == 1
    assert "ok" in lines[1] and "/[/x]" in " ".join(lines[2:])


@pytest.mark.parametrize(
    "url,message",
    [
        ("localhost:30000", "'localhost:30000' is not an engine URL"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9/server_info did not answer"),
        ("http://[::zz]:1", "is not an engine URL"),
        ("http://me:pw@127.0.0.1:9", "an engine's URL has a user name or a password, which logs"),
        ("me:pw@127.0.0.1:9", "an engine's URL has a user name or a password, which logs"),
    ],
)
def test_a_bad_address_is_one_sentence_and_exit_code_2(url, message, capsys):
    assert cli.main(["fleet", "status", url]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert "pw" not in error


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch, capsys):
    key = tmp_path / "key"
    key.write_text("secret\n")
    with FakeEngine(api_key="secret") as engine:
        assert cli.main(["fleet", "status", engine.url]) == 2
        assert "401" in capsys.readouterr().err
        assert shown(engine.url, api_key_file=key)[0] == 0
        monkeypatch.setenv("QURL_API_KEY", "secret")
        assert shown(engine.url)[0] == 0
        with pytest.raises(ConfigError, match="nokey cannot be read"):
            shown(engine.url, api_key_file=tmp_path / "nokey")


def test_watching_goes_on_until_interrupted(tmp_path):
    with FakeEngine(version="41") as engine:
        command = [sys.executable, "-m", "qurl_megatron.cli", "fleet", "status", engine.url]
        command += ["--watch", "0.05"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
            try:
                wait_until(lambda: engine.looks >= 12 or watching.poll() is not None)
                assert watching.poll() is None
                watching.send_signal(signal.SIGINT)
                out, error = watching.communicate(timeout=PATIENCE_S)
            finally:
                watching.kill()
        assert watching.returncode == 130 and error == b""
        assert b"41" in out
