import pytest

from qurl_megatron import cli
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def shown(capsys, monkeypatch):
    """Call ``qurl fleet status``: its exit code, and the lines that it prints."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: object) -> tuple[int, list[str]]:
        code = cli.main(["fleet", "status", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, [line.rstrip() for line in (printed.out + printed.err).splitlines()]

    return run


def test_embedded_and_sglang_engines_share_a_table(shown):
    with FakeEngine(embedded=True, version="7") as own, FakeEngine(version="8") as sglang:
        own.running = sglang.running = 3
        own.paused.set()
        code, (head, first, second) = shown(own.url, sglang.url)
        assert code == 0
        assert head.split() == [*("engine", "health", "version", "running", "queued", "model")]
        assert first.split() == [own.url, "paused", "7", "3", "0", "fake"]
        assert second.split() == [sglang.url, "ok", "8", "3", "2", "fake"]


def test_one_engine_of_two_without_an_answer_is_shown_as_it_is_and_gives_exit_code_1(shown):
    with FakeEngine() as engine:
        code, lines = shown(engine.url, f"{engine.url}/[/x]")
    assert code == 1
    assert "ok" in lines[1] and "/[/x]" in lines[2] and "no answer" in lines[2]
    assert "/[/x]" in lines[3]  # why


@pytest.mark.parametrize(
    "url,message",
    [
        ("localhost:30000", "localhost:30000 is not an engine URL: give e.g. http://127"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9/server_info did not answer"),
        ("http://[::zz]:1", "is not an engine URL"),
        ("http://me:pw@127.0.0.1:9", "an engine's URL has a user name or a password, which logs"),
        ("me:pw@127.0.0.1:9", "an engine's URL has a user name or a password, which logs"),
    ],
)
def test_a_bad_address_is_one_sentence_and_exit_code_2(url, message, shown):
    code, (error,) = shown(url)
    assert code == 2 and message in error and "pw" not in error


def test_the_key_comes_from_the_environment(monkeypatch, shown):
    with FakeEngine(api_key="secret") as engine:
        code, (error,) = shown(engine.url)
        assert code == 2 and "401" in error
        monkeypatch.setenv("QURL_API_KEY", "secret")
        assert shown(engine.url)[0] == 0
