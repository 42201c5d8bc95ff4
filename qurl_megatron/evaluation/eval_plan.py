"""Turn the options of ``qurl eval``, settings and a run's recipe into a plan for each model.

Every ``qurl`` command reads the options, so modules with torch are imported where they are used.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.config import sections
from qurl_megatron.config.load import overridden, read_tables
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import SERVED
from qurl_megatron.tensors.arch import read_config

ADOPTED_S = 30.0  # for engines that should already be there to answer
ONLY_TRAINED = {
    "urls": [],
    "rendezvous": "",
    "each_node": False,
    "colocate": False,
    "max_staleness": 0,
    "timeout_s": 24 * 3600.0,  # an embedded engine gets many responses in one request
}
"""Settings of ``rollout`` in place of a recipe's, which are for training."""
FOR_OWN_ENGINES = ("rollout.backend", "rollout.engines", "rollout.engine_tensor", "quant.scheme")
"""Settings that rollout.urls excludes."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The sections of a recipe that an evaluation reads."""

    model: sections.ModelConfig
    data: sections.DataConfig
    quant: sections.QuantConfig
    rollout: sections.RolloutConfig
    reward: sections.RewardConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    model: Path
    config: EvaluationConfig
    scheme: str  # of engines started here; empty where others answer
    suffix: str
    top_p: float
    seed: int
    fitted: bool  # responses end where the model's context does, if that is earlier
    out: Path

    @property
    def responses(self) -> dict[str, int]:
        """Responses to each problem, by mode."""
        responses = {"greedy": 1}
        if self.config.rollout.samples_per_prompt > 1:
            responses["sampled"] = self.config.rollout.samples_per_prompt
        return responses

    @property
    def settings(self) -> dict[str, Any]:
        """Everything the answers depend on, except the engines and the problems."""
        rollout, reward = self.config.rollout, self.config.reward
        settings = {
            "k": rollout.samples_per_prompt,
            "temperature": rollout.temperature,
            "top_p": self.top_p,
            "max_new_tokens": rollout.max_new_tokens,
            "seed": self.seed,
            "chat": self.config.data.chat,
            "suffix": self.suffix,
            "reward": reward.described,
        }
        if reward.failed:
            settings["failed"] = reward.failed
        if rollout.environment:
            settings["environment"] = rollout.environment
            settings["max_turns"] = rollout.max_turns
        from qurl_megatron.rewards.own_code import checksums

        for name, checksum in checksums([reward.function, rollout.environment]).items():
            settings[f"code of {name}"] = checksum
        if not rollout.urls:  # running engines report their own weights
            settings["backend"] = rollout.backend
            settings |= {"scheme": self.scheme, "dtype": self.config.model.dtype}
            settings["model_files"] = _files(find_torch_dist(self.model) or self.model)
        return settings

    @property
    def context(self) -> float:
        """Tokens that the model takes, as far as its config says."""
        folder = description_of(self.model)
        if not (folder / "config.json").is_file():  # a tokenizer alone, for engines that run
            return math.inf
        return read_config(folder).get("max_position_embeddings") or math.inf


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="BENCH | section.key=value",
        help="JSONL or parquet files of prompts and answers, some of which ship in "
        "launch/benchmarks; and settings of a recipe's sections model, data, quant, rollout and "
        "reward, e.g. rollout.backend=sglang rollout.temperature=0.6 reward.kind=exact",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder or Megatron checkpoint; with --run, in place of its checkpoint; "
        "with rollout.urls, only its tokenizer is read",
    )
    parser.add_argument(
        "--run",
        dest="run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="the newest checkpoint of a run, with its recipe's settings as defaults (top-p 1)",
    )
    parser.add_argument("--step", type=int, metavar="N", help="of --run, the checkpoint of step N")
    parser.add_argument(
        "--before",
        action="store_true",
        help="of --run, also the model that it began with, and how much has changed since",
    )
    parser.add_argument(
        "--k", type=int, default=32, help="sampled responses per problem; 1: only greedy, Avg@1"
    )
    parser.add_argument("--top-p", type=float, help="default 0.95; of --run, 1")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and bootstrap")
    parser.add_argument("--suffix", default="", metavar="TEXT", help="line added to every problem")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="results and responses; the same command goes on in it where it was stopped "
        "(default runs/eval/MODEL, or RUN_DIR/eval/STEP); with --before, the folder of both",
    )


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure accuracy on benchmark files: Avg@1 (greedy) and Avg@k, with confidence intervals."""
    from qurl_megatron.evaluation.evaluate import evaluate as run

    words = arguments.overrides
    benchmarks = [Path(word) for word in words if "=" not in word]
    if not benchmarks:
        raise ConfigError("qurl eval needs a benchmark: a JSONL or parquet file of problems")
    return run(benchmarks, make_plans(arguments, [word for word in words if "=" in word]))


def make_plans(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[EvaluationPlan]:
    """Return one plan; with --before, first a plan for the model that the run began with."""
    _refuse(arguments)
    model, run_dir, top_p = arguments.model, arguments.run_dir, arguments.top_p
    folder = Path("runs/eval")
    if run_dir:
        checkpoint, tables = _of_run(run_dir, arguments.step)
        if not model:
            model, folder = checkpoint, run_dir / "eval"
        top_p = top_p or 1.0  # the recipe's policy, all of it
    else:
        tables = {
            "model": {"path": str(model)},
            "data": {},
            "quant": {"scheme": "none"},
            "rollout": {"temperature": 0.6, "max_new_tokens": 4096},
            "reward": {"workers": len(os.sched_getaffinity(0))},
        }
        top_p = top_p or 0.95
    keys = {override.partition("=")[0].strip() for override in overrides}
    config = _config(tables, arguments.k, keys, overrides)

    def plan(model: Path, out: Path) -> EvaluationPlan:
        return EvaluationPlan(
            model=model,
            config=config,
            scheme=_scheme(config, model, "quant.scheme" in keys, run_dir),
            suffix=arguments.suffix,
            top_p=top_p,
            seed=arguments.seed,
            fitted="rollout.max_new_tokens" not in keys,
            out=out,
        )

    if not arguments.before:
        return [plan(model, arguments.out or folder / model.resolve().name)]
    if config.rollout.urls:
        raise ConfigError("--before starts engines for two models; leave rollout.urls out")
    start, folder = Path(config.model.path), arguments.out or folder
    if not start.is_dir():
        raise ConfigError(
            f"--before: the run began with model.path={start}, which is not a folder (any more); "
            "put that model back, or evaluate another with --model"
        )
    return [plan(start, folder / "start"), plan(model, folder / model.name)]


def _refuse(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` if options are impossible, or do not go together."""
    model, run_dir, step = arguments.model, arguments.run_dir, arguments.step
    if not run_dir and (arguments.before or step is not None):
        option = "--before" if arguments.before else "--step"
        raise ConfigError(f"{option} is for the checkpoints of a run; name it with --run RUN_DIR")
    if not run_dir and not model:
        raise ConfigError("qurl eval needs --model, or --run")
    if model and step is not None:
        raise ConfigError("--step names a checkpoint of --run, and --model another model; give one")
    if model and arguments.before:
        raise ConfigError("--before evaluates two models of --run; leave --model out")
    if model and not model.is_dir():
        raise ConfigError(f"--model {model} is not a folder; name a checkpoint")
    if arguments.top_p is not None and not 0 < arguments.top_p <= 1:
        raise ConfigError(f"--top-p must lie in (0, 1], got {arguments.top_p:g}")
    if arguments.seed < 0:
        raise ConfigError(f"--seed must be 0 or more, got {arguments.seed}")


def _of_run(run_dir: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    """Return a run's checkpoint of a step, or its newest, and the sections of its recipe."""
    from qurl_megatron.training.state import RECIPE, checkpoints

    by_step = {int(path.name.removeprefix("step_")): path for path in checkpoints(run_dir)}
    if not run_dir.is_dir():
        raise ConfigError(
            f"--run {run_dir} does not exist; name the folder of a run, its train.run_dir"
        )
    if not by_step or not (run_dir / RECIPE).is_file():
        raise ConfigError(
            f"--run {run_dir} holds no checkpoint of a run; name the train.run_dir of one that has "
            "saved a step"
        )
    if step is None:
        step = max(by_step)
    if step not in by_step:
        raise ConfigError(
            f"--step {step}: {run_dir} has no checkpoint of that step; it has those of steps "
            f"{', '.join(map(str, by_step))}"
        )
    tables = read_tables(run_dir / RECIPE, "recipe", "name the folder of a run")
    names = [section.name for section in dataclasses.fields(EvaluationConfig)]
    return by_step[step], {name: tables.get(name, {}) for name in names}


def _config(
    tables: dict[str, Any], k: int, keys: set[str], overrides: Sequence[str]
) -> EvaluationConfig:
    """Return a recipe's settings without those for training alone, under the user's overrides of
    these ``keys``."""
    if "model.path" in keys:
        raise ConfigError("model.path: name the model to evaluate with --model")
    adopted = {}
    if "rollout.urls" in keys:
        adopted["start_timeout_s"] = ADOPTED_S
        for key in FOR_OWN_ENGINES:
            if key in keys:
                raise ConfigError(
                    f"{key} is for engines that are started here; leave it or rollout.urls out"
                )
    tables["data"] |= {"path": "benchmarks", "task": ""}
    tables["rollout"] |= ONLY_TRAINED | adopted | {"samples_per_prompt": k}
    config = overridden(EvaluationConfig, tables, overrides)
    function = sections.named_beside(Path(), config.reward.function)
    environment = sections.named_beside(Path(), config.rollout.environment)
    return replace(
        config,
        reward=replace(config.reward, function=function),
        rollout=replace(config.rollout, environment=environment),
    )


def _scheme(config: EvaluationConfig, model: Path, from_user: bool, run_dir: Path | None) -> str:
    """Return the number format of engines that are started here; empty where others answer.

    Args:
        from_user: quant.scheme is the user's own, not a recipe's.

    Raises:
        ConfigError: the engines cannot make it of this checkpoint; names the tool that can.
    """
    from qurl_megatron.engines.embedded.read_weights import refuse_other_scheme, stored_scheme
    from qurl_megatron.quant.export import read_quantization

    scheme, rollout = config.quant.scheme, config.rollout
    if rollout.urls:
        return ""
    if rollout.kind.quantizes:
        if not from_user and (stored := stored_scheme(model)):
            return stored  # as it is, whatever a run's recipe says
        refuse_other_scheme(model, scheme)
        return scheme
    if scheme not in SERVED:
        raise ConfigError(f"quant.scheme={scheme} is simulated by embedded engines alone")
    command = f"quantize --scheme {scheme} --model"
    if scheme == "none":
        command = "export --ckpt"
    convert = f"convert it with `qurl {command} {model} --out FOLDER`, and give --model FOLDER"
    if find_torch_dist(model):
        raise ConfigError(f"SGLang cannot load the Megatron checkpoint {model}; {convert}")
    hf_config = read_config(description_of(model))
    stored = hf_config.get("quantization_config")
    if not from_user and run_dir is None:  # any format that SGLang knows
        return stored.get("quant_method", "unknown") if stored else "none"
    model_scheme = read_quantization(hf_config) or "none"
    if model_scheme != scheme:
        fix = "give the checkpoint they were made from" if stored else convert
        raise ConfigError(f"{model} holds weights of scheme {model_scheme}, not {scheme}; {fix}")
    return scheme


def _files(folder: Path) -> str:
    """Return a hash of the names, sizes and times of a model's files, not of their contents."""
    stats = []
    for path in folder.rglob("*"):
        if path.is_file():
            stat = path.stat()
            stats.append((str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(sorted(stats)).encode()).hexdigest()[:16]
