"""The command line of ``qurl eval`` and its defaults; imports nothing heavy."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qurl_megatron.config.sections import RewardConfig, RolloutConfig
from qurl_megatron.engines.kinds import ENGINE_KINDS


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Defaults of the options: these values, or a run's recipe."""

    run: Path | None = None  # whose recipe it is
    model: Path | None = None
    start: Path | None = None  # the model that the run began with
    prompt_key: str = ""
    answer_key: str = ""
    scheme: str = "none"
    dtype: str = "bfloat16"
    chat: bool = False
    top_p: float = 0.95
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(temperature=0.6, max_new_tokens=4096)
    )
    reward: RewardConfig = field(
        default_factory=lambda: RewardConfig(workers=len(os.sched_getaffinity(0)))
    )


def add_options(parser: argparse.ArgumentParser, schemes: Sequence[str]) -> None:
    """Add the options; those left out are None, for a run's recipe to fill in."""
    plain = Defaults()
    parser.add_argument(
        "benchmarks",
        type=Path,
        nargs="+",
        metavar="BENCH",
        help="JSONL or parquet file of prompts and answers; some ship in launch/benchmarks",
    )
    which = parser.add_argument_group("the model and its engines")
    which.add_argument(
        "--model",
        type=Path,
        help="Hugging Face folder or Megatron checkpoint; with --run, in place of its checkpoint; "
        "with --url, only its tokenizer is read",
    )
    which.add_argument(
        "--run",
        dest="run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="the newest checkpoint of a run, with its recipe's settings as defaults (top-p 1)",
    )
    which.add_argument("--step", type=int, metavar="N", help="of --run, the checkpoint of step N")
    which.add_argument(
        "--before",
        action="store_true",
        help="of --run, also the model that it began with, and how much has changed since",
    )
    which.add_argument(
        "--url",
        dest="urls",
        action="append",
        default=[],
        help="an engine that already runs, over SGLang's protocol; may be given several times; its "
        "API key is taken from QURL_API_KEY",
    )
    which.add_argument("--backend", choices=tuple(ENGINE_KINDS), help="default embedded")
    which.add_argument(
        "--scheme",
        choices=schemes,
        help="format an embedded engine rounds the weights to (default none); a folder that is "
        "quantized is taken as it is, and so is any by SGLang",
    )
    which.add_argument("--dtype", choices=("bfloat16", "float32"), help="default bfloat16")
    which.add_argument("--engines", type=int, metavar="N", help="engines to start (default 1)")
    which.add_argument("--tensor", type=int, metavar="N", help="GPUs of one SGLang engine")
    which.add_argument(
        "--engine-arg",
        dest="engine_args",
        action="append",
        metavar="ARG",
        help="further option of SGLang's server, e.g. --engine-arg=--mem-fraction-static=0.8",
    )

    how = parser.add_argument_group("the questions and answers")
    how.add_argument(
        "--k", type=int, default=32, help="sampled responses per problem; 1: only greedy, Avg@1"
    )
    how.add_argument("--temperature", type=float, help=f"default {plain.rollout.temperature:g}")
    how.add_argument("--top-p", type=float, help=f"default {plain.top_p:g}")
    how.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"default {plain.rollout.max_new_tokens}, or what the model's context leaves",
    )
    how.add_argument("--seed", type=int, default=0, help="of sampling and bootstrap")
    how.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="make each problem a user turn of the model's chat template (default no)",
    )
    how.add_argument("--suffix", default="", metavar="TEXT", help="line added to every problem")
    for column in ("prompt", "answer"):
        how.add_argument(
            f"--{column}-key", metavar="KEY", help=f"where a row has its {column}, a dotted path"
        )
    how.add_argument(
        "--reward",
        metavar="KIND",
        help="how they are scored: math (default), last_number, exact, or a function of your own, "
        "file.py:name or package.module:name",
    )
    how.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="results and responses; the same command goes on in it where it was stopped "
        "(default runs/eval/MODEL, or RUN_DIR/eval/STEP); with --before, the folder of both",
    )
