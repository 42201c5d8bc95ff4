"""A reward over HTTP, by real workers from a real server that fails in every way."""

import asyncio
import dataclasses
import json
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from qurl_megatron.config import RewardConfig
from qurl_megatron.kit.errors import ConfigError, Unscored
from qurl_megatron.rewards import RewardPool, check_rewards
from qurl_megatron.rewards.judge import Judge
from qurl_megatron.rewards.pool import RewardDown, Tally, refuse_none_scored
from qurl_megatron.rewards.verifiers import Score
from qurl_megatron.rewards.workers import Abandoned, as_line
from tests.support.rewards import answered, causes, items, numbers, reward_server
from tests.support.waiting import NEVER_S, wait_until


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("qurl_megatron.rewards.judge.LONGEST_PAUSE_S", 0.01)


def asked(url: str, *responses: str, **options) -> list[Score]:
    """The scores of some responses, asked for in one request."""
    judge = Judge(RewardConfig(url=url, **options))
    return judge.answers([as_line(vars(item)) for item in items(*responses)], lambda: False)


def test_requests_are_batches_without_a_key_and_scores_come_back_in_order(monkeypatch):
    monkeypatch.setenv("QURL_API_KEY", "of the engines")
    texts = [str(number) for number in range(10)]
    with (
        reward_server(numbers) as server,
        RewardPool(RewardConfig(url=server.url, batch=3, workers=2)) as pool,
    ):
        assert pool.grade(items(*texts)) == [float(text) for text in texts]
    assert max(map(len, server.asked)) <= 3
    first = next(item for items in server.asked for item in items if item["response"] == "0")
    assert first == {"prompt": "1 + 1 =", "response": "0", "answer": "2", "metadata": {}}
    assert not any("Authorization" in headers for headers in server.headers)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_asked_again(status):
    with reward_server(answered(status), answered(status), numbers) as server:
        assert asked(server.url, "5", "6", url_retries=2) == [5.0, 6.0]
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answered(401, b"no"), "answered 401: it wants a key, and got none (reward.key_env)"),
        (answered(302), "answered 302"),
        (answered(200, b"<html>"), "answered with something that is not JSON: "),
        (answered(200, b"[" * 100_000), "answered with something that is not JSON: "),
        (answered(200, b"[1.0, 2.0]"), "answered with no list of scores for 2 responses"),
        (answered(200, b'{"scores": {"0": 1}}'), "answered with no list of scores for 2"),
        (answered(200, b'{"scores": [1]}'), "answered with 1 scores for 2 responses"),
    ],
    ids=range(7),
)
def test_what_is_no_answer_is_not_asked_again(answer, said):
    with reward_server(answer, numbers) as server:
        first, second = asked(server.url, "5", "6")
    assert first == second and first.cause == "refused"
    assert first.why.startswith(f"{server.url} {said}")
    assert len(server.asked) == 1


def test_a_response_may_have_no_score_beside_others_that_have():
    content = json.dumps({"scores": [None, 0.5, float("nan"), "1"]}).encode()
    with reward_server(answered(200, content)) as server:
        scores = asked(server.url, "a", "b", "c", "d")
    assert causes(scores) == ["invalid", 0.5, "invalid", "invalid"]


def test_a_server_that_is_down_is_named_after_the_retries():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = asked(f"http://127.0.0.1:{port}/a", "1", url_retries=1)
    assert found[0].cause == "unanswered"
    assert found[0].why.startswith(f"http://127.0.0.1:{port}/a did not answer: ")


def silent(items):
    time.sleep(NEVER_S)
    raise AssertionError


def test_one_request_has_a_limit_for_all_of_it(monkeypatch):
    """The first one's strikes at once."""
    timeout, limits = asyncio.timeout, []

    def strike(limit_s: float | None) -> asyncio.Timeout:
        if limit_s is None:
            return timeout(None)  # aiohttp's own
        limits.append(limit_s)
        return timeout(limit_s * (len(limits) > 1))

    monkeypatch.setattr(asyncio, "timeout", strike)
    with reward_server(numbers) as server:
        assert asked(server.url, "4", timeout_s=NEVER_S) == [4.0]
    assert limits == [NEVER_S] * 2


def test_all_requests_have_one_deadline_and_what_has_a_score_keeps_it(monkeypatch):
    """The clock strikes once one of the three answers is there."""
    seconds = [0.0]
    read = Judge._read

    def read_and_strike(self, *arguments):
        seconds[0] = 100.0
        return read(self, *arguments)

    def first_only(items):
        return (numbers if items[0]["response"] == "3" else silent)(items)

    monkeypatch.setattr(Judge, "_read", read_and_strike)
    with reward_server(first_only) as server:
        config = RewardConfig(url=server.url, workers=3, url_deadline_s=100.0, timeout_s=NEVER_S)
        with RewardPool(config) as pool:
            pool.judge = Judge(config, clock=lambda: seconds[0])
            scores = pool.grade(items("3", "4", "5"))
    late = Unscored("unanswered", f"{server.url} within reward.url_deadline_s=100")
    assert scores == [3.0, late, late]


@pytest.mark.parametrize("on_failure", ["score", "stop"])
def test_where_only_servers_failed_the_run_may_be_started_again(on_failure):
    def ends(answer, *expected) -> None:
        with reward_server(answer) as server:
            config = RewardConfig(url=server.url, url_retries=0, on_failure=on_failure)
            with RewardPool(config) as pool, pytest.raises(*expected[:1], match=expected[1]):
                refuse_none_scored(Tally.of(pool.grade(items("1"))), config.setting)

    ends(answered(503), RewardDown, "start its server")
    ends(answered(404), ConfigError, "answered 404.*fix what the server says is wrong")


@pytest.mark.parametrize("leaves", ["pool", "call"])
def test_who_leaves_does_not_wait_for_a_slow_server(leaves):
    config = RewardConfig(url_deadline_s=NEVER_S, timeout_s=NEVER_S, url="http://later")
    with (
        reward_server(silent) as server,
        RewardPool(dataclasses.replace(config, url=server.url)) as pool,
        ThreadPoolExecutor(1) as threads,
    ):
        stop = threading.Event()
        grading = threads.submit(pool.grade, items("1"), stop.is_set)
        wait_until(lambda: server.asked)
        stop.set() if leaves == "call" else pool.leave()
        with pytest.raises(Abandoned, match="no longer scored or answered: the run ends"):
            grading.result()


def test_a_key_comes_from_the_environment_and_is_never_shown(monkeypatch, capfd):
    config = RewardConfig(url="http://127.0.0.1:1/", key_env="A_KEY", url_retries=0)
    with pytest.raises(
        ConfigError, match="^reward.key_env=A_KEY: this environment variable is not"
    ):
        check_rewards(config)
    monkeypatch.setenv("A_KEY", "s3cret\n")
    with pytest.raises(
        ConfigError, match="has characters no key has; set it to the key of reward.u"
    ):
        check_rewards(config)
    monkeypatch.setenv("A_KEY", "s3cret")
    with (
        reward_server(numbers) as server,
        RewardPool(dataclasses.replace(config, url=server.url)) as pool,
    ):
        assert pool.grade(items("1")) == [1.0]
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer s3cret"]
    assert "s3cret" not in repr(asked("http://127.0.0.1:1/", "1", url_retries=0))
    assert "s3cret" not in "".join(capfd.readouterr())


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl to make a certificate")
def test_certificates_are_checked(tmp_path, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj"
    make += " /CN=judge -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(make.split(), check=True, capture_output=True, cwd=tmp_path)
    with reward_server(numbers, tls=tmp_path) as server:
        assert server.url.startswith("https://")
        (unknown,) = asked(server.url, "1", url_retries=0)
        assert "certificate" in unknown.why.lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert asked(server.url, "1", url_retries=0) == [1.0]
    assert len(server.asked) == 1
