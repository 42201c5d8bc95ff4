"""``qurl slurm ACTION``: the actions and their options; heavy imports wait."""

import argparse
from pathlib import Path
from pkgutil import resolve_name

ACTIONS = {
    "render": (
        "submit:show_script",
        "Print the job script of a recipe or a command, and check nothing else.",
    ),
    "submit": (
        "submit:submit",
        "Check all that can be known before the queue, ask sbatch --test-only, and submit.",
    ),
    "cancel": ("submit:cancel", "Have the job of a run save and end."),
    "status": (
        "status:status",
        "Show how a run is: queue, steps, time left, newest checkpoint, what to do next.",
    ),
    "logs": (
        "logs:logs",
        "Show why a run's newest attempt ended: the first cause, and its consequences.",
    ),
    "attempt": (
        "attempt:attempt",
        "In a job: start the ranks, pass on signals, requeue (called by the job script).",
    ),
    "examine": (
        "examination:measure_node",
        "In a job: measure this node before models load (called by attempt).",
    ),
    "task": ("tasks:task", "In a job: run one training rank (called by attempt)."),
    "offer": ("tasks:offer", "In a job: run the engines of one rollout node (called by attempt)."),
}
"""The function of each action, as MODULE:NAME, and its help."""
JOBS = {"render": ["train", "command"], "submit": ["train", "study", "command"]}
"""The actions that take a job, not the folder of a run, and the kinds of jobs."""


def slurm(arguments: argparse.Namespace) -> int:
    """Turn a recipe into a batch job, and look after it."""
    function, _ = ACTIONS[arguments.action]
    act = resolve_name(f"qurl_megatron.cluster.{function}")
    if arguments.action in JOBS:
        return act(arguments)
    if arguments.action == "logs":
        return act(arguments.run_dir, arguments.attempt)
    return act(arguments.run_dir)


def add_actions(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (_, text) in ACTIONS.items():
        parser = actions.add_parser(name, help=text, description=text)
        if name in JOBS:
            _add_job(parser, JOBS[name])
        else:
            parser.add_argument("run_dir", type=Path, help="train.run_dir of the run")
        if name == "submit":
            text = "stop before anything is written or submitted"
            parser.add_argument("--dry-run", action="store_true", help=text)
        if name == "logs":
            text = "default: the newest; the first is 1"
            parser.add_argument("--attempt", type=int, metavar="N", help=text)


def _add_job(parser: argparse.ArgumentParser, kinds: list[str]) -> None:
    text = (
        "a recipe and section.key=value; with --kind study, a study file and the folder of its "
        "runs; with --kind command, one such as convert, eval or bench, behind -- where it has "
        "options"
    )
    parser.add_argument("words", nargs="+", metavar="WORD", help=text)
    text = "TOML file describing the cluster, or the name of one that ships, such as h100"
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE", help=text)
    text = "default: a training run"
    parser.add_argument("--kind", choices=kinds, default="train", help=text)
    text = "that a --kind command takes; default: all of a node"
    parser.add_argument("--gpus", type=int, metavar="N", help=text)
