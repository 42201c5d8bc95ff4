"""``qurl slurm ACTION``: names, options and calls of the actions; heavy imports wait."""

import argparse
from pathlib import Path

from qurl_megatron.cluster.script import KINDS


def _render(arguments: argparse.Namespace) -> int:
    """Print the job script of a recipe or a command, and check nothing else."""
    from qurl_megatron.cluster.submit import script_of

    print(script_of(arguments.kind, arguments.words, arguments.cluster), end="")
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    """Check all that can be known before the queue, ask sbatch --test-only, and submit."""
    from qurl_megatron.cluster.submit import submit

    return submit(arguments.kind, arguments.words, arguments.cluster, dry_run=arguments.dry_run)


def _cancel(arguments: argparse.Namespace) -> int:
    """Have the jobs of a run save and end."""
    from qurl_megatron.cluster.submit import cancel

    return cancel(arguments.run_dir)


def _status(arguments: argparse.Namespace) -> int:
    """Show how a run is: queue, steps, time left, newest checkpoint, and what to do next."""
    from qurl_megatron.cluster.status import status

    return status(arguments.run_dir, as_json=arguments.json)


def _logs(arguments: argparse.Namespace) -> int:
    """Show why a run's newest attempt ended: the first cause, and its consequences."""
    from qurl_megatron.cluster.logs import logs

    return logs(arguments.run_dir, arguments.attempt)


def _hours(arguments: argparse.Namespace) -> int:
    """Show where a run's GPU-hours went: trained, set up, saved, stalled, lost."""
    from qurl_megatron.cluster.status import hours

    return hours(arguments.run_dir, as_json=arguments.json)


def _attempt(arguments: argparse.Namespace) -> int:
    """Run inside a job: start the ranks, pass on signals, requeue (called by the job script)."""
    from qurl_megatron.cluster.attempt import attempt

    return attempt(arguments.run_dir)


def _task(arguments: argparse.Namespace) -> int:
    """Run as one training rank inside a job (called by attempt, through srun)."""
    from qurl_megatron.cluster.task import task

    return task(arguments.run_dir, arguments.engines)


def _examine(_: argparse.Namespace) -> int:
    """Measure this node inside a job, before models load (called by attempt, through srun)."""
    from qurl_megatron.cluster.measure import examine

    return examine()


def _offer(arguments: argparse.Namespace) -> int:
    """Run the engines of one rollout node inside a job (called by attempt, through srun)."""
    from qurl_megatron.cluster.offer import offer

    return offer(arguments.run_dir, arguments.towards)


def _cell(arguments: argparse.Namespace) -> int:
    """Run one cell of a study inside a job array (called by the job script)."""
    from qurl_megatron.cluster.submit import cell

    return cell(arguments.study, arguments.out)


ACTIONS = {
    "render": _render,
    "submit": _submit,
    "cancel": _cancel,
    "status": _status,
    "logs": _logs,
    "hours": _hours,
    "attempt": _attempt,
    "examine": _examine,
    "task": _task,
    "offer": _offer,
    "cell": _cell,
}


def add_actions(command: argparse.ArgumentParser) -> None:
    """Add the actions and their options to the command."""
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    added = {}
    for name, run in ACTIONS.items():
        added[name] = actions.add_parser(name, help=run.__doc__, description=run.__doc__)
    for name in ("render", "submit"):
        added[name].add_argument(
            "words",
            nargs="+",
            metavar="WORD",
            help="a recipe and section.key=value; with --kind, a command, behind -- where it has "
            "options: a tool of checkpoints_tools, a benchmark, a benchmark file, or a study file "
            "and the folder of its runs",
        )
        help = "TOML file describing the cluster; some ship in slurm/clusters"
        added[name].add_argument("--cluster", type=Path, required=True, metavar="FILE", help=help)
        help = "default: a training run"
        added[name].add_argument("--kind", choices=KINDS, default="train", help=help)
    for name in ("cancel", "status", "logs", "hours", "attempt", "task", "offer"):
        added[name].add_argument("run_dir", type=Path, help="train.run_dir of the run")
    help = "stop before anything is written or submitted"
    added["submit"].add_argument("--dry-run", action="store_true", help=help)
    for name in ("status", "hours"):
        added[name].add_argument("--json", action="store_true", help="for a program to read")
    help = "default: the newest; the first is 1"
    added["logs"].add_argument("--attempt", type=int, metavar="N", help=help)
    added["offer"].add_argument("--towards", required=True, help="the trainer's first node")
    added["task"].add_argument("--engines", type=int, help="fewer than the recipe has")
    added["cell"].add_argument("study", type=Path, help="TOML study file")
    added["cell"].add_argument("out", type=Path, help="folder of its runs")
