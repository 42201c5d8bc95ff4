"""Standard output whose reader leaves, or that is a file on a full disk."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from qurl_megatron.kit.stop import StopRequest
from qurl_megatron.kit.terminal import terminal

QURL = [sys.executable, "-m", "qurl_megatron.cli"]


@contextlib.contextmanager
def unread():
    """Inside, standard output is a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream, contextlib.redirect_stdout(stream):
        yield stream


def test_what_lasts_goes_on_without_stdout_and_says_so_once(capsys):
    with unread(), terminal(lasting=True):
        for _ in range(3):
            print("a step", flush=True)
        print("the last word")
    assert capsys.readouterr().err == (
        "qurl: stdout cannot be written any more (Broken pipe); the run goes on without it\n"
    )


@pytest.mark.parametrize("flush", [True, False])
def test_any_other_command_ends_with_141_and_without_a_word(capsys, flush):
    with pytest.raises(SystemExit) as left, unread(), terminal(lasting=False):
        print("a line", flush=flush)
    assert left.value.code == 141 and capsys.readouterr().err == ""


def test_stderr_that_goes_away_ends_nothing():
    with unread() as both, contextlib.redirect_stderr(both), terminal(lasting=True):
        for stream in (sys.stderr, sys.stdout):
            print("anything", file=stream, flush=True)


def test_a_page_that_does_not_fit_on_the_disk_is_one_sentence():
    with open("/dev/full", "w") as full:
        command = [*QURL, "show", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "qurl: stdout cannot be written any more (No space left on device)\n"


def test_a_lasting_command_raises_the_soft_limit_on_open_files():
    program = (
        "import resource; from qurl_megatron import cli; "
        "cli._allow_open_files(); print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    limited = ["sh", "-c", 'ulimit -Sn 64; ulimit -Hn 2000; exec "$@"', "sh", sys.executable]
    done = subprocess.run([*limited, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["2000", "2000"], done.stderr


TWICE = """
import os, signal, sys, time
from qurl_megatron.kit.stop import StopRequest
number, apart = int(sys.argv[1]), float(sys.argv[2])
stop = StopRequest()
os.kill(os.getpid(), number)
begun = time.monotonic()
time.monotonic = lambda: begun + apart
os.kill(os.getpid(), number)
print(stop.signal == number)
"""


@pytest.mark.parametrize(
    "apart, code", [pytest.param(1, 0, id="seconds"), pytest.param(60, -15, id="a minute")]
)
def test_sigterm_repeated_at_once_is_one_request_and_later_ends_the_process(apart, code):
    """A batch system signals the launcher, which passes it on, and the rank itself."""
    done = subprocess.run([sys.executable, "-c", TWICE, "15", str(apart)], capture_output=True)
    assert done.returncode == code, done.stderr


@pytest.mark.usefixtures("hears_hangups")
def test_a_session_that_is_closed_may_say_so_twice():
    """As it does: the shell sends one signal, the kernel another."""
    done = subprocess.run([sys.executable, "-c", TWICE, "1", "60"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_under_nohup_a_closed_session_stops_nothing():
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        StopRequest()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
