"""The one seam to Slurm's programs: arguments in, parsed answers out.

Nothing else calls them but ``supervise``, whose ``srun`` is the run itself. A program that is
missing or refuses is one sentence for the user, with its own words in it.
"""

import json
import os
import subprocess
from dataclasses import dataclass, replace

from qurl_megatron.kit.errors import ConfigError

PATIENCE_S = 120.0
"""Seconds that a program may take: controllers of large clusters are slow when they are busy."""
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States that squeue --json still shows for some minutes."""


@dataclass(frozen=True)
class Queued:
    """A job as the queue shows it."""

    job: int
    state: str  # such as PENDING, RUNNING, COMPLETING
    reason: str
    nodes: str
    starts: float = 0.0  # or is expected to, Unix seconds; 0: not known
    ends: float = 0.0  # at the latest


def test_only(script: str) -> str:
    """Ask Slurm when a job would start, and where.

    Raises:
        ConfigError: it would refuse the job.
    """
    done = _run(["sbatch", "--test-only"], text=script)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return _plain(lines[-1]) if lines else "accepted"


def submit(script: str) -> int:
    """Submit from the working folder.

    Returns:
        The job's id; of the first component of a heterogeneous job, which stands for all.
    """
    output = _run(["sbatch", "--parsable"], text=script).stdout.strip()
    number = output.partition(";")[0]  # the cluster's name may follow
    if not number.isdecimal():
        raise ConfigError(f"sbatch --parsable said {output!r:.200} in place of a job id")
    return int(number)


def queued(jobs: list[int]) -> dict[int, Queued]:
    """Return the jobs of these that are in the queue, pending or running, by id."""
    if not jobs:
        return {}
    # Asked for one by one, an id that the controller has forgotten would be an error.
    output = _run(["squeue", "--me", "--json"]).stdout
    by_job: dict[int, Queued] = {}
    try:
        for entry in sorted(json.loads(output)["jobs"], key=lambda entry: int(entry["job_id"])):
            component, whole_job = _queued(entry), int(_number(entry.get("het_job_id")))
            if component.job in jobs and component.state not in ENDED:
                by_job[component.job] = component
            elif whole_job in by_job:  # a component behind the first, whose id is the job's
                first = by_job[whole_job]
                nodes = filter(None, (first.nodes, component.nodes))
                by_job[whole_job] = replace(first, nodes=",".join(nodes))
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"squeue --json said what cannot be read: {error!r:.200}") from None
    return by_job


def _queued(entry: dict) -> Queued:
    state = entry["job_state"]  # a word up to Slurm 23.02, a list since
    reason = str(entry.get("state_reason") or "")
    return Queued(
        int(entry["job_id"]),
        str(state if isinstance(state, str) else state[0]),
        "" if reason == "None" else reason,
        str(entry.get("nodes") or ""),
        _number(entry.get("start_time")),
        _number(entry.get("end_time")),
    )


def _number(value: object) -> float:
    """Read a number of squeue's: a number up to Slurm 23.02, an object that holds one since."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else 0
    return float(value) if isinstance(value, int | float) else 0.0


def signal_supervisor(job: int, name: str) -> None:
    """Send a signal to the process that the job's script has become, and to nothing else."""
    _run(["scancel", "--batch", f"--signal={name}", str(job)])


def cancel(jobs: list[int]) -> None:
    """Take jobs out of the queue, or end them at once where they run."""
    if jobs:
        _run(["scancel", *map(str, jobs)])


def requeue(job: int) -> None:
    """Put a running job, which may be the caller's own, back into the queue."""
    _run(["scontrol", "requeue", str(job)])


def exclude(job: int, nodes: list[str]) -> None:
    """Have a waiting job, or one component of it, start on other nodes than these."""
    _run(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}"])


def node_address(node: str) -> str:
    """Return where the controller reaches a node: an address, or a name that resolves there."""
    return _facts("node", node)[0].get("NodeAddr", node)


def hostnames(nodes: str) -> list[str]:
    """Return the names in a list such as node[1-3,7]."""
    return _run(["scontrol", "show", "hostnames", nodes]).stdout.split()


def job_facts(job: int) -> dict[str, str]:
    """Return the controller's facts of a job, such as Requeue and TimeLimit, as it writes them."""
    return _facts("job", str(job))[0]


def partition_facts(name: str) -> dict[str, str]:
    """Return the controller's facts of a partition, such as MaxTime and GraceTime.

    Args:
        name: "" is the site's default.
    """
    for partition in _facts("partition", name):
        if name or partition.get("Default") == "YES":
            return partition
    return {}


def _facts(kind: str, name: str) -> list[dict[str, str]]:
    """Return the facts of each line that ``scontrol show`` prints; at least of one."""
    argv = ["scontrol", "--oneliner", "show", kind]
    lines = _run([*argv, name] if name else argv).stdout.splitlines()
    facts = []
    for line in lines or [""]:
        pairs = [word.partition("=") for word in line.split()]
        facts.append({key: value for key, equals, value in pairs if equals})
    return facts


def _run(argv: list[str], *, text: str = "") -> subprocess.CompletedProcess:
    """Run a program; ConfigError where it is missing, takes too long, or refuses."""
    program = argv[0]
    # Variables such as SBATCH_EXPORT go before the script's own lines.
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
    for word in ("sbatch: ", "squeue: ", "scancel: ", "scontrol: ", "error: ", "fatal: "):
        line = line.removeprefix(word)
    return line.strip()
