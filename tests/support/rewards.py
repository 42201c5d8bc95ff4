"""Rewards for tests: a file of functions that misbehave, and a server that does as it is told."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from qurl_megatron.kit.errors import Unscored
from qurl_megatron.rewards import Item
from qurl_megatron.rewards.verifiers import Score
from tests.support.fake_engine import QuietHandler, Served

MISBEHAVE = '''
import asyncio, functools, os, subprocess, sys, time

def misbehave(word, answer):
    """In the way that the word names, if it names one."""
    if word == "raise":
        raise ValueError("no unit in\\n  this response")
    if word == "exit":
        sys.exit(0)
    if word == "die":
        os._exit(7)
    if word == "killed":  # by somebody else, as often as the answer says, behind a file's name
        times, file = answer.split()
        with open(file, "a") as seen:
            if seen.tell() < int(times):
                seen.write("x")
                seen.flush()
                os.kill(os.getpid(), 9)
    if word == "hang":
        time.sleep(1000)
    if word == "children":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", answer])
        time.sleep(1000)
    if word == "memory":
        bytearray(1 << 33)
    if word == "forks":  # a child that goes on as if it were the worker
        os.fork()
    if word == "forks-to-raise":
        if os.fork() == 0:
            raise ValueError("in the child")

'''
FUNCTIONS = (
    MISBEHAVE
    + '''
def score(prompt, response, answer, metadata):
    """The response names what happens, else it is a number."""
    misbehave(response, answer)
    if response == "stdin":
        print("ready 1.0", flush=True)
        return float(len(sys.stdin.read()))
    odd = {"nan": float("nan"), "inf": -float("inf"), "none": None, "text": "0.5", "true": True,
           "huge": 1e9, "killed": 1.0, "forks": 7.0, "forks-to-raise": 8.0}
    return odd[response] if response in odd else float(response)

def leaves_out(response, **others):
    return float(response)

def echo(prompt, response, answer, metadata):
    return float(f"{prompt}{response}{answer}{len(metadata)}")

async def later(**fields):
    await asyncio.sleep(0)
    return echo(**fields)

def two(response, answer):
    return 1.0

number = 3
'''
)


def write_functions(folder: Path) -> Path:
    path = folder / "own.py"
    path.write_text(FUNCTIONS)
    return path


def items(*responses: str) -> list[Item]:
    return [Item("1 + 1 =", response, "2", {}) for response in responses]


def causes(scores: list[Score]) -> list[float | str]:
    """The scores; in place of one that is missing, its cause."""
    return [score.cause if isinstance(score, Unscored) else score for score in scores]


@dataclass
class Server:
    """Answers POST requests with what ``answers`` gives, one after the other, the last for ever."""

    answers: list[Callable[[list[dict]], tuple[int, bytes]]]
    asked: list[list[dict]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""


def numbers(items: list[dict]) -> tuple[int, bytes]:
    """Each response is its score."""
    return 200, json.dumps({"scores": [float(item["response"]) for item in items]}).encode()


def answered(status: int, content: bytes = b"") -> Callable[[list[dict]], tuple[int, bytes]]:
    return lambda items: (status, content)


@contextlib.contextmanager
def reward_server(
    *answers: Callable[[list[dict]], tuple[int, bytes]], tls: Path | None = None
) -> Iterator[Server]:
    """
    Args:
        tls: folder of cert.pem and key.pem; None speaks plain HTTP.
    """
    server = Server(list(answers))

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.headers.append(dict(self.headers))
            turn = min(len(server.asked), len(server.answers) - 1)
            server.asked.append(body["items"])
            status, content = server.answers[turn](body["items"])
            with contextlib.suppress(OSError):  # it has given up
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

    with Served(Handler, tls=tls) as served:
        server.url = f"{served.url}/score"
        yield server
