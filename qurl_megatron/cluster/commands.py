"""Slurm's programs: arguments in, parsed answers out. Only ``supervise`` starts ``srun`` itself.

A program that is missing or refuses is a ``ConfigError`` that quotes it.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime

from qurl_megatron.kit.errors import ConfigError

PATIENCE_S = 120.0
"""Time limit of a program in seconds: busy controllers of large clusters are slow."""


@dataclass(frozen=True)
class Queued:
    """A job as the queue shows it."""

    state: str  # such as PENDING, RUNNING, COMPLETING
    reason: str
    nodes: str
    starts: float | None = None  # actual or expected, Unix seconds; None: not known
    ends: float | None = None  # at the latest


def test_only(script: str) -> str:
    """Ask Slurm when and where a job would start."""
    done = _run(["sbatch", "--test-only"], text=script)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return _plain(lines[-1]) if lines else "accepted"


def submit(script: str, *, after: int | None = None) -> int:
    """Submit from the working folder, if need be to start ``after`` a job; return the job's id."""
    argv = ["sbatch", "--parsable"]
    if after is not None:
        argv.append(f"--dependency=afterany:{after}")
    output = _run(argv, text=script).stdout.strip()
    number = output.partition(";")[0]  # the cluster's name may follow
    if not number.isdecimal():
        raise ConfigError(f"sbatch --parsable said {output!r:.200} in place of a job id")
    return int(number)


def queued(job: int) -> Queued | None:
    """Return a pending or running job; None if it is not in the queue."""
    # squeue --jobs would fail for a job that the controller has forgotten.
    output = _run(["squeue", "--me", "--noheader", "--format=%i|%T|%r|%S|%e|%N"]).stdout
    for line in output.splitlines():
        number, *fields = line.strip().split("|")
        if number == str(job) and len(fields) == 5:
            state, reason, starts, ends, nodes = fields
            reason = "" if reason == "None" else reason
            return Queued(state, reason, nodes, unix_seconds(starts), unix_seconds(ends))
    return None


def unix_seconds(time: str) -> float | None:
    """Convert a local time as Slurm writes it; return None for others, such as Unknown."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


def terminate_supervisor(job: int) -> None:
    """Send SIGTERM to the supervisor alone, which is the process of the job's script."""
    _run(["scancel", "--batch", "--signal=TERM", str(job)])


def cancel(job: int) -> None:
    """Take a job out of the queue, or end it at once if it runs."""
    _run(["scancel", str(job)])


def requeue(job: int) -> None:
    """Put a running job, which may be the caller's own, back into the queue."""
    _run(["scontrol", "requeue", str(job)])


def exclude(job: int, nodes: list[str]) -> None:
    """Keep a waiting job off these nodes."""
    _run(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}"])


def hostnames(nodes: str) -> list[str]:
    """Return the names in a list such as node[1-3,7]."""
    return _run(["scontrol", "show", "hostnames", nodes]).stdout.split()


def job_facts(job: int) -> dict[str, str]:
    """Return the controller's facts of a job, such as Requeue and TimeLimit, as it writes them."""
    return _facts("job", str(job))[0]


def partition_facts(name: str) -> dict[str, str]:
    """Return the controller's facts of a partition, such as MaxTime; "" is the default one."""
    for partition in _facts("partition", name):
        if name or partition.get("Default") == "YES":
            return partition
    return {}


def _facts(kind: str, name: str) -> list[dict[str, str]]:
    """Return the facts of each line that ``scontrol show`` prints; [{}] if it prints none."""
    argv = ["scontrol", "--oneliner", "show", kind]
    lines = _run([*argv, name] if name else argv).stdout.splitlines()
    facts = []
    for line in lines or [""]:
        pairs = [word.partition("=") for word in line.split()]
        facts.append({key: value for key, equals, value in pairs if equals})
    return facts


def _run(argv: list[str], *, text: str = "") -> subprocess.CompletedProcess:
    """Run a program; raise ``ConfigError`` if it is missing, takes too long, or refuses."""
    program = argv[0]
    # Variables such as SBATCH_EXPORT would win over the script's own lines.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, env=env, timeout=PATIENCE_S
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{program} was not found: this machine has no Slurm, or its commands are not on PATH; "
            "call this on a login node of the cluster"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} cannot be run: {error}") from None
    if done.returncode:
        lines = [_plain(line) for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        message = "; ".join(lines[-3:]) or "no word"
        raise ConfigError(f"{' '.join(argv[:2])} refused ({done.returncode}): {message}")
    return done


def _plain(line: str) -> str:
    """Remove the program's own name and level before its message."""
    return re.sub("^((sbatch|squeue|scancel|scontrol|error|fatal): )+", "", line).strip()
