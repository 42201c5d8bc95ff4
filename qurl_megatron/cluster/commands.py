"""The one seam to Slurm's programs: arguments in, what they say parsed out.

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
    """What Slurm says of a script that it would take: when the job would start, and where.

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
    """Those of the jobs that are in the queue, pending or running, by id."""
    if not jobs:
        return {}
    # Asked for one by one, an id that the controller has forgotten would be an error.
    output = _run(["squeue", "--me", "--json"]).stdout
    try:
        entries = sorted(json.loads(output)["jobs"], key=lambda entry: int(entry["job_id"]))
        numbered = [(int(_number(entry.get("het_job_id"))), _queued(entry)) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"squeue --json said what cannot be read: {error!r:.200}") from None
    by_job: dict[int, Queued] = {}
    for whole_job, component in numbered:
        if component.job in jobs and component.state not in _ENDED:
            by_job[component.job] = component
        elif whole_job in by_job:  # a component behind the first, whose id is the job's
            nodes = filter(None, (by_job[whole_job].nodes, component.nodes))
            by_job[whole_job] = replace(by_job[whole_job], nodes=",".join(nodes))
    return by_job


_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States that squeue --json still shows for some minutes."""


def _queued(entry: dict) -> Queued:
    state = entry["job_state"]  # a word up to Slurm 23.02, a list since
    words = [state] if isinstance(state, str) else list(state)
    reason = str(entry.get("state_reason") or "")
    return Queued(
        int(entry["job_id"]),
        str(words[0]),
        "" if reason == "None" else reason,
        str(entry.get("nodes") or ""),
        _number(entry.get("start_time")),
        _number(entry.get("end_time")),
    )


def _number(value: object) -> float:
    """Of squeue's, such as a time: a number up to Slurm 23.02, a number in an object since."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else 0
    return float(value) if isinstance(value, int | float) else 0.0


def signal_supervisor(job: int, name: str) -> None:
    """Send a signal to the process that the job's script has become, and to nothing else."""
    _run(signalling(job, name))


def signalling(job: int, name: str) -> list[str]:
    return ["scancel", "--batch", f"--signal={name}", str(job)]


def cancel(jobs: list[int]) -> None:
    """Take jobs out of the queue, or end them at once where they run."""
    if jobs:
        _run(cancelling(jobs))


def cancelling(jobs: list[int]) -> list[str]:
    return ["scancel", *map(str, jobs)]


def requeue(job: int) -> None:
    """Put a running job, which may be the caller's own, back into the queue."""
    _run(["scontrol", "requeue", str(job)])


def exclude(job: int, nodes: list[str]) -> None:
    """Have a waiting job, or one component of it, start on other nodes than these."""
    _run(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}"])


def node_address(node: str) -> str:
    """Where the controller reaches a node: an address, or a name that resolves there."""
    output = _run(["scontrol", "--oneliner", "show", "node", node]).stdout
    return _facts(output).get("NodeAddr", node)


def hostnames(nodes: str) -> list[str]:
    """The names in a list such as node[1-3,7]."""
    return _run(["scontrol", "show", "hostnames", nodes]).stdout.split()


def job_facts(job: int) -> dict[str, str]:
    """What the controller knows of a job, such as Requeue and TimeLimit, as it writes it."""
    return _facts(_run(["scontrol", "--oneliner", "show", "job", str(job)]).stdout)


def partition_facts(name: str) -> dict[str, str]:
    """The same of a partition, such as MaxTime and GraceTime; "" is the site's default."""
    lines = _run(["scontrol", "--oneliner", "show", "partition", name][: 4 + bool(name)]).stdout
    partitions = [_facts(line) for line in lines.splitlines()]
    return next(
        (partition for partition in partitions if name or partition.get("Default") == "YES"), {}
    )


def site_facts() -> dict[str, str]:
    """How the site has set Slurm up, such as SlurmdTimeout, as the controller writes it."""
    pairs = (
        line.partition("=") for line in _run(["scontrol", "show", "config"]).stdout.splitlines()
    )
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def _facts(said: str) -> dict[str, str]:
    """Of the first line of what scontrol says."""
    pairs = (word.partition("=") for word in said.partition("\n")[0].split())
    return {key: value for key, equals, value in pairs if equals}


def _run(argv: list[str], *, text: str | None = None) -> subprocess.CompletedProcess:
    """
    Raises:
        ConfigError: the program is missing, takes too long, or refuses.
    """
    program = argv[0]
    # Variables such as SBATCH_EXPORT go before the script's own lines.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}
    try:
        done = subprocess.run(
            argv, input=text or "", capture_output=True, text=True, env=env, timeout=PATIENCE_S
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
        raise ConfigError(
            f"{' '.join(argv[:2])} refused ({done.returncode}): "
            f"{'; '.join(lines[-3:]) or 'no word'}"
        )
    return done


def _plain(line: str) -> str:
    """Without the program's own name and level before it."""
    for word in ("sbatch: ", "squeue: ", "scancel: ", "scontrol: ", "error: ", "fatal: "):
        line = line.removeprefix(word)
    return line.strip()
