"""``launch/torchrun.py``: the same command on every node; one of them becomes the head.

The head is the node at ``--rdzv-endpoint``, and where several scripts run there, the first of them.
"""

import argparse
import contextlib
import errno
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from qurl_megatron.config import load
from qurl_megatron.config.arguments import Parser, parse
from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.text import duration
from qurl_megatron.runtime.launch import stopping
from qurl_megatron.runtime.terminal import terminal
from qurl_megatron.slurm import folder
from qurl_megatron.slurm.cluster import JobConfig
from qurl_megatron.slurm.supervise import Received
from qurl_megatron.slurm.task import STOPPED
from qurl_megatron.slurm.verdict import BAD_NODE, AttemptOutcome, Decision
from qurl_megatron.torchrun.board import BEAT_S, SILENT_S, Board, NodeRow, Word, ask
from qurl_megatron.torchrun.head import TOLD_S, Head, NodeMissing, RunPlan
from qurl_megatron.torchrun.member import NodeMember

LOCAL = "127.0.0.1"


@terminal(lasting=True)
def main(argv: list[str] | None = None) -> int:
    """
    Returns:
        0 when all steps are done; 2 for a mistake in the input; 3 where the guard halted the run; 4
        where another attempt would bring it no further; 7 where a node is missing; 143 after a
        clean stop on SIGTERM, SIGHUP or Ctrl-C; else that of a rank that failed.
    """
    options = parse(parser(), argv)
    try:
        return _run(options)
    except (ConfigError, NodeMissing) as error:
        print(f"qurl: {error}", file=sys.stderr)
        return BAD_NODE if isinstance(error, NodeMissing) else 2


def parser() -> Parser:
    parser = Parser(
        prog="torchrun.py",
        description="Train under torchrun, again after a failure; the same command on every node.",
    )
    add = parser.add_argument
    add("--nnodes", type=int, default=1, help="nodes; default 1")
    add("--nproc-per-node", type=int, required=True, help="ranks on each node, one for each GPU")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="where the nodes meet; HOST is one of them")
    job = JobConfig()
    add(
        "--retries", type=int, default=job.retries, help=f"failures in a row; default {job.retries}"
    )
    add(
        "--hung-s",
        type=float,
        default=job.hung_s,
        help=f"seconds without a new step after which the ranks are ended; default {job.hung_s}",
    )
    add("--wait", type=float, default=600, help="seconds that nodes have to come; default 600")
    add("recipe", type=Path, help="TOML recipe; some ship in launch/recipes")
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="e.g. quant.scheme=fp8",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    config = load(options.recipe, options.overrides)
    ranks, needed = options.nnodes * options.nproc_per_node, config.parallel.world_size
    if ranks != needed:
        raise ConfigError(
            f"--nnodes * --nproc-per-node = {ranks}, but parallel.tensor * parallel.pipeline * "
            f"parallel.context * parallel.data = {needed}; make them equal"
        )
    endpoint = endpoint_of(options.rdzv_endpoint, options.nnodes)
    plan = RunPlan(
        run_dir=Path(config.train.run_dir),
        steps=config.train.steps,
        nodes=options.nnodes,
        per_node=options.nproc_per_node,
        address=endpoint[0] if endpoint else LOCAL,
        retries=options.retries,
        hung_s=options.hung_s,
        hung_steps=JobConfig().hung_steps,
        wait_s=options.wait,
    )
    like = {
        "--nnodes": str(plan.nodes),
        "--nproc-per-node": str(plan.per_node),
        "train.run_dir": str(plan.run_dir),
    }
    member = NodeMember(uuid.uuid4().hex, NodeRow(socket.gethostname(), like), plan.per_node)
    with contextlib.ExitStack() as stack:
        received = stack.enter_context(Received(*stopping()))
        stack.callback(member.end)
        board = _board(endpoint, like)
        if board is None:
            assert endpoint is not None, "else this node would be the head"
            return _follow(plan, endpoint, member, received)
        stack.enter_context(board)
        folder.write_recipe(plan.run_dir, options.recipe, options.overrides)
        return _lead(Head(plan, board, member, received))


def _lead(head: Head) -> int:
    try:
        outcome = head.run()
    except NodeMissing as missing:
        outcome = AttemptOutcome(Decision.STOP, BAD_NODE, str(missing))
        head.say(outcome.why)
    except ConfigError as error:
        head.leave(2, str(error))
        raise
    head.leave(outcome.code, outcome.why)
    return outcome.code


def _follow(
    plan: RunPlan, endpoint: tuple[str, int], member: NodeMember, received: Received
) -> int:
    """Do what the head wants until it says that the run is over, or does not come back."""
    where, wait_s = f"{endpoint[0]}:{endpoint[1]}", plan.wait_s
    heard, answered, said = time.monotonic(), False, False
    print(f"qurl: this node follows the head at {where}", flush=True)
    while True:
        try:
            word = ask(endpoint, member.node, member.row)
        except OSError:
            silent = time.monotonic() - heard
            if silent > TOLD_S and not said:
                said = True
                print(f"qurl: no answer yet; the head has {duration(wait_s)} (--wait)", flush=True)
            if silent > SILENT_S:
                member.end()
                if why := plan.done():  # the head said so before this node could hear it
                    print(f"qurl: {why}", flush=True)
                    return 0
                if not answered and is_here(endpoint[0]) and is_taken(endpoint[1]):
                    raise ConfigError(
                        f"--rdzv-endpoint: port {endpoint[1]} of this node is taken by a program "
                        "that does not answer as a head does; choose another port, on all nodes"
                    ) from None
            if received.newest and not member.busy:  # else its ranks have to save
                return STOPPED
            if silent > wait_s:
                raise NodeMissing(
                    f"the head at {where} has not answered for {duration(wait_s)}; start the same "
                    "command there, and here again"
                ) from None
        else:
            heard, answered, said = time.monotonic(), True, False
            _obey(endpoint, member, word, received)
            if word.code is not None:
                print(f"qurl: {word.why}", flush=True)
                with contextlib.suppress(OSError):  # it need not wait for a node that says so
                    ask(endpoint, member.node, replace(member.row, left=True))
                return word.code
        time.sleep(BEAT_S)


def _obey(endpoint: tuple[str, int], member: NodeMember, word: Word, received: Received) -> None:
    try:
        member.follow(word, received.newest)
    except ConfigError as error:  # the head ends the run with it
        member.end()
        with contextlib.suppress(OSError):
            ask(endpoint, member.node, replace(member.row, refused=str(error), left=True))
        raise


def _board(endpoint: tuple[str, int] | None, like: Mapping[str, str]) -> Board | None:
    """The head's board; None where another node is the head, or another script on this one.

    Raises:
        ConfigError: the endpoint's host has no address.
    """
    if endpoint is None:
        return Board(None, like)
    if not is_here(endpoint[0]):
        return None
    try:
        return Board(endpoint[1], like)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"--rdzv-endpoint port {endpoint[1]}: {error.strerror}") from None
        return None


def endpoint_of(given: str | None, nodes: int) -> tuple[str, int] | None:
    """Host and port; None for one node alone.

    Raises:
        ConfigError: it is not an endpoint, or there is none where nodes have to meet.
    """
    if nodes == 1:
        return None
    host, _, port = (given or "").rpartition(":")
    if ":" in host:
        raise ConfigError(
            f"--rdzv-endpoint {given}: IPv6 is not supported; give a name or an IPv4 address"
        )
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"--nnodes {nodes} needs --rdzv-endpoint HOST:PORT, where HOST is one of the nodes, on "
            f"which PORT is free; got {given!r}"
        )
    return host, int(port)


def is_here(host: str) -> bool:
    """Whether this is the name of this machine.

    Raises:
        ConfigError: no machine is.
    """
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(
            f"--rdzv-endpoint: {host} cannot be resolved ({error.strerror}); give an address"
        ) from None
    own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    return any(one in own or one.startswith("127.") for one in found)


def is_taken(port: int) -> bool:
    """Nobody can listen at it on this machine: somebody does already, or has a connection there.

    Asking does not keep a script that wants it as the head from getting it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
