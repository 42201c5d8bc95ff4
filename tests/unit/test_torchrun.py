"""Nodes without a batch system: what they tell each other, and what follows from it."""

import contextlib
import inspect
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from qurl_megatron.errors import ConfigError
from qurl_megatron.runtime.network import free_port
from qurl_megatron.slurm import folder, supervise
from qurl_megatron.slurm.cause import Evidence, first_cause
from qurl_megatron.slurm.logs import logs
from qurl_megatron.slurm.verdict import Before, decide
from qurl_megatron.torchrun import agent, command, head
from qurl_megatron.torchrun import member as members
from qurl_megatron.torchrun.agent import command as torchruns_command
from qurl_megatron.torchrun.agent import failures
from qurl_megatron.torchrun.board import Board, NodeRow, Order, Word, ask
from qurl_megatron.torchrun.command import endpoint_of, is_here, main
from qurl_megatron.torchrun.head import Head, RunPlan, told_by
from qurl_megatron.torchrun.member import NodeMember
from qurl_megatron.torchrun.round import Round, missing, seats
from tests.waiting import PATIENCE_S, wait_until

LIKE = {"--nnodes": "2", "train.run_dir": "runs/math"}

ENDED = """
W1122 13:03:32 14184 api.py:1028] Sending process 14199 closing signal SIGTERM
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======================================================
die.py FAILED
-------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_13:03:32
  host      : localhost
  rank      : 8 (local_rank: 0)
  exitcode  : -15 (pid: 14199)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 14199
[2]:
  time      : 2026-11-22_13:03:32
  host      : localhost
  rank      : 10 (local_rank: 2)
  exitcode  : {other} (pid: 14202)
  error_file: <N/A>
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_13:03:32
  host      : localhost
  rank      : 9 (local_rank: 1)
  exitcode  : {first} (pid: 14200)  (SIGKILL)
  error_file: <N/A>
"""


def row(name: str, **facts) -> NodeRow:
    return NodeRow(name, LIKE, **facts)


def ordered(*nodes: str) -> Order:
    names = {node: seat for seat, node in enumerate(nodes)}
    return Order(3, "runs/math", "/shared/3", "train1", 29501, names)


def round_of(**rows: NodeRow) -> Round:
    return Round(ordered(*rows), {node: replace(one, attempt=2) for node, one in rows.items()})


@contextlib.contextmanager
def listening() -> Iterator[tuple[Board, tuple[str, int]]]:
    with Board(0, LIKE) as board:
        yield board, ("127.0.0.1", board.port)


def test_torchruns_words_tell_which_ranks_failed_the_first_first():
    assert list(failures(ENDED.format(first=-9, other=1)).items()) == [("9", 137), ("10", 1)]
    assert failures("Traceback (most recent call last):\nOSError: no such port") == {}


def test_a_rank_that_torchrun_has_ended_itself_has_not_failed():
    words = ENDED.format(first=2, other=-9)
    assert failures(words) == {"9": 2, "10": 137}
    assert failures("Unable to shutdown process 9, forcefully exiting via SIGKILL" + words) == {
        "9": 2
    }
    assert failures(ENDED.format(first=-15, other=1))["9"] == 143  # the first one was not


def test_an_attempt_is_finished_when_every_node_has_ended_its_part():
    attempt = round_of(a=row("train1"), b=row("train2"))
    done = {"a": row("train1", attempt=3, ended=0), "b": row("train2", attempt=3)}
    assert attempt.hear(done) == [] and not attempt.finished and not attempt.failing
    done["b"] = replace(done["b"], ended=0)
    assert attempt.hear(done) == []
    assert (attempt.finished, attempt.failing, attempt.code) == (True, False, 0)


def test_what_a_node_says_of_another_attempt_counts_for_nothing():
    attempt = round_of(a=row("train1"))
    assert attempt.hear({"a": row("train1", attempt=2, ended=1, failed={"0": 1})}) == []
    assert (attempt.finished, attempt.failing) == (False, False)


def test_a_rank_that_failed_is_told_of_once_in_words_that_logs_understands():
    attempt = round_of(a=row("train1"), b=row("train2"))
    heard = {
        "a": row("train1", attempt=3),
        "b": row("train2", attempt=3, ended=1, failed={"1": 137, "2": 1}),
    }
    said = attempt.hear(heard)
    assert said == [
        "error: train2: task 1: Killed",
        "error: train2: task 2: Exited with exit code 1",
    ]
    assert attempt.hear(heard) == [] and attempt.failing and not attempt.finished
    heard["b"] = replace(heard["b"], received="TERM")
    assert attempt.hear(heard) == []
    cause = first_cause(Evidence(srun=[f"qurl: {line}" for line in said]))
    assert (cause.first.who, cause.first.node, cause.first.said, cause.first.code) == (
        "rank 1",
        "train2",
        "killed by SIGKILL",
        137,
    )


def test_logs_finds_an_attempts_words_in_job_log_and_names_no_job(tmp_path, capsys):
    number = folder.open_attempt(tmp_path, gpus=2)
    ended = folder.Attempt(number, 0, 0, 0, 4, "", 137, "retry")
    folder.close_attempt(tmp_path, ended)
    (tmp_path / "slurm/job.log").write_text(
        "qurl: attempt 1, from step 0; the ranks write train-RANK.log\n"
        "qurl: error: train2: task 1: Killed\n"
        "qurl: attempt 1: the training step ended with 137; step 4 is saved\n"
    )
    logs(tmp_path, None)
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("attempt 1: ended with 137 (retry); steps 0 to 4 are saved")
    assert said[1] == "The supervisor says: the training step ended with 137; step 4 is saved"
    assert said[3] == "First cause: it was killed: rank 1 on train2, exit code 137"


def test_a_torchrun_that_failed_without_its_ranks_is_quoted():
    attempt = round_of(a=row("train1"))
    assert attempt.hear({"a": row("train1", attempt=3, ended=1, said="OSError: in use")}) == [
        "torchrun on train1 ended with 1: OSError: in use"
    ]
    assert attempt.code == 1


@pytest.mark.parametrize(
    ("failed", "ended", "code"),
    [
        pytest.param({"0": 1, "1": 137}, 1, 137, id="one was killed, the other saw it"),
        pytest.param({"0": 1, "1": 2}, 1, 2, id="a mistake, and one that saw it"),
        pytest.param({"0": 137, "1": 3}, 1, 3, id="the guard goes before a death"),
        pytest.param({"0": 1, "1": 255}, 1, 1, id="no signal has this number"),
        pytest.param({}, 137, 137, id="ended by the head"),
        pytest.param({}, 0, 0, id="well"),
    ],
)
def test_the_exit_code_of_an_attempt_is_that_of_what_came_first(failed, ended, code):
    attempt = round_of(a=row("train1"))
    attempt.hear({"a": row("train1", attempt=3, ended=ended, failed=failed)})
    assert attempt.code == code


def test_a_node_that_is_silent_or_leaves_is_lost_and_named_once():
    attempt = round_of(a=row("train1"), b=row("train2"), c=row("train3"))
    heard = {"a": row("train1", attempt=3), "c": row("train3", attempt=3, left=True)}
    assert attempt.hear(heard) == [
        "lost train2, silent for 15 s",
        "lost train3, which left",
    ]
    assert attempt.lost == "lost train2, silent for 15 s; lost train3, which left"
    assert attempt.hear(heard) == [] and attempt.failing and not attempt.finished
    attempt.hear({"a": row("train1", attempt=3, ended=137)})
    assert attempt.finished and attempt.code == 137
    assert attempt.names == ["train1", "train2", "train3"]


def test_a_node_that_leaves_once_it_has_ended_its_part_is_not_lost():
    attempt = round_of(a=row("train1"), b=row("train2"))
    done = {"a": row("train1", attempt=3), "b": row("train2", attempt=3, ended=0)}
    attempt.hear(done)
    assert attempt.hear({"a": done["a"]}) == [] and not attempt.failing and attempt.lost == ""


def test_the_head_is_the_first_node_and_the_others_keep_their_places():
    names = {"x": "train3", "y": "train1", "z": "train2", "w": "spare"}
    assert seats("z", names, 3) == {"z": 0, "w": 1, "y": 2}
    assert seats("y", {"y": "train1", "new": "train2"}, 2) == {"y": 0, "new": 1}


@pytest.mark.parametrize(
    ("received", "told"), [("", ""), ("INT", "INT"), ("TERM", "TERM"), ("USR1", "TERM")]
)
def test_whoever_gets_a_signal_ends_the_run_and_a_last_warning_is_one(received, told):
    assert told_by({"a": row("train1"), "b": row("train2", received=received)}) == told


def test_a_node_that_does_not_see_the_attempts_folder_yet_looks_again(tmp_path):
    member = NodeMember("a", row("train1"), 1)
    order = replace(ordered("b", "a"), logs=str(tmp_path / "3"))
    assert member.follow(Word(order)) == row("train1")


def test_a_node_without_a_seat_takes_no_part(tmp_path):
    member = NodeMember("a", row("train1"), 1)
    order = replace(ordered("b", "c"), logs=str(tmp_path))
    assert member.follow(Word(order), "TERM") == row("train1", received="TERM")
    assert not list(tmp_path.iterdir())


def test_a_node_that_does_not_come_back_is_named():
    assert missing(["train1", "train2"], ["train1"], 2) == (
        "1 of 2 nodes are here (train1), train2 missing"
    )
    assert missing([], ["train1"], 2) == "1 of 2 nodes are here (train1)"
    assert missing(["vm", "vm"], ["vm"], 2) == "1 of 2 nodes are here (vm), vm missing"


def test_a_node_takes_the_heads_word_home_and_leaves_its_row():
    with listening() as (board, endpoint):
        board.word = Word(ordered("a", "b"), signals=(10, 12), over=True, why="ä")
        assert ask(endpoint, "b", row("train2", failed={"1": 137})) == board.word
        assert board.rows() == {"b": row("train2", failed={"1": 137})}
        assert board.rows(since=float("inf")) == {}


@pytest.mark.parametrize(
    ("like", "why"),
    [
        ({**LIKE, "--nnodes": "4"}, "train2 was started with --nnodes 4, not 2"),
        ({"--nnodes": "2"}, "train2 was started with train.run_dir None, not runs/math"),
    ],
)
def test_a_node_that_was_started_otherwise_is_refused_in_a_sentence(like, why):
    with listening() as (board, endpoint):
        with pytest.raises(ConfigError, match=f"the head refuses this node: {why}"):
            ask(endpoint, "b", NodeRow("train2", like))
        assert board.rows() == {}


ODD = [
    b'["a", {"name": "x", "like": []}]',
    json.dumps([["a"], {"name": "x", "like": LIKE}]).encode(),
    b"[" * 60_000,
]


@pytest.mark.parametrize(
    "line", [b"", b"GET / HTTP/1.1", b"[]", b'["a", {"x": 1}]', b"\xff" * 99, *ODD]
)
def test_strangers_at_the_heads_port_are_no_nodes(line):
    board = Board(None, LIKE)
    assert "another version" in board.answer(line).refused
    assert board.rows() == {}


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\n", b"[]\n", b'{"order": 1}\n'])
def test_something_else_at_the_endpoint_is_a_sentence(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            visitor, _ = server.accept()
            with visitor:
                visitor.recv(1000)
                visitor.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ConfigError, match="another program answers at 127.0.0.1:"):
            ask(server.getsockname(), "b", row("train2"))


def test_torchrun_gets_the_attempts_place_and_restarts_nothing():
    argv = torchruns_command(ordered("a", "b"), 1, 8)
    assert "--max-restarts=0" in argv and argv[-2:] == ["qurl_megatron.torchrun.seat", "runs/math"]
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=8"} <= {*argv}
    assert {"--master-addr=train1", "--master-port=29501"} <= {*argv}


def test_several_nodes_need_an_endpoint_and_one_needs_none():
    assert endpoint_of("head:29500", 2) == ("head", 29500)
    assert endpoint_of(None, 1) is None
    for wrong in (None, "head", "head:", ":29500", "head:0", "head:70000", "head:x"):
        with pytest.raises(ConfigError, match="--nnodes 2 needs --rdzv-endpoint HOST:PORT"):
            endpoint_of(wrong, 2)
    for wrong in ("[::1]:29500", "::1:29500"):
        with pytest.raises(ConfigError, match="IPv6 is not supported; give a name or an IPv4"):
            endpoint_of(wrong, 2)


def test_the_port_of_an_attempt_is_none_that_the_kernel_may_give_away_meanwhile():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.create_server(("127.0.0.1", port := free_port())):
        assert 1024 <= port < first


def test_the_head_is_where_the_endpoint_is():
    own = [a.address for a in psutil.net_if_addrs().get("eth0", ()) if a.family == socket.AF_INET]
    assert all(is_here(address) for address in [*own, "localhost", "127.0.1.1"])
    assert not is_here("192.0.2.1")


@pytest.fixture
def recipe(tmp_path) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\npath = "m"\n[data]\ntask = "chain_sum"\n[parallel]\ntensor = 2\n')
    return str(path)


def test_a_number_of_ranks_that_the_recipe_does_not_have_is_a_sentence(recipe, capsys):
    assert main(["--nproc-per-node", "3", recipe]) == 2
    assert "--nnodes * --nproc-per-node = 3, but parallel.tensor" in capsys.readouterr().err


def test_a_head_that_never_answers_ends_a_node_with_7_and_its_name(recipe, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:  # has the port, and says nothing

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        words = ["--nnodes", "2", "--nproc-per-node", "1", "--wait", "0.1"]
        assert main([*words, "--rdzv-endpoint", endpoint, recipe]) == 7
    assert f"the head at {endpoint} has not answered for 0.10 s" in capsys.readouterr().err


def test_a_port_of_this_node_that_a_connection_of_another_program_has_is_said(
    recipe, capsys, monkeypatch
):
    monkeypatch.setattr(command, "TOLD_S", 0.0)
    monkeypatch.setattr(command, "SILENT_S", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as other,
    ):
        port = other.getsockname()[1]  # nobody listens there, and nobody else can
        words = ["--nnodes", "2", "--nproc-per-node", "1", "--wait", "120"]
        assert main([*words, "--rdzv-endpoint", f"127.0.0.1:{port}", recipe]) == 2
    said = capsys.readouterr()
    assert "no answer yet; the head has 2m00s (--wait)" in said.out
    assert f"port {port} of this node is taken by a program" in said.err


def test_a_port_that_a_head_can_have_is_not_taken():
    port = free_port()
    with Board(port, LIKE):
        assert command.is_taken(port)
    assert not command.is_taken(port)


def test_nodes_that_never_come_end_the_head_with_7_and_are_counted(recipe, capsys, tmp_path):
    port = free_port()
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--wait", "0.1"]
    run_dir = f"train.run_dir={tmp_path}/run"
    assert main([*words, "--rdzv-endpoint", f"127.0.0.1:{port}", recipe, run_dir]) == 7
    told = capsys.readouterr().out
    assert told.removeprefix("qurl: ") in (tmp_path / "run/slurm/job.log").read_text()
    assert f"after 0.10 s 1 of 2 nodes are here ({socket.gethostname()}); start the same" in told
    assert not (tmp_path / "run/slurm/attempts").exists()


def test_what_stops_a_run_names_the_options_of_this_script():
    words = {"limit": "--retries", "again": "the same command goes on"}
    idle = decide(1, "", 2, 2, Before(1, True), steps=9, retries=3, **words)
    assert idle.why.endswith("fix the cause, then the same command goes on")
    many = decide(1, "", 2, 3, Before(3), steps=9, retries=3, **words)
    assert "and --retries=3 allows no further attempt" in many.why


# ---- with a line of shell in the place of torchrun, whose children are the ranks

RUNS = "trap '' USR1 USR2; sleep 60 & wait"


@pytest.fixture
def shell(monkeypatch):
    """Sets the line. Everything beats faster."""
    for module in (command, head):
        monkeypatch.setattr(module, "BEAT_S", 0.02)
    monkeypatch.setattr(head, "WATCH_S", 0.0)
    monkeypatch.setattr(head, "GRACE_S", 0.0)
    monkeypatch.setattr(supervise, "STACKS_S", 0.0)
    monkeypatch.setattr(supervise, "POLL_S", 0.01)
    return lambda line: monkeypatch.setattr(agent, "command", lambda *_: ["sh", "-c", line])


def started(folder: Path) -> NodeMember:
    """A node on which an attempt has begun."""
    member = NodeMember("a", row("train1"), 1)
    member.follow(Word(replace(ordered("a"), logs=str(folder))))
    assert member.row.attempt == 3
    return member


def planned(run_dir: Path = Path("runs/math"), **facts) -> RunPlan:
    plan = {"nodes": 1, "retries": 0, "hung_s": 60.0, "wait_s": 20.0, **facts}
    return RunPlan(run_dir, 8, per_node=1, address="127.0.0.1", hung_steps=10.0, **plan)


def headed(tmp_path: Path, board: Board, **facts) -> Head:
    (tmp_path / "slurm").mkdir(exist_ok=True)
    member, received = NodeMember("a", row("train1"), 1), SimpleNamespace(newest="")
    return Head(planned(tmp_path, **facts), board, member, received)


def told(run_dir: Path, capsys) -> str:
    capsys.readouterr()
    logs(run_dir, 1)
    said = capsys.readouterr().out
    assert "job." not in said.partition("Logs")[0] and "submit" not in said
    return said


def test_logs_says_that_a_run_hung_and_names_the_scripts_own_option(shell, tmp_path, capsys):
    shell(RUNS)
    outcome = headed(tmp_path, Board(None, LIKE), hung_s=0.2).run()
    assert outcome.why.startswith("hung: no new step for 0 s, failure 1 in a row")
    said = told(tmp_path, capsys)
    assert "First cause: the run hung: rank 0\n" in said
    assert "  no new step for 0 s, where 0 are allowed (--hung-s)\n" in said
    assert "raise --hung-s; then start the same command again: the run goes on from" in said


def test_logs_quotes_a_torchrun_that_could_not_start(shell, tmp_path, capsys):
    shell("echo EADDRINUSE, port 29500; exit 1")
    assert headed(tmp_path, Board(None, LIKE)).run().code == 1
    said = told(tmp_path, capsys)
    assert "First cause: a port is taken: torchrun on train1, exit code 1\n  EADDRINUSE" in said


@contextlib.contextmanager
def answering(board: Board, rows: Callable[[int], dict[str, NodeRow]]) -> Iterator[None]:
    """Inside, other nodes bring their rows, which depend on the newest attempt that was on."""
    over = threading.Event()

    def answer() -> None:
        newest = 0
        while not over.wait(0.01):
            if board.word.order is not None:
                newest = board.word.order.number
            for node, one in rows(newest).items():
                board.answer(json.dumps([node, vars(one)]).encode())

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_logs_names_a_lost_node_whose_place_a_spare_one_takes(shell, tmp_path, capsys):
    shell(RUNS)
    board = Board(None, LIKE)
    run = headed(tmp_path, board, nodes=2, retries=1)

    def rows(newest: int) -> dict[str, NodeRow]:
        spare = {"attempt": 2, "ended": 1, "failed": {"1": 3}} if newest == 2 else {}
        return {
            "b": row("train2", attempt=min(newest, 1), left=newest > 0),
            "c": row("train3", **spare),
        }

    with answering(board, rows):
        assert run.run().code == 3
    assert run._names == ["train1", "train3"]
    said = told(tmp_path, capsys)
    assert "First cause: the node is lost: node train2\n  lost train2, which left\n" in said
    assert "the same command runs there again, or on another node" in said


def test_a_node_that_does_not_see_the_runs_folder_tells_the_head_before_it_leaves(monkeypatch):
    monkeypatch.setattr(members, "CACHED_S", 0.0)
    with listening() as (board, endpoint):
        board.word = Word(replace(ordered("a"), logs="/elsewhere/attempts/3"))
        member = NodeMember("a", row("train1"), 1)
        with pytest.raises(ConfigError, match="is not visible on train1 after 0 s") as error:
            command._follow(planned(), endpoint, member, SimpleNamespace(newest=""))
        left = board.rows()["a"]
    assert (left.left, left.refused) == (True, str(error.value))


def test_a_node_that_comes_after_the_head_of_a_run_with_all_steps_has_left_ends_with_0(
    monkeypatch, capsys
):
    monkeypatch.setattr(command, "SILENT_S", 0.1)
    monkeypatch.setattr(RunPlan, "saved", lambda plan: 8)
    endpoint = "127.0.0.1", free_port()
    member, received = NodeMember("a", row("train1"), 1), SimpleNamespace(newest="")
    assert command._follow(planned(wait_s=60.0), endpoint, member, received) == 0
    assert "runs/math has all its 8 steps" in capsys.readouterr().out


def test_what_keeps_a_node_from_taking_part_ends_the_run_with_that_sentence(
    shell, tmp_path, capsys
):
    shell(RUNS)
    board, why = Board(None, LIKE), "/x is not visible on train2"
    run = headed(tmp_path, board, nodes=2)
    refused = row("train2", refused=why, left=True)
    with (
        answering(board, lambda newest: {"b": refused if newest else row("train2")}),
        pytest.raises(ConfigError, match=why),
    ):
        command._lead(run)
    assert (board.word.code, board.word.why) == (2, why)
    assert told(tmp_path, capsys).splitlines()[:2] == [
        f"{tmp_path}, attempt 1: ended with 2 (stop); steps 0 to 0 are saved",
        f"The supervisor says: {why}",
    ]


def test_the_folder_of_each_attempt_may_take_its_time_to_appear(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "CACHED_S", 0.05)
    member = NodeMember("a", row("train1"), 1)
    order = replace(ordered("a"), logs=str(tmp_path / "3"))
    member.follow(Word(order))
    time.sleep(0.06)
    after = Word(replace(order, number=4))
    assert member.follow(after).attempt == 0
    time.sleep(0.06)
    with pytest.raises(ConfigError, match="is not visible on train1"):
        member.follow(after)


def test_a_signal_in_a_missed_beat_does_not_kill_ranks_that_have_to_save(shell, tmp_path):
    shell(RUNS)
    member, received, codes = started(tmp_path), SimpleNamespace(newest=""), []
    endpoint, order = ("127.0.0.1", free_port()), replace(ordered("a"), logs=str(tmp_path))
    received.newest = "TERM"  # while nobody listens
    wait = (planned(), endpoint, member, received)
    follower = threading.Thread(target=lambda: codes.append(command._follow(*wait)), daemon=True)
    follower.start()
    time.sleep(0.2)
    with Board(endpoint[1], LIKE) as board:
        board.word = Word(order)
        wait_until(lambda: codes or any(one.received for one in board.rows().values()))
        assert codes == [] and member.busy and board.rows()["a"].received == "TERM"
        board.word = Word(code=143)
        follower.join(PATIENCE_S)
    assert codes == [143] and not member.busy


def test_what_failed_in_the_beat_in_which_all_must_end_is_told(shell, tmp_path):
    go = tmp_path / "go"
    shell(f"until [ -e {go} ]; do sleep 0.02; done; echo OSError: in use; exit 1")
    member = started(tmp_path)
    go.touch()
    wait_until(lambda: member._torchrun.code() is not None)
    order = replace(ordered("a"), logs=str(tmp_path))
    ended = member.follow(Word(order, over=True))
    assert (ended.ended, ended.said) == (1, "OSError: in use")


def test_ranks_that_do_not_die_at_once_do_not_end_the_script(shell, tmp_path, monkeypatch):
    shell(RUNS)
    monkeypatch.setattr(agent, "END_S", 0.0)  # as if the kernel held them
    member = started(tmp_path)
    member.end()
    assert member.row.ended == 137 and not member.busy


def test_a_last_line_of_any_length_reaches_the_head(shell, tmp_path):
    shell("head -c 100000 /dev/zero | tr '\\0' x; exit 1")
    member = started(tmp_path)
    wait_until(lambda: not member.busy or member._torchrun.code() is not None)
    member.end()
    with listening() as (board, endpoint):
        ask(endpoint, "a", member.row)
        assert board.rows()["a"].said == "x" * 500


def test_many_nodes_may_come_at_once():
    board = Board(0, LIKE)  # does not listen yet
    with contextlib.ExitStack() as stack:
        stack.callback(board._server.server_close)
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", board.port), 0.5))


def test_torchruns_own_words_are_those_that_we_read():
    ended = {
        rank: ProcessFailure(local_rank=rank, pid=99999, exitcode=code, error_file="<N/A>")
        for rank, code in ((8, -9), (9, -15), (10, 1))
    }
    for at, one in enumerate(ended.values()):
        one.timestamp = 1000 + at
    assert failures(str(ChildFailedError("seat", ended))) == {"8": 137, "10": 1}
    assert "forcefully exiting via" in inspect.getsource(api)


def test_a_run_without_slurm_that_has_no_step_is_not_called_a_wrong_name(tmp_path, recipe):
    folder.write_recipe(tmp_path, Path(recipe), [])
    assert "this run has no job in Slurm; `qurl slurm logs" in str(folder.no_job(tmp_path))
