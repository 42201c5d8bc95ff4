"""``qurl slurm logs``: why an attempt ended, with the first cause on top.

It reads the folder alone: it works while the run goes on, and on machines without Slurm. When a
rank dies, every other one fails too, in the collective where it waits, and says so at
length. Time therefore counts less than whether a failure can be a consequence:

    1  the traceback of a rank that names a reason of its own
    2  a rank that the system killed, or a node that was lost: srun alone says so; or a run that
       hung, which the supervisor says before it ends the ranks itself
    3  the traceback, or the death, of an engine, or of the task that has a rollout node's engines:
       they may die without ending the run
    4  a rank that found no engine left
    5  a rank that found another one gone
    6  a rank that ended without a word

and within each the earliest. Times are from the nodes' own clocks, or from the file server for a
log: two failures that are closer than the clocks agree may change places.
"""

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.cluster import folder
from qurl_megatron.cluster.folder import Attempt
from qurl_megatron.cluster.layout import ENGINES_PREFIX, EXAMINATION_PREFIX
from qurl_megatron.cluster.verdict import GOES_ON, Decision
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.observe.failures import Failure, read_failures
from qurl_megatron.observe.samples import SAID

TASKS = {"train": "rank", "engines": "rollout node"}
"""The writer of an attempt's log, by the beginning of its file's name."""
TAIL = 4 << 20
"""Bytes that are read from the end of a log."""
LATE_S = 60.0
"""By how much the file server's clock, and an engine's last word, may be past an attempt's end."""

REASON, KILLED, ENGINE, NO_ENGINE, NO_PEER, SILENT = range(1, 7)


@dataclass(frozen=True)
class Kind:
    """Failures that are fixed alike."""

    name: str
    pattern: str  # searched in "Type: text"
    advice: str
    weight: int | None = None  # of the list above; None: given by its source


PEERS = (
    r"RankLost|Dist(Backend|Network|Store|)Error|NCCL|nccl[A-Z]|[Ww]atchdog|TCPStore|gloo/|"
    r"[Cc]onnection (closed|reset) by peer|Application timeout caused pair closure|Broken pipe"
)
KINDS = (
    Kind(
        "GPU memory is used up",
        r"OutOfMemoryError|CUDA out of memory|Cuda failure.*out of memory|_ALLOC_FAILED",
        "lower train.max_tokens or train.micro_batch, set model.recompute=true, or raise "
        "parallel.tensor; `qurl show RECIPE --dry-run` sums up the memory of each rank",
    ),
    Kind(
        "the disk is full",
        r"No space left on device|[Qq]uota|MB are needed",
        "make room where train.run_dir lies, or lower checkpoint.keep",
    ),
    Kind(
        "memory of the node is used up",
        r"MemoryError|Cannot allocate memory|bad_alloc|oom.kill|Out Of Memory",
        "raise node.memory_gib in the cluster file, where 0 takes all of a node, or have fewer "
        "ranks and engines on one",
    ),
    Kind(
        "numbers, or the guard, halted the run",
        r"^Collapse|^NotFinite",
        "report.html shows how it came to that, docs/guard.md says what each threshold means; "
        "started as it is, it would end so again",
    ),
    Kind("a mistake in the input", r"^ConfigError", "fix what the sentence names"),
    Kind(
        "no engine is left",
        r"^EngineError",
        "the engines' logs, below, say why they ended; fix that",
        NO_ENGINE,
    ),
    Kind(
        "another rank is gone",
        PEERS,
        "no rank and no engine says what came first: suspect a node or the network. Look for "
        '"Node failure" in job.log and for Xid in dmesg; NCCL_DEBUG = "WARN" in site.environment '
        'has NCCL say more; job.extra = ["--exclude=NODE"] leaves out a node',
        NO_PEER,
    ),
    Kind(
        "the node fails",
        r"CUDA (driver )?error|cuda(Error|Runtime)|ECC|Xid|illegal memory access|device-side|"
        r"Stale file handle|Input/output error|Transport endpoint|Read-only file system|"
        r"[Nn]ode [Ff]ailure|NODE.FAIL|not responding",
        "`sinfo -R`, and `dmesg` on the node, say why; where it comes back on the same node, leave "
        'that out: job.extra = ["--exclude=NODE"] in the cluster file; where it comes on any, '
        "report it with the traceback",
    ),
    Kind(
        "the environment lacks something",
        r"ModuleNotFoundError|ImportError|cannot open shared object",
        "site.prolog or the container of the cluster file must give each node what the ranks "
        "import; `qurl show --env` lists what it finds",
    ),
    Kind(
        "the run hung",
        r"^no new step for",
        "the stacks of the ranks, below, show where each waits; one that wrote none is stopped, or "
        "stuck in the kernel: `dmesg` on its node. Where a step may well take so long, raise "
        "job.hung_s in the cluster file",
    ),
    Kind(
        "it was killed",
        r"killed by SIG|DUE TO (TIME LIMIT|PREEMPTION)",
        "find out what killed it: a person; Linux, where memory ran out (`dmesg -T | grep -i kill` "
        "on the node); Slurm at the time limit (raise job.signal_s); a crash of native code (the "
        "end of its log)",
    ),
    Kind(
        "a fault of the program", "", "the traceback, or the end of its log, says where; report it"
    ),
)
"""The first whose pattern matches counts."""
FULL = KINDS[1]


@dataclass(frozen=True)
class Event:
    """A failure."""

    weight: int
    source: str  # such as "rank 3"
    message: str
    time: float = 0.0  # Unix seconds; 0: not known
    node: str = ""
    place: str = ""  # the phase, and the step and version, by a rank's own account
    traceback: str = ""

    @property
    def kind(self) -> Kind:
        return kind_of(self.message)


@dataclass(frozen=True)
class Log:
    """The end of a file that a rank, a rollout node or an engine has written."""

    source: str
    text: str
    time: float  # when it was last written, Unix seconds
    engine: bool = False


def causes(
    failures: Sequence[Failure] = (), logs: Sequence[Log] = (), srun: Sequence[str] = ()
) -> list[Event]:
    """Return the first cause, and then its consequences; [] if nothing tells of a failure.

    Args:
        srun: lines of job.log that belong to the attempt.
    """
    ranks, engines = [], []
    for line in srun:
        if line.startswith(ENGINES_PREFIX):
            engines.append(line.removeprefix(ENGINES_PREFIX))
        elif not line.startswith(EXAMINATION_PREFIX):
            ranks.append(line)
    events = [_of_failure(failure) for failure in failures]
    ranks_heard = {event.source for event in events}
    for log in logs:
        if log.source not in ranks_heard:
            events += _of_log(log)
    events += _of_supervisor(ranks)
    events += _of_srun(engines, "rollout node", ENGINE)
    events += _of_srun(ranks, "rank", KILLED)
    if not events:
        events += _silent(ranks)
    unique = {(event.source, event.message): event for event in events}  # logs quote one another
    # Sorted is stable: where times are equal or unknown, the order of the lines counts.
    return sorted(unique.values(), key=lambda event: (event.weight, event.time))


def kind_of(message: str) -> Kind:
    return next(kind for kind in KINDS if re.search(kind.pattern, message))


def _of_failure(failure: Failure) -> Event:
    message = f"{failure.kind}: {failure.text}"
    place = failure.phase
    if failure.step is not None:
        place += f" of step {failure.step} with weights {failure.version}"
    return Event(
        kind_of(message).weight or REASON,
        f"rank {failure.rank}",
        message,
        failure.time,
        failure.node,
        place,
        failure.traceback,
    )


def _of_log(log: Log) -> Iterator[Event]:
    for message, text in tracebacks(log.text):
        weight = kind_of(message).weight or REASON
        if log.engine:
            weight = max(weight, ENGINE)
        yield Event(weight, log.source, message, log.time, traceback=text)
    for line in log.text.splitlines():
        if died := re.match(r"qurl: (engine-\d+) exited with status -(\d+)", line):
            message = f"killed by {_signal_name(int(died[2]))}"
            yield Event(ENGINE, f"{died[1]} of {log.source}", message, log.time)


SLURMS = (
    r"[Nn]ode [Ff]ailure|NODE FAILURE|oom.kill|Out Of Memory|not responding|"
    r"DUE TO (TIME LIMIT|PREEMPTION)"
)
"""Lines of job.log that tell of a failure without a task's exit code."""


def _of_supervisor(lines: Sequence[str]) -> Iterator[Event]:
    silent_ranks = re.findall(r"^qurl: rank (\d+) did not answer", "\n".join(lines), re.MULTILINE)
    for line in lines:
        if not line.startswith("qurl: "):
            continue
        message = line.removeprefix("qurl: ")
        if message.startswith("no new step for"):
            source = "the supervisor"
            if silent_ranks:
                source = f"rank {', '.join(silent_ranks)}"
            yield Event(KILLED, source, message)
        elif kind_of(line) is FULL:  # then ranks can keep nothing
            yield Event(REASON, "the supervisor", message)


def _of_srun(lines: Sequence[str], task: str, weight: int) -> Iterator[Event]:
    """Yield the failures that one step's srun names before it begins to end tasks itself.

    Args:
        task: name for one of its tasks.
        weight: of a task that was killed, or a node that was lost.
    """
    for line in lines:
        if "Terminating StepId" in line or "Job step aborted" in line:
            return
        node, tasks, ending = _task_end(line)
        message = line.partition("error: ")[2] or line
        if number := _signal(ending):
            message = f"killed by {_signal_name(number)}"
            for index in tasks:
                yield Event(weight, f"{task} {index}", message, node=node)
        elif gone := re.search(r"Node failure on (\S+)", line):
            yield Event(weight, f"node {gone[1]}", message)
        elif re.search(SLURMS, line):
            source = "srun"
            if tasks:
                source = f"{task} {', '.join(tasks)}"
            yield Event(weight, source, message, node=node)


def _silent(lines: Sequence[str]) -> Iterator[Event]:
    for line in lines:
        node, tasks, ending = _task_end(line)
        if ending.startswith("Exited with exit code"):
            message = f"e{ending[1:]} and left no word"
            for task in tasks:
                yield Event(SILENT, f"rank {task}", message, node=node)


def _task_end(line: str) -> tuple[str, list[str], str]:
    """Read ``srun: error: train1: tasks 0-1,4: Killed`` as node, tasks and ending, or as empty."""
    match = re.match(r"srun: error: (\S+): tasks? ([\d,-]+): (.*)", line)
    if not match:
        return "", [], ""
    tasks = []
    for first, last in re.findall(r"(\d{1,6})(?:-(\d{1,6}))?", match[2]):
        tasks += [str(task) for task in range(int(first), int(last or first) + 1)]
    return match[1], tasks, match[3].strip()


def _signal(ending: str) -> int:
    """Return the signal that ended a task, by Slurm's word for it; 0: none did."""
    word = ending.removesuffix("(core dumped)").strip()
    for number in signal.valid_signals():
        if word and signal.strsignal(number) == word:
            return number
    return 0


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


HEAD = re.compile(r"Traceback \(most recent call last\):")
RAISED = re.compile(r"[A-Za-z_][\w.]*(: |$)")
LEAVING = ("KeyboardInterrupt", "SystemExit", "CancelledError")
"""Exceptions of a process that was asked to leave."""


def tracebacks(log: str) -> list[tuple[str, str]]:
    """Return each traceback's last line, such as "RuntimeError: CUDA out of memory", and its text.

    They are in the order of the log; processes that were asked to leave are left out. A line may
    begin with a time, as SGLang's do. Of chained exceptions the first comes first.
    """
    lines, logged, at = log.splitlines(), [], 0
    while at < len(lines):
        begin = at
        at += 1
        if not HEAD.search(lines[begin]) or SAID.match(lines[begin]):  # else a model wrote it
            continue
        while at < len(lines) and lines[at][:1] in (" ", "\t"):
            at += 1
        message = "cut off"
        if at < len(lines) and RAISED.match(lines[at]):
            message = lines[at].strip()
            at += 1
        if not message.rpartition(".")[2].startswith(LEAVING):
            logged.append((message, "\n".join(lines[begin:at])))
    return logged


def logs(run_dir: Path, number: int | None) -> int:
    """Print the first cause of attempt ``number``, or of the newest one."""
    attempts = folder.attempts(run_dir)
    if not attempts:
        job = folder.job(run_dir)
        raise ConfigError(f"{run_dir} has no attempt yet; `squeue --jobs={job}` says why it waits")
    last = len(attempts)
    if number is None:
        number = last
    if not 1 <= number <= last:
        raise ConfigError(f"--attempt {number}: {run_dir} has attempts 1 to {last}")
    attempt = attempts[number - 1]
    print(printable(render(run_dir, attempt, causes(*gather(run_dir, attempt)))))
    return 0


def gather(run_dir: Path, attempt: Attempt) -> tuple[list[Failure], list[Log], list[str]]:
    """Read everything that tells of an attempt, as arguments of ``causes``."""
    logs_folder = folder.attempt_folder(run_dir, attempt.number)
    logs = []
    for path in sorted(logs_folder.glob("*-*.log")):
        task, _, number = path.stem.rpartition("-")  # such as train-0
        logs.append(_log(path, f"{TASKS[task]} {number}"))
    end = attempt.ended_at if attempt.ended else float("inf")
    for path in sorted((run_dir / "logs").rglob("engine-*.log")):
        # An engine's log is begun again by each attempt.
        if attempt.began_at - 1 <= path.stat().st_mtime <= end + LATE_S:
            node = path.parent.relative_to(run_dir / "logs")
            name = path.stem if node == Path() else f"{path.stem} on {node}"
            logs.append(_log(path, name, engine=True))
    lines: list[str] = []
    job_log = run_dir / "slurm/job.log"
    if job_log.is_file():
        lines = section(job_log.read_text(encoding="utf-8", errors="replace"), attempt.number)
    return read_failures(logs_folder), logs, lines


def _log(path: Path, source: str, *, engine: bool = False) -> Log:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        text = file.read().decode("utf-8", "replace")
    return Log(source, text, path.stat().st_mtime, engine)


def section(text: str, number: int) -> list[str]:
    """Return the lines of job.log that belong to one attempt; all attempts append to it."""
    lines, inside = [], False
    for line in text.splitlines():
        if began := re.match(r"qurl: attempt (\d+), ", line):
            inside = int(began[1]) == number
        if inside:
            lines.append(line)
    return lines


def render(run_dir: Path, attempt: Attempt, events: Sequence[Event]) -> str:
    number = attempt.number
    if attempt.ended:
        lines = [
            f"{run_dir}, attempt {number}, job {attempt.job}: ended with {attempt.code} "
            f"({attempt.decision}); steps {attempt.step_before} to {attempt.step_after} are saved"
        ]
    else:
        lines = [f"{run_dir}, attempt {number}: it runs, or its supervisor was killed"]
    if attempt.reason:
        lines.append(f"The supervisor says: {attempt.reason}")
    if not events or attempt.decision == Decision.DONE:
        lines.append("no rank and no engine has failed")
    else:
        lines += _cause(attempt, *events)
    logs_folder = folder.attempt_folder(run_dir, number)
    lines += [
        "",
        f"Logs, and stacks of a run that hung: {logs_folder}; of engines {run_dir}/logs; of "
        f"supervisor and srun, of all attempts, {run_dir}/slurm/job.log",
    ]
    return "\n".join(lines)


def _cause(attempt: Attempt, first: Event, *followed: Event) -> Iterator[str]:
    yield ""
    yield f"{_title(attempt)}: {first.kind.name}: {_place(first)}"
    yield f"  {first.message}"
    yield f"What to do: {first.kind.advice}"
    if attempt.ended:
        if attempt.decision in GOES_ON:
            yield "  the run goes on by itself"
        else:
            yield "  `qurl slurm submit`, as before, goes on from the newest checkpoint"
    if first.traceback.strip():
        yield from ("", first.traceback.rstrip())
    if followed:
        yield from ("", f"{len(followed)} followed from it, or came later")
        for event in followed:
            line = event.message.splitlines()[0]
            yield f"  {_place(event)}: {event.kind.name}: {line:.120}"


def _title(attempt: Attempt) -> str:
    if not attempt.ended:
        return "Failed so far"
    if attempt.decision == Decision.AGAIN:  # Slurm may have ended engines before the ranks
        return "Failed while it ended"
    return "First cause"


def _place(event: Event) -> str:
    """Return who failed, on which node, in which phase, step and version."""
    place = event.source
    if event.node:
        place += f" on {event.node}"
    if event.place:
        place += f", {event.place}"
    return place
