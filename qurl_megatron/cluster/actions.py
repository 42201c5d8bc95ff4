"""``qurl slurm ACTION``: the actions and their options; heavy imports wait."""

import argparse
from pathlib import Path
from pkgutil import resolve_name

ACTIONS = {
    "render": "Print the job script of a recipe or a command, and check nothing else.",
    "submit": "Check all that can be known before the queue, ask sbatch --test-only, and submit.",
    "cancel": "Have the job of a run save and end.",
    "status": "Show how a run is: queue, steps, time left, newest checkpoint, what to do next.",
    "logs": "Show why a run's newest attempt ended: the first cause, and its consequences.",
    "attempt": "In a job: start the ranks, pass on signals, requeue (called by the job script).",
    "examine": "In a job: measure this node before models load (called by attempt).",
    "task": "In a job: run one training rank (called by attempt).",
    "offer": "In a job: run the engines of one rollout node (called by attempt).",
}
FUNCTIONS = {
    "render": "submit:show_script",
    "submit": "submit:submit",
    "cancel": "submit:cancel",
    "status": "status:status",
    "logs": "logs:logs",
    "attempt": "attempt:attempt",
    "examine": "examination:measure_node",
    "task": "tasks:task",
    "offer": "tasks:offer",
}
"""The module and the function of each action."""


def slurm(arguments: argparse.Namespace) -> int:
    """Turn a recipe into a batch job, and look after it."""
    act = resolve_name(f"qurl_megatron.cluster.{FUNCTIONS[arguments.action]}")
    if arguments.action in ("render", "submit"):
        return act(arguments)
    if arguments.action == "logs":
        return act(arguments.run_dir, arguments.attempt)
    return act(arguments.run_dir)


def add_actions(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    parsers = {}
    for name, text in ACTIONS.items():
        parsers[name] = actions.add_parser(name, help=text, description=text)
    for name, kinds in (
        ("render", ["train", "command"]),
        ("submit", ["train", "study", "command"]),
    ):
        text = (
            "a recipe and section.key=value; with --kind study, a study file and the folder of its "
            "runs; with --kind command, one such as convert, eval or bench, behind -- where it has "
            "options"
        )
        parsers[name].add_argument("words", nargs="+", metavar="WORD", help=text)
        text = "TOML file describing the cluster, or the name of one that ships, such as h100"
        parsers[name].add_argument("--cluster", type=Path, required=True, metavar="FILE", help=text)
        text = "default: a training run"
        parsers[name].add_argument("--kind", choices=kinds, default="train", help=text)
        text = "that a --kind command takes; default: all of a node"
        parsers[name].add_argument("--gpus", type=int, metavar="N", help=text)
    for name in ("cancel", "status", "logs", "attempt", "examine", "task", "offer"):
        parsers[name].add_argument("run_dir", type=Path, help="train.run_dir of the run")
    text = "stop before anything is written or submitted"
    parsers["submit"].add_argument("--dry-run", action="store_true", help=text)
    text = "default: the newest; the first is 1"
    parsers["logs"].add_argument("--attempt", type=int, metavar="N", help=text)
