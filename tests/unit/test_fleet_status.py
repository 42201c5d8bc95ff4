import io

import pytest
from rich.console import Console

from qurl_megatron import cli
from qurl_megatron.fleet import fleet_status
from qurl_megatron.kit.errors import ConfigError
from tests.support.fake_engine import FakeEngine


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
        assert head.split() == [*("engine", "health", "version", "running", "queued", "model")]
        assert first.split() == [own.url, "paused", "7", "3", "0", "fake"]
        assert second.split() == [sglang.url, "ok", "8", "3", "2", "fake"]


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
