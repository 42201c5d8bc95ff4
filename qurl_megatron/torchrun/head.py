"""The head of a run without Slurm: it gathers the nodes, and decides what follows each attempt.

What it decides, and what it leaves in the run's folder, are those of a job of ``qurl slurm``; so
``qurl slurm logs`` and ``hours`` read them.
"""

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.clock import now
from qurl_megatron.observe.text import duration
from qurl_megatron.runtime.filesystem import refusing
from qurl_megatron.runtime.network import free_port
from qurl_megatron.slurm import folder
from qurl_megatron.slurm.pace import Pace, Stillness, mark, measured
from qurl_megatron.slurm.supervise import Ending, Received, ask_for_stacks
from qurl_megatron.slurm.task import STOPPED
from qurl_megatron.slurm.verdict import WALL_TIME, AttemptOutcome, Decision, before, decide
from qurl_megatron.torchrun.board import BEAT_S, Board, NodeRow, Order, Word
from qurl_megatron.torchrun.member import NodeMember
from qurl_megatron.torchrun.round import Round, missing, seats
from qurl_megatron.training.state import TrainState, latest

GRACE_S = 15.0
"""For what still runs to end once something has failed."""
LEAVING_S = 10.0
"""For the other nodes to hear that the run is over."""
WATCH_S = 2.0
"""Between looks at the run's files."""
TOLD_S = 5.0
"""Before the head says that it waits for nodes."""


class NodeMissing(Exception):
    """A node has not come in time; one sentence."""


@dataclass(frozen=True)
class RunPlan:
    """What the recipe and the command line ask for."""

    run_dir: Path
    steps: int
    nodes: int
    per_node: int
    address: str  # of the head, for the ranks
    retries: int
    hung_s: float
    hung_steps: float
    wait_s: float

    def saved(self) -> int:
        """Step of the newest checkpoint; 0 where there is none."""
        newest = latest(self.run_dir)
        return TrainState.read(newest).step if newest else 0

    def done(self) -> str:
        """A sentence where all steps are saved, else ""."""
        saved = self.saved()
        return f"{self.run_dir} has all its {saved} steps" if saved >= self.steps > 0 else ""


@dataclass
class Head:
    """One run."""

    plan: RunPlan
    board: Board
    member: NodeMember
    received: Received
    _names: list[str] = field(default_factory=list)  # of the nodes of the attempt before
    _word: Word = Word()

    def run(self) -> AttemptOutcome:
        """Try until all steps are done, or another attempt makes no sense.

        Raises:
            ConfigError: the run's folder cannot be written, or is damaged.
            NodeMissing: a node has not come.
        """
        while True:
            if why := self.plan.done():
                self.say(why)
                return AttemptOutcome(Decision.DONE, 0, why)
            rows = self._gather()
            if told := told_by(rows):
                self.say(why := f"stopped by SIG{told} before an attempt began")
                return AttemptOutcome(Decision.STOP, STOPPED, why)
            outcome = self._attempt(rows)
            if outcome.decision is not Decision.RETRY:
                return outcome

    def leave(self, code: int, why: str) -> None:
        """Have all nodes end, this one included."""
        self._want(Word(code=code, why=why))
        end = time.monotonic() + LEAVING_S
        while time.monotonic() < end and not all(row.left for row in self.board.rows().values()):
            time.sleep(BEAT_S / 2)

    def say(self, line: str) -> None:
        """In the terminal, and in job.log for whoever comes later."""
        print(f"qurl: {line}", flush=True)
        path = self.plan.run_dir / "slurm/job.log"
        with refusing(path, key="train.run_dir"), path.open("a", encoding="utf-8") as log:
            log.write(f"qurl: {line}\n")

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        self._want(Word(self._word.order, (*self._word.signals, number)))

    def _gather(self) -> dict[str, NodeRow]:
        """The rows of the nodes once all are here, or one of them wants to end.

        Raises:
            NodeMissing: they have not come in time.
        """
        began, said, plan = time.monotonic(), False, self.plan
        while True:
            self._want(Word())
            # One that was killed a moment ago is silent by now.
            rows = {node: row for node, row in self._heard(began).items() if not row.left}
            if told_by(rows) or len(rows) >= plan.nodes:
                return rows
            waited = time.monotonic() - began
            lacking = missing(self._names, [row.name for row in rows.values()], plan.nodes)
            if waited > plan.wait_s:
                raise NodeMissing(
                    f"after {duration(plan.wait_s)} {lacking}; start the same command on all nodes"
                )
            if waited > TOLD_S and not said:
                said = True
                self.say(f"{lacking}; the rest has {duration(plan.wait_s)} to come (--wait)")
            time.sleep(BEAT_S / 2)

    def _attempt(self, rows: dict[str, NodeRow]) -> AttemptOutcome:
        """One attempt, from its folder to its record."""
        plan = self.plan
        saved = plan.saved()
        taken = seats(self.member.node, {n: row.name for n, row in rows.items()}, plan.nodes)
        ranks = plan.nodes * plan.per_node
        number = folder.open_attempt(plan.run_dir, gpus=ranks, step=saved)
        logs = folder.attempt_folder(plan.run_dir, number).absolute()
        self.say(f"attempt {number}, from step {saved}; the ranks write {logs}/train-RANK.log")
        order = Order(number, str(plan.run_dir), str(logs), plan.address, free_port(), taken)
        try:
            ended = self._watch(Round(order, rows), order, ranks)
        except ConfigError as error:  # of this node, or of another
            record = folder.Attempt(number, 0, 0, saved, plan.saved(), "", 2, Decision.STOP.value)
            folder.close_attempt(plan.run_dir, record)
            self.say(f"attempt {number}: {error}")
            raise
        after = plan.saved()
        outcome = decide(
            ended.code,
            ended.told,
            saved,
            after,
            before(folder.attempts(plan.run_dir)),
            steps=plan.steps,
            retries=plan.retries,
            failed=ended.failed,
            limit="--retries",
            again="the same command goes on",
        )
        record = folder.Attempt(
            number=number,
            job=0,
            restarts=0,
            step_before=saved,
            step_after=after,
            signal=ended.told,
            code=ended.code,
            decision=outcome.decision.value,
        )
        folder.close_attempt(plan.run_dir, record)
        self.say(f"attempt {number}: {outcome.why}")
        if outcome.code not in (0, STOPPED):
            self.say(f"`qurl slurm logs {plan.run_dir} --attempt {number}` says why")
        return outcome

    def _watch(self, seen: Round, order: Order, ranks: int) -> Ending:
        """The attempt, until every node has ended its part or is lost."""
        self._names, told, failed, end_at = seen.names, "", "", float("inf")
        progress = FileProgress(self.plan)
        self._word = Word(order)
        while not seen.finished:
            over = time.monotonic() > end_at
            self._want(Word(order, self._word.signals, over))
            time.sleep(BEAT_S / 2)
            heard = self._heard()
            for line in seen.hear(heard):
                self.say(line)
            if seen.failing and end_at == float("inf"):
                end_at = time.monotonic() + GRACE_S
            if seen.lost and not failed:
                failed, end_at = seen.lost, 0.0
            if not told and (told := told_by(heard)):
                self.say(f"SIG{told}: the ranks save and end")
                self.signal(signal.SIGUSR1)
            if not failed and (why := progress.stuck()):
                self.say(f"{why} (--hung-s)")
                failed, end_at = f"hung: {why.partition(',')[0]}", 0.0
                self._write_stacks(Path(order.logs), ranks)
        self._want(Word())
        # A rank that cannot listen yet dies of the signal, and nothing is lost.
        code = 0 if told and seen.code == 128 + signal.SIGUSR1 else seen.code
        return Ending(code, told, failed)

    def _write_stacks(self, logs: Path, ranks: int) -> None:
        silent = ask_for_stacks(self, logs, ranks)
        self.say(f"the stacks of the ranks are in {logs}/stack-RANK.txt")
        for rank in silent:
            self.say(f"rank {rank} did not answer: it is stopped, or stuck in the kernel")

    def _want(self, word: Word) -> None:
        """Say what all nodes have to do, and do it here."""
        self._word = self.board.word = word
        self.member.follow(word, self.received.newest)

    def _heard(self, since: float = 0.0) -> dict[str, NodeRow]:
        rows = {**self.board.rows(since), self.member.node: self.member.row}
        if refused := next((row.refused for row in rows.values() if row.refused), ""):
            raise ConfigError(refused)
        return rows


class FileProgress:
    """How long a run has made no step, judged by the files that it writes."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._began, self._looked, self._still = now(), time.monotonic(), Stillness()
        self._mark, self._pace = mark(plan.run_dir), self._measured()

    def stuck(self) -> str:
        """A sentence where it is too long, else "". Ask more often than every SEEN_S."""
        still = self._still.seconds()
        if time.monotonic() - self._looked < WATCH_S:
            return ""
        self._looked = time.monotonic()
        if (seen := mark(self._plan.run_dir)) != self._mark:
            self._mark, self._pace = seen, self._measured()
            self._still.moved()
            return ""
        patience = self._pace.patience_s(self._plan.hung_s, self._plan.hung_steps)
        said = f"no new step for {still:.0f} s, where {patience:.0f} are allowed"
        return said if still > patience else ""

    def _measured(self) -> Pace:
        pace = measured(self._plan.run_dir, self._began)
        return pace.without_pauses(self._plan.hung_s, self._plan.hung_steps)


def told_by(rows: dict[str, NodeRow]) -> str:
    """The signal by which somebody ends the run, at whichever node; "": nobody does.

    SIGUSR1, a batch system's last warning, is one of them: here nothing resumes by itself.
    """
    found = next((row.received for row in rows.values() if row.received), "")
    return "TERM" if found == WALL_TIME else found
