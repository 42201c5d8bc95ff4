"""What ended an attempt: the first cause, told from all that only followed from it.

When a rank dies, every other one fails too, in the collective where it waits, and says so at
length. What counts first is therefore not the time but whether a failure can be a consequence:

    1  the traceback of a rank that names a reason of its own
    2  a rank that the system killed, or a node that was lost: srun alone says so; or a run that
       hung, which the supervisor says before it ends the ranks itself
    3  the traceback, or the death, of an engine, or of the task that has those of a rollout node,
       or of that node, unless Slurm ended the job for it: they may die without ending the run
    4  a rank that found no engine left
    5  a rank that found another one gone
    6  a rank that ended without a word

and within each the earliest. Times are those of the nodes' own clocks, or of the file server where
a log tells none: two failures that are closer than the clocks agree may change places.
"""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qurl_megatron.cluster.steps import ENGINES_SAY, EXAMINATION_SAYS
from qurl_megatron.cluster.tracebacks import tracebacks
from qurl_megatron.observe.failures import Failure

REASON, KILLED, ENGINE, NO_ENGINE, NO_PEER, SILENT = range(1, 7)


@dataclass(frozen=True)
class Kind:
    """Failures that are fixed alike."""

    name: str
    pattern: str  # searched in "Type: text"
    advice: str
    weight: int | None = None  # of the list above; None: that of its source


PEERS = (
    r"RankLost|Dist(Backend|Network|Store|)Error|NCCL|nccl[A-Z]|[Ww]atchdog|TCPStore|gloo/|"
    r"[Cc]onnection (closed|reset) by peer|Application timeout caused pair closure|Broken pipe"
)
AGAIN = "then submit again: the run goes on from its newest checkpoint"
KINDS = (
    Kind(
        "GPU memory is used up",
        r"OutOfMemoryError|CUDA out of memory|Cuda failure.*out of memory|_ALLOC_FAILED",
        "lower train.max_tokens or train.micro_batch, set model.recompute=true, or raise "
        "parallel.tensor; `qurl show RECIPE --dry-run` sums up what each rank keeps",
    ),
    Kind(
        "the disk is full",
        r"No space left on device|[Qq]uota|MB are needed",
        f"make room where train.run_dir lies, or lower checkpoint.keep; {AGAIN}",
    ),
    Kind(
        "memory of the node is used up",
        r"MemoryError|Cannot allocate memory|bad_alloc|oom.kill|Out Of Memory",
        "raise node.memory_gib in the cluster file, where 0 takes all of a node, or have fewer "
        f"ranks and engines on one; {AGAIN}",
    ),
    Kind(
        "numbers, or the guard, halted the run",
        r"^Collapse|^NotFinite",
        "report.html shows how it came to that, docs/guard.md says what each threshold means; "
        "started as it is, it would end so again",
    ),
    Kind("a mistake in the input", r"^ConfigError", f"fix what the sentence names, {AGAIN}"),
    Kind(
        "no engine is left",
        r"^EngineError",
        f"the engines' logs, below, say why they ended; fix that, {AGAIN}",
        NO_ENGINE,
    ),
    Kind(
        "a port is taken",
        r"EADDRINUSE|[Aa]ddress already in use",
        f"another process on the node listens there, `ss -ltnp` shows which; {AGAIN}",
    ),
    Kind(
        "another rank is gone",
        PEERS,
        "no rank and no engine says what came first: suspect a node or the network. Look for "
        '"Node failure" in job.log and for Xid in dmesg; NCCL_DEBUG = "WARN" in site.environment '
        f'has NCCL say more; job.extra = ["--exclude=NODE"] leaves out a node; {AGAIN}',
        NO_PEER,
    ),
    Kind(
        "a GPU fails",
        r"CUDA error|CUDA driver|cuda(Error|Runtime)|ECC|Xid|illegal memory access|device-side",
        'where it comes back on the same node, leave that out: job.extra = ["--exclude=NODE"] in '
        "the cluster file; where it comes on any, report it with the traceback",
    ),
    Kind(
        "the file system fails",
        r"Stale file handle|Input/output error|Transport endpoint|Read-only file system",
        f"look whether the shared file system is healthy on that node; {AGAIN}",
    ),
    Kind(
        "the environment lacks something",
        r"ModuleNotFoundError|ImportError|cannot open shared object",
        "site.prolog or the container of the cluster file must give each node what the ranks "
        "import; `qurl show --env` lists what is found",
    ),
    Kind(
        "the node is lost",
        r"[Nn]ode [Ff]ailure|NODE.FAIL|not responding",
        f"`sinfo -R` says why, once Slurm knows; {AGAIN}",
    ),
    Kind(
        "the run hung",
        r"^no new step for",
        "the stacks of the ranks, below, show where each waits; one that wrote none is stopped, or "
        "stuck in the kernel: `dmesg` on its node. Where a step may well take so long, raise "
        f"job.hung_s in the cluster file; {AGAIN}",
    ),
    Kind(
        "Slurm ended the job",
        r"DUE TO (TIME LIMIT|PREEMPTION)",
        f"raise job.signal_s in the cluster file, so that saving has time; {AGAIN}",
    ),
    Kind(
        "it was killed",
        r"killed by SIG(KILL|TERM|INT|HUP)",
        "somebody, or Linux where memory ran out, has killed it: `dmesg -T | grep -i kill` on the "
        f"node says so; {AGAIN}",
    ),
    Kind(
        "it crashed",
        r"killed by SIG|Fatal Python error|terminate called",
        "a fault of native code, or of the hardware where it comes on one node alone; look at the "
        "end of its log",
    ),
    Kind(
        "a fault of the program", "", "the traceback, or the end of its log, says where; report it"
    ),
)
"""The first whose pattern is found counts."""
FULL = next(kind for kind in KINDS if kind.name == "the disk is full")


@dataclass(frozen=True)
class Event:
    """Something that failed."""

    kind: Kind
    weight: int
    who: str  # such as "rank 3"
    said: str
    time: float | None = None
    node: str = ""
    phase: str = ""
    step: int | None = None
    version: int | None = None
    traceback: str = ""
    code: int | None = None  # exit code, where srun tells


@dataclass(frozen=True)
class Log:
    """The end of a file that a rank, a rollout node or an engine has written."""

    who: str
    text: str
    time: float  # when it was last written, Unix seconds
    path: Path
    engine: bool = False


@dataclass(frozen=True)
class Evidence:
    """What there is to read of one attempt."""

    failures: Sequence[Failure] = ()
    logs: Sequence[Log] = ()
    srun: Sequence[str] = ()  # lines of job.log that belong to the attempt


@dataclass(frozen=True)
class Cause:
    """What came first, and what followed from it, in the order of weight and time."""

    first: Event
    followed: list[Event] = field(default_factory=list)


def first_cause(evidence: Evidence) -> Cause | None:
    """None: nothing says that anything failed."""
    prefixes = (ENGINES_SAY, EXAMINATION_SAYS)
    srun = [line for line in evidence.srun if not line.startswith(prefixes)]
    engines = [
        line.removeprefix(ENGINES_SAY) for line in evidence.srun if line.startswith(ENGINES_SAY)
    ]
    codes = exit_codes(srun)
    ranks_heard = {f"rank {failure.rank}" for failure in evidence.failures}
    events = [_of_failure(failure, codes) for failure in evidence.failures]
    for log in evidence.logs:
        events += _of_slurm(log)
        if log.who not in ranks_heard:
            events += _of_log(log, codes)
    events += _of_supervisor(srun)
    ended = any("DUE TO NODE FAILURE" in line for line in srun)  # as a heterogeneous job is
    events += _of_srun(engines, "rollout node", ENGINE, lost=KILLED if ended else ENGINE)
    events += _of_srun(srun, "rank", KILLED, lost=KILLED)
    if not events:
        events += _silent(srun)
    # Sorted is stable: where times are equal or unknown, the order of the lines counts.
    events = sorted(_apart(events), key=lambda event: (event.weight, event.time or 0.0))
    return Cause(events[0], events[1:]) if events else None


def kind_of(said: str) -> Kind:
    return next(kind for kind in KINDS if re.search(kind.pattern, said))


def exit_codes(srun: Sequence[str]) -> dict[str, int]:
    """By task number, such as {"0": 1}."""
    exits = ((tasks, _code(how)) for _, tasks, how in map(_ended, srun))
    return {task: code for tasks, code in exits if code for task in tasks}


def _of_failure(failure: Failure, codes: Mapping[str, int]) -> Event:
    message = f"{failure.kind}: {failure.text}"
    kind = kind_of(message)
    return Event(
        kind,
        kind.weight or REASON,
        f"rank {failure.rank}",
        message,
        failure.time,
        failure.node,
        failure.phase,
        failure.step,
        failure.version,
        failure.traceback,
        codes.get(str(failure.rank)),
    )


def _of_log(log: Log, codes: Mapping[str, int]) -> Iterator[Event]:
    for logged in tracebacks(log.text):
        kind = kind_of(logged.said)
        weight = kind.weight or REASON
        if log.engine:
            weight = max(weight, ENGINE)
        code = None if log.engine else codes.get(log.who.removeprefix("rank "))
        time = logged.time or log.time
        yield Event(kind, weight, log.who, logged.said, time, traceback=logged.text, code=code)
    for line in log.text.splitlines():
        if died := re.match(r"qurl: (engine-\d+) exited with status -(\d+)", line):
            message = f"killed by {_name(int(died[2]))}"
            yield Event(kind_of(message), ENGINE, f"{died[1]} of {log.who}", message, log.time)


def _of_slurm(log: Log) -> Iterator[Event]:
    """What Slurm's daemon writes into the logs of a step, of whichever task."""
    for line in log.text.splitlines():
        if match := re.match(r"slurmstepd(?:-(\S+))?: error: Detected \d+ oom.kill", line):
            yield Event(kind_of(line), KILLED, "a task", line.strip(), node=match[1] or "")


SLURMS = (
    r"[Nn]ode [Ff]ailure|NODE FAILURE|oom.kill|Out Of Memory|not responding|"
    r"DUE TO (TIME LIMIT|PREEMPTION)"
)
"""Lines of job.log that tell of a failure without a task's exit code."""


def _of_supervisor(lines: Sequence[str]) -> Iterator[Event]:
    matches = (re.match(r"qurl: rank (\d+) did not answer", line) for line in lines)
    silent = ", ".join(match[1] for match in matches if match)
    for line in lines:
        if line.startswith("qurl: no new step for"):
            message, silent_ones = (
                line.removeprefix("qurl: "),
                f"rank {silent}" if silent else "the supervisor",
            )
            yield Event(kind_of(message), KILLED, silent_ones, message)
        if line.startswith("qurl: ") and kind_of(line) is FULL:  # then ranks can keep nothing
            yield Event(FULL, REASON, "the supervisor", line.removeprefix("qurl: "))


def _of_srun(lines: Sequence[str], task: str, weight: int, *, lost: int) -> Iterator[Event]:
    """Up to where srun itself begins to end tasks.

    Args:
        lines: of one step.
        task: what one of its tasks is called.
        weight: of what ended one.
        lost: of a node of the step that was lost.
    """
    for line in lines:
        if "Terminating StepId" in line or "Job step aborted" in line:
            return
        node, tasks, how = _ended(line)
        if number := _signal(how):
            message, code = f"killed by {_name(number)}", 128 + number
            for task_number in tasks:
                yield Event(
                    kind_of(message), weight, f"{task} {task_number}", message, node=node, code=code
                )
        elif gone := re.search(r"Node failure on (\S+)", line):
            message = line.partition("error: ")[2] or line
            yield Event(kind_of(line), lost, f"node {gone[1]}", message)
        elif re.search(SLURMS, line):
            named_tasks = f"{task} {', '.join(tasks)}" if tasks else "srun"
            yield Event(
                kind_of(line), weight, named_tasks, line.partition("error: ")[2] or line, node=node
            )


def _silent(lines: Sequence[str]) -> Iterator[Event]:
    for node, tasks, how in map(_ended, lines):
        if how.startswith("Exited") and (code := _code(how)):
            message = f"e{how[1:]} and left no word"
            for task in tasks:
                yield Event(kind_of(message), SILENT, f"rank {task}", message, node=node, code=code)


def _ended(line: str) -> tuple[str, list[str], str]:
    """``srun: error: train1: tasks 0-1,4: Killed`` -> node, tasks, how; empty for other lines."""
    match = re.match(r"srun: error: (\S+): tasks? ([\d,-]+): (.*)", line)
    if not match:
        return "", [], ""
    parts = re.findall(r"(\d{1,6})(?:-(\d{1,6}))?", match[2])
    tasks = [str(n) for first, last in parts for n in range(int(first), int(last or first) + 1)]
    return match[1], tasks, match[3].strip()


def _code(how: str) -> int:
    """Exit code of a task; 0 where srun does not tell."""
    if number := _signal(how):
        return 128 + number
    match = re.fullmatch(r"Exited with exit code (\d{1,3})", how)
    return int(match[1]) if match else 0


def _signal(how: str) -> int:
    """The signal that ended a task, by Slurm's word for it; 0: none did."""
    word = how.removesuffix("(core dumped)").strip()
    return next((n for n in signal.valid_signals() if word and signal.strsignal(n) == word), 0)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def _apart(events: Sequence[Event]) -> list[Event]:
    """Each once: logs quote one another."""
    return list({(event.who, event.said): event for event in events}.values())
