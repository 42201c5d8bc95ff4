"""``qurl eval``, decided: its options and a run's recipe become a plan for each model.

Every ``qurl`` command reads the options, so what needs torch is imported where it is used.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.config.sections import RewardConfig, RolloutConfig, named_beside
from qurl_megatron.engines.kinds import ENGINE_KINDS
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import ROLLOUT, SERVED
from qurl_megatron.tensors.arch import read_config

TIMEOUT_S = 24 * 3600.0  # of one request: an embedded engine gets many responses in one
ADOPTED_S = 30.0  # for engines that should already be there to answer
FOR_OWN_ENGINES = ("backend", "engines", "tensor", "scheme")  # options that --url excludes


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """One model's evaluation. Until the options are read: their defaults, or a run's recipe."""

    run: Path | None = None  # whose recipe it is
    model: Path = Path()
    start: Path | None = None  # the model that the run began with
    prompt_key: str = ""
    answer_key: str = ""
    scheme: str = "none"
    dtype: str = "bfloat16"
    chat: bool = False
    suffix: str = ""
    top_p: float = 0.95
    seed: int = 0
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(temperature=0.6, max_new_tokens=4096)
    )
    reward: RewardConfig = field(
        default_factory=lambda: RewardConfig(workers=len(os.sched_getaffinity(0)))
    )
    reward_key: str = "--reward"  # the recipe's section, or the option that names the reward
    out: Path = Path("runs/eval")

    @property
    def responses(self) -> dict[str, int]:
        """Responses to each problem, by mode."""
        k = self.rollout.samples_per_prompt
        return {"greedy": 1, "sampled": k} if k > 1 else {"greedy": 1}

    @property
    def settings(self) -> dict[str, Any]:
        """Everything the answers depend on, except the engines and the problems."""
        settings = {
            "k": self.rollout.samples_per_prompt,
            "temperature": self.rollout.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.rollout.max_new_tokens,
            "seed": self.seed,
            "chat": self.chat,
            "suffix": self.suffix,
            "reward": self.reward.described,
        }
        if self.reward.failed:
            settings["failed"] = self.reward.failed
        if self.rollout.environment:
            settings["environment"] = self.rollout.environment
            settings["max_turns"] = self.rollout.max_turns
        from qurl_megatron.rewards.own_code import checksums, named_code

        own_code = named_code(self.reward, self.rollout)
        for key, checksum in checksums(own_code).items():
            settings[f"code of {own_code[key]}"] = checksum
        if not self.rollout.urls:  # running engines report their own weights
            settings["backend"] = self.rollout.backend
            settings |= {"scheme": self.scheme, "dtype": self.dtype}
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
    """Add the options; those left out are None, for a run's recipe to fill in."""
    plain = EvaluationPlan()
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
        choices=ROLLOUT,
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


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure accuracy on benchmark files: Avg@1 (greedy) and Avg@k, with confidence intervals."""
    from qurl_megatron.evaluation.evaluate import evaluate as run

    if arguments.run_dir:
        return run(arguments, _settings_of(arguments.run_dir, arguments.step))
    if arguments.before or arguments.step is not None:
        option = "--before" if arguments.before else "--step"
        raise ConfigError(f"{option} is for the checkpoints of a run; name it with --run RUN_DIR")
    return run(arguments)


def _settings_of(run_dir: Path, step: int | None) -> EvaluationPlan:
    """An evaluation's settings from a run's recipe, and its checkpoint.

    Args:
        step: the checkpoint's; None: the newest.
    """
    from qurl_megatron.config import load
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
    if step is not None and step not in by_step:
        raise ConfigError(
            f"--step {step}: {run_dir} has no checkpoint of that step; it has those of steps "
            f"{', '.join(map(str, by_step))}"
        )
    chosen = by_step[max(by_step) if step is None else step]
    config = load(run_dir / RECIPE)
    return EvaluationPlan(
        run=run_dir,
        model=chosen,
        start=Path(config.model.path),
        prompt_key=config.data.prompt_key,
        answer_key=config.data.answer_key,
        scheme=config.quant.scheme,
        dtype=config.model.dtype,
        chat=config.data.chat,
        top_p=1.0,  # the recipe's policy, all of it
        rollout=config.rollout,
        reward=config.reward,
        reward_key="reward",
    )


def make_plans(arguments: argparse.Namespace, defaults: EvaluationPlan) -> list[EvaluationPlan]:
    """Return one plan; with --before, first the one of the model that the run began with.

    Raises:
        ConfigError: options are impossible, or do not go together.
    """
    model = arguments.model or defaults.model
    if model == Path() and not arguments.model:
        raise ConfigError("qurl eval needs --model, or --run")
    if arguments.model and arguments.step is not None:
        raise ConfigError("--step names a checkpoint of --run, and --model another model; give one")
    if not model.is_dir():
        raise ConfigError(f"--model {model} is not a folder; name a checkpoint")
    folder = defaults.out
    if defaults.run and not arguments.model:
        folder = defaults.run / "eval"
    if not arguments.before:
        return [_plan(arguments, defaults, model, arguments.out or folder / model.resolve().name)]
    start = defaults.start
    if arguments.model or arguments.urls:
        raise ConfigError("--before evaluates two models of --run; leave --model and --url out")
    if start is None or not start.is_dir():
        raise ConfigError(
            f"--before: the run began with model.path={start}, which is not a folder (any more); "
            "put that model back, or evaluate another with --model"
        )
    folder = arguments.out or folder
    first = _plan(arguments, defaults, start, folder / "start")
    return [first, _plan(arguments, defaults, model, folder / model.name)]


def _plan(
    arguments: argparse.Namespace, defaults: EvaluationPlan, model: Path, out: Path
) -> EvaluationPlan:
    options = {}
    for name in ("prompt_key", "answer_key", "dtype", "chat", "suffix", "top_p", "seed"):
        if (value := getattr(arguments, name)) is not None:
            options[name] = value
    if arguments.reward is not None:
        reward = _reward(arguments.reward, defaults.reward)
        options |= {"reward": reward, "reward_key": "--reward"}
    rollout = _rollout(arguments, defaults.rollout)
    scheme = "" if rollout.urls else _scheme(arguments.scheme, defaults, rollout.backend, model)
    plan = dataclasses.replace(
        defaults, **options, model=model, rollout=rollout, scheme=scheme, out=out
    )
    if not 0 < plan.top_p <= 1:
        raise ConfigError(f"--top-p must lie in (0, 1], got {plan.top_p:g}")
    if plan.seed < 0:
        raise ConfigError(f"--seed must be 0 or more, got {plan.seed}")
    return plan


def _reward(option: str, base: RewardConfig) -> RewardConfig:
    """The recipe's reward with the kind or the function of --reward in place of its own."""
    from qurl_megatron.rewards import KINDS

    none: dict[str, Any] = dict(kind="", function="", url="", key_env="")
    if ":" in option:
        return dataclasses.replace(base, **{**none, "function": named_beside(Path(), option)})
    if option not in KINDS:
        raise ConfigError(
            f"--reward {option} is not one of {', '.join(KINDS)}; give one of them, or a function "
            "of your own as file.py:name or package.module:name"
        )
    return dataclasses.replace(base, **{**none, "kind": option})


def _rollout(arguments: argparse.Namespace, base: RolloutConfig) -> RolloutConfig:
    """The recipe's engines, or one, changed by the options."""
    for option in FOR_OWN_ENGINES:
        if arguments.urls and getattr(arguments, option):
            raise ConfigError(
                f"--{option} is for engines that are started here; leave it or --url out"
            )
    for option in ("k", "max_new_tokens"):
        if (value := getattr(arguments, option)) is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} must be 1 or more, got {value}")
    if arguments.temperature is not None and not arguments.temperature > 0:
        raise ConfigError(
            f"--temperature {arguments.temperature:g} would make all responses to a problem the "
            "same; give a positive one, or --k 1 for greedy decoding alone"
        )
    options = {
        "backend": arguments.backend,
        "engines": arguments.engines,
        "engine_tensor": arguments.tensor,
        "engine_args": arguments.engine_args and tuple(arguments.engine_args),
        "start_timeout_s": ADOPTED_S if arguments.urls else None,
        "temperature": arguments.temperature,
        "max_new_tokens": arguments.max_new_tokens,
    }
    settings: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if not ENGINE_KINDS[arguments.backend or base.backend].takes_gpus:
        if (arguments.tensor or 1) > 1 or arguments.engine_args:
            raise ConfigError("--tensor and --engine-arg are for --backend sglang")
        settings |= {"engine_tensor": 1, "engine_args": ()}
    return dataclasses.replace(
        base,
        **settings,
        urls=tuple(arguments.urls),
        rendezvous="",
        colocate=False,
        max_staleness=0,
        timeout_s=TIMEOUT_S,
        samples_per_prompt=arguments.k,
    )


def _scheme(option: str | None, defaults: EvaluationPlan, backend: str, model: Path) -> str:
    """The number format of engines that are started here.

    Raises:
        ConfigError: the backend cannot make it of this checkpoint; names the tool that can.
    """
    from qurl_megatron.engines.embedded.read_weights import refuse_other_scheme, stored_scheme
    from qurl_megatron.quant.export import read_quantization

    scheme = option or defaults.scheme
    if ENGINE_KINDS[backend].quantizes:
        if option is None and (stored := stored_scheme(model)):
            return stored  # as it is, whatever a run's recipe says
        refuse_other_scheme(model, scheme)
        return scheme
    if scheme not in SERVED:
        raise ConfigError(f"--scheme {scheme} is simulated by embedded engines alone")
    command = f"quantize --scheme {scheme} --model"
    if scheme == "none":
        command = "export --ckpt"
    convert = f"convert it with `qurl {command} {model} --out FOLDER`, and give --model FOLDER"
    if find_torch_dist(model):
        raise ConfigError(f"SGLang cannot load the Megatron checkpoint {model}; {convert}")
    config = read_config(description_of(model))
    stored = config.get("quantization_config")
    if option is None and defaults.run is None:  # any format that SGLang knows
        return stored.get("quant_method", "unknown") if stored else "none"
    quantization = read_quantization(config)
    model_scheme = quantization[0] if quantization else "none"
    if model_scheme != scheme:
        fix = "give the checkpoint they were made from" if stored else convert
        raise ConfigError(f"{model} holds weights of scheme {model_scheme}, not {scheme}; {fix}")
    return scheme


def _files(folder: Path) -> str:
    """Changes with every file of a model: their names, sizes and times, not their contents."""
    stats = []
    for path in folder.rglob("*"):
        if path.is_file():
            stat = path.stat()
            stats.append((str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(sorted(stats)).encode()).hexdigest()[:16]
