"""``qurl eval``: options in, engines up, benchmarks answered, results out."""

import argparse
import dataclasses
import itertools
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from qurl_megatron import __version__
from qurl_megatron.checkpoints.integrity import refuse_damaged
from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.config.load import variant_name
from qurl_megatron.config.sections import RewardConfig, RolloutConfig
from qurl_megatron.data.tokenizer import COMPARED, Tokenizer
from qurl_megatron.engines.kinds import ENGINE_KINDS
from qurl_megatron.engines.starting import refuse_not_installed
from qurl_megatron.evaluation import results
from qurl_megatron.evaluation.answers import (
    CODE,
    AnswerFile,
    GradedAnswer,
    Key,
    made_otherwise,
    refuse_answers,
    settings_of,
    tally_of,
)
from qurl_megatron.evaluation.benchmarks import ProblemSet, read_benchmarks
from qurl_megatron.evaluation.evaluate import (
    Evaluator,
    Sampling,
    as_prompts,
    check_lengths,
    describe_engines,
    fingerprint,
    model_files,
)
from qurl_megatron.evaluation.options import ADOPTED_S, Defaults
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.fleet.turns import Turns
from qurl_megatron.kit.disk import lock, write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.samples import Example, as_text, clipped, say, telling
from qurl_megatron.observe.text import how_many
from qurl_megatron.quant.export import read_quantization
from qurl_megatron.rewards import KINDS, RewardPool, check_rewards
from qurl_megatron.rewards.environment import EnvironmentPool, check_environment
from qurl_megatron.rewards.own_code import checksums, named_code
from qurl_megatron.rewards.pool import RewardDown, Tally, refuse_none_scored
from qurl_megatron.schemes import ROLLOUT, SERVED, simulation
from qurl_megatron.tensors.arch import read_config
from qurl_megatron.types import Prompt

TIMEOUT_S = 24 * 3600.0  # of one request: an embedded engine gets many responses in one
ANSWERS = ".samples.jsonl"  # file in --out, after a benchmark's name
PACKAGES = ("math-verify", "numpy", "torch", "transformers")  # what results may depend on


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What is to be done, every option decided."""

    model: Path
    rollout: RolloutConfig
    scheme: str
    dtype: str
    sampling: Sampling
    chat: bool
    suffix: str
    reward: RewardConfig
    reward_key: str  # what names it: the recipe's section, or the option
    out: Path
    show: int  # responses to each benchmark

    @property
    def settings(self) -> dict[str, Any]:
        """What the answers depend on, beside the engines and the problems."""
        drawn = dataclasses.asdict(self.sampling)
        if self.sampling.k == 1:  # nothing is drawn
            drawn = {key: drawn[key] for key in ("k", "max_new_tokens")}
        plan_settings = {"chat": self.chat, "suffix": self.suffix, "reward": self.reward.described}
        if self.reward.failed:
            plan_settings["failed"] = self.reward.failed
        if self.rollout.environment:
            plan_settings["environment"] = self.rollout.environment
            plan_settings["max_turns"] = self.rollout.max_turns
        named = named_code(self.reward, self.rollout)
        plan_settings |= {
            f"{CODE}{named[key]}": checksum for key, checksum in checksums(named).items()
        }
        return {**drawn, **plan_settings, **self._model()}

    def _model(self) -> dict[str, Any]:
        if self.rollout.urls:
            return {}  # the engines say what they serve
        files = model_files(find_torch_dist(self.model) or self.model)
        return {
            "backend": self.rollout.backend,
            "scheme": self.scheme,
            "dtype": self.dtype,
            "model_files": files,
        }


@dataclass(frozen=True)
class Questionnaire:
    """What one plan asks."""

    tokenizer: Tokenizer
    prompts: list[tuple[ProblemSet, list[Prompt]]]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.input_ids) for _, prompts in self.prompts for prompt in prompts)


@dataclass(frozen=True)
class Evaluated:
    """What came of one plan: the table with its notes, and the answers of each benchmark."""

    page: str
    answers: list[Mapping[Key, Sequence[GradedAnswer]]]
    shown: list[str]  # responses for a person


def evaluate(arguments: argparse.Namespace, defaults: Defaults | None = None) -> int:
    """Answer the benchmarks, write the results and print the table.

    Raises:
        ConfigError: a mistake in the input; an engine that cannot be reached or fails for good.
    """
    defaults = defaults or Defaults()
    plans = make_plans(arguments, defaults)
    refuse_not_installed(plans[0].rollout)
    scheme = plans[0].scheme
    if scheme in ROLLOUT and (simulated := simulation(scheme, "--scheme ")):
        print(simulated, flush=True)
    reward, key = plans[0].reward, plans[0].reward_key
    check_rewards(reward, key)
    check_environment(plans[0].rollout)
    benchmarks = read_benchmarks(
        arguments.benchmarks,
        prompt_key=_given(arguments.prompt_key, defaults.prompt_key),
        answer_key=_given(arguments.answer_key, defaults.answer_key),
        id_key=arguments.id_key or "",
        answers=reward.needs_answers,
    )
    for benchmark in benchmarks:
        print(benchmark.summary, flush=True)
    asked_by_plan = [_asked(plan, benchmarks) for plan in plans]
    if arguments.max_new_tokens is None:
        plans = _fitted(plans, max(asked_of_plan.longest for asked_of_plan in asked_by_plan))
    other_answers = [
        _other_answers(plan, asked_of_plan)
        for plan, asked_of_plan in zip(plans, asked_by_plan, strict=True)
    ]
    refuse_answers(
        dict(itertools.chain(*(answers_of_plan.items() for answers_of_plan in other_answers)))
    )
    outcomes = [
        _evaluated(plan, asked_of_plan)
        for plan, asked_of_plan in zip(plans, asked_by_plan, strict=True)
    ]
    if len(plans) == 2:
        print(_compared(plans, benchmarks, outcomes), flush=True)
    return 0


def _given(value: Any, fallback: Any) -> Any:
    """An option, or where it is not given what it falls back to."""
    return fallback if value is None else value


def _asked(plan: EvaluationPlan, benchmarks: Sequence[ProblemSet]) -> Questionnaire:
    if not plan.rollout.urls and (checkpoint := find_torch_dist(plan.model)):
        print(f"comparing the checksums of {checkpoint}", flush=True)
        refuse_damaged(checkpoint)  # once, where each engine would for itself
    tokenizer = Tokenizer(description_of(plan.model))
    first = [problem.question.prompt for problem in benchmarks[0].problems[:COMPARED]]
    if other := tokenizer.disagreement(first, chat=plan.chat):
        print(other, flush=True)
    prompts = [
        (benchmark, as_prompts(benchmark, tokenizer, chat=plan.chat, suffix=plan.suffix))
        for benchmark in benchmarks
    ]
    return Questionnaire(tokenizer, prompts)


def _other_answers(plan: EvaluationPlan, asked: Questionnaire) -> dict[Path, str]:
    """Of each file of answers in the plan's folder, that they are of another model or made with
    other settings; empty text where they may be added to.

    Of engines that run already, only they can say what they serve.
    """
    if plan.rollout.urls:
        return {}
    settings = plan.settings
    depends = {
        f"{benchmark.name}{ANSWERS}": {"problems": fingerprint(prompts), **settings}
        for benchmark, prompts in asked.prompts
    }
    descriptions = {}
    for path in sorted(plan.out.glob(f"*{ANSWERS}")):
        # Answers of engines that ran already say nothing of a model's files.
        if settings_of(path).get("model_files") not in (None, settings["model_files"]):
            descriptions[path] = f"of another model than {plan.model} is now"
        elif path.name in depends:
            descriptions[path] = made_otherwise(path, depends[path.name])
    return descriptions


def _fitted(plans: list[EvaluationPlan], longest: int) -> list[EvaluationPlan]:
    """The plans with responses that fit into the models' context beside the longest prompt."""
    limit = min(_context(plan) for plan in plans)
    room = limit - longest
    if not 1 <= room < plans[0].sampling.max_new_tokens:
        return plans  # engines will say what they do not take
    print(
        f"responses end at {room} tokens: the model takes {limit}, of which the longest prompt has "
        f"{longest} (--max-new-tokens sets another limit)",
        flush=True,
    )
    return [
        dataclasses.replace(
            plan,
            sampling=dataclasses.replace(plan.sampling, max_new_tokens=int(room)),
            rollout=dataclasses.replace(plan.rollout, max_new_tokens=int(room)),
        )
        for plan in plans
    ]


def _evaluated(plan: EvaluationPlan, asked: Questionnaire) -> Evaluated:
    """Have one plan's engines answer, write the results and print them.

    Raises:
        ConfigError: an engine cannot be reached or fails for good; no response has a score.
    """
    print(f"evaluating {plan.model} by {plan.reward.setting}", flush=True)
    fleet = Fleet(
        plan.rollout,
        plan.model,
        scheme=plan.scheme,
        dtype=plan.dtype,
        log_dir=plan.out / "logs",
        # A model that only its engines understand may say it elsewhere; tokens are but decoded.
        vocabulary=read_config(description_of(plan.model)).get("vocab_size", 2**31),
        fixed=True,
    )
    with _claimed(plan.out):
        try:
            with ExitStack() as stack:
                rewards = stack.enter_context(RewardPool(plan.reward, plan.reward_key))
                turns = None
                if plan.rollout.environment:
                    pool = stack.enter_context(EnvironmentPool(plan.rollout))
                    turns = Turns(pool, asked.tokenizer, chat=plan.chat)
                stack.enter_context(fleet)
                evaluator = Evaluator(fleet, rewards, asked.tokenizer, plan.sampling, turns)
                outcome = _answer(plan, evaluator, asked.prompts)
        except (EngineError, RewardDown) as error:
            kept = any(plan.out.glob(f"*{ANSWERS}"))
            advice = "; the answers so far are kept, and the same command goes on" if kept else ""
            raise ConfigError(f"{error}{advice}") from error
    for text in outcome.shown:
        say(f"{text}\n")
    print(outcome.page)
    print(f"results: {plan.out / 'results.json'}", flush=True)
    return outcome


@contextmanager
def _scored(plan: EvaluationPlan, files: Sequence[AnswerFile], tally: Tally) -> Iterator[None]:
    """Refuse answers without a single score: they would be an accuracy of 0. They are not kept.

    Args:
        tally: of what is answered meanwhile.
    """
    before = [file.counts for file in files]
    yield
    scorer = plan.reward.setting
    if plan.reward_key.startswith("--"):
        scorer = f"{plan.reward_key}={plan.reward.described}"
    try:
        refuse_none_scored(tally, scorer)
    except (ConfigError, RewardDown):
        for file, counts in zip(files, before, strict=True):
            file.keep(counts)
        for name in ("results.json", "results.md"):
            (plan.out / name).unlink(missing_ok=True)
        raise


def _compared(
    plans: Sequence[EvaluationPlan], benchmarks: Sequence[ProblemSet], outcomes: Sequence[Evaluated]
) -> str:
    """What two evaluations of the same problems differ by, written beside them.

    Returns:
        The table, and where all is written.
    """
    before, after = plans
    sampling = after.sampling
    pairs = [
        results.pair(benchmark, first, second, sampling.responses, sampling.seed)
        for benchmark, first, second in zip(
            benchmarks, *(outcome.answers for outcome in outcomes), strict=True
        )
    ]
    lines: list[tuple[str, int | None, dict[str, results.Pair]]] = [
        (benchmark.name, len(benchmark.problems), pair)
        for benchmark, pair in zip(benchmarks, pairs, strict=True)
    ]
    document = {
        "before": str(before.model),
        "after": str(after.model),
        "settings": after.settings,
        "benchmarks": {name: results.pair_as_json(pair) for name, _, pair in lines},
    }
    if len(pairs) > 1:
        lines.append(("mean", None, results.mean_pair(pairs)))
        document["mean"] = results.pair_as_json(lines[-1][2])
    path = after.out.parent / f"{before.out.name}_to_{after.out.name}.json"
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    table = results.pair_table(lines, right_or_wrong=after.reward.right_or_wrong)
    write_whole(path.with_suffix(".md"), table + "\n")
    return f"before: {before.model}, after: {after.model}\n{table}\nresults: {path}"


def make_plans(arguments: argparse.Namespace, defaults: Defaults) -> list[EvaluationPlan]:
    """One, or with --before first that of the model which the run began with.

    Raises:
        ConfigError: as ``make_plan``; --before with what leaves no model to begin with.
    """
    plan = make_plan(arguments, defaults)
    if arguments.model is not None and arguments.step is not None:
        raise ConfigError(
            "--step names a checkpoint of --run, and --model another model in its place; leave one "
            "of them out"
        )
    if not arguments.before:
        return [plan]
    for option, values in (("--model", arguments.model), ("--url", arguments.urls)):
        if values:
            raise ConfigError(f"--before evaluates two models of --run; leave {option} out")
    if defaults.start is None or not defaults.start.is_dir():
        raise ConfigError(
            f"--before: the run began with model.path={defaults.start}, which is not a folder (any "
            "more); put that model back, or evaluate another with --model"
        )
    assert defaults.run is not None, "--before is of a run"
    base = arguments.out or defaults.run / "eval"
    first = make_plan(arguments, dataclasses.replace(defaults, model=defaults.start))
    named = {} if arguments.out else _changed(first, arguments, defaults)
    return [
        dataclasses.replace(first, out=base / variant_name("start", named)),
        dataclasses.replace(plan, out=base / variant_name(plan.model.name, named)),
    ]


def make_plan(arguments: argparse.Namespace, defaults: Defaults) -> EvaluationPlan:
    """Decide every option.

    Raises:
        ConfigError: some of them are impossible, or do not go together.
    """

    def given(name: str, fallback: Any) -> Any:
        return _given(getattr(arguments, name), fallback)

    sampling = Sampling(
        k=arguments.k,
        temperature=given("temperature", defaults.rollout.temperature),
        top_p=given("top_p", defaults.top_p),
        max_new_tokens=given("max_new_tokens", defaults.rollout.max_new_tokens),
        seed=arguments.seed,
    )
    model = given("model", defaults.model)
    if model is None:
        raise ConfigError("qurl eval needs --model, or --run")
    if not model.is_dir():
        raise ConfigError(f"--model {model} is not a folder; name a checkpoint")
    if arguments.show < 0:
        raise ConfigError(f"--show must be 0 or more, got {arguments.show}")
    rollout = _rollout(arguments, defaults.rollout, sampling)
    scheme = "" if rollout.urls else _scheme(arguments.scheme, defaults, rollout.backend, model)
    out = defaults.out if arguments.model is None else None
    stored = "quantization_config" in read_config(description_of(model))
    rounded = rollout.kind.quantizes and scheme not in ("", "none") and not stored
    out = out or Path("runs/eval") / f"{_by_its_path(model)}{f'-{scheme}' if rounded else ''}"
    plan = EvaluationPlan(
        model=model,
        rollout=rollout,
        scheme=scheme,
        dtype=given("dtype", defaults.dtype),
        sampling=sampling,
        chat=given("chat", defaults.chat),
        suffix=arguments.suffix,
        reward=_reward(arguments.reward, defaults.reward),
        reward_key="--reward" if arguments.reward or defaults.run is None else "reward",
        out=given("out", out),
        show=arguments.show,
    )
    if arguments.out is None:
        named = _changed(plan, arguments, defaults)
        plan = dataclasses.replace(plan, out=out.with_name(variant_name(out.name, named)))
    return plan


def _changed(
    plan: EvaluationPlan, arguments: argparse.Namespace, defaults: Defaults
) -> dict[str, str]:
    """The settings that name the results, as others' answers may not be added to theirs: those
    which are not what they fall back to."""
    sampling, base = plan.sampling, Defaults() if defaults.run is None else defaults
    pairs: dict[str, tuple[Any, Any]] = {
        "backend": (plan.rollout.backend, base.rollout.backend),
        "chat": (plan.chat, base.chat),
        "dtype": (plan.dtype, base.dtype),
        "suffix": (plan.suffix, ""),
    }
    if arguments.max_new_tokens is not None:  # else as many as the model has room for
        pairs["max_new_tokens"] = (sampling.max_new_tokens, base.rollout.max_new_tokens)
    if plan.reward.described != defaults.reward.described:
        pairs["reward"] = (arguments.reward, "")
    if defaults.run is not None and not plan.rollout.urls:
        pairs["scheme"] = (plan.scheme, base.scheme)
    if sampling.k > 1:
        pairs["temperature"] = (sampling.temperature, base.rollout.temperature)
        pairs["top_p"] = (sampling.top_p, base.top_p)
        pairs["seed"] = (sampling.seed, 0)
    return {
        key: f"{now:g}" if isinstance(now, float) else str(now)
        for key, (now, fallback) in pairs.items()
        if now != fallback
    }


def _by_its_path(model: Path) -> Path:
    """A relative path that no two models share, whatever their folders are called."""
    resolved, working_folder = model.resolve(), Path.cwd()
    inside = resolved.is_relative_to(working_folder) and resolved != working_folder
    return resolved.relative_to(working_folder if inside else resolved.anchor)


def _reward(given: str | None, base: RewardConfig) -> RewardConfig:
    """The recipe's reward, unless an option names a kind or a function."""
    if given is None:
        return base
    empty: dict[str, Any] = dict(kind="", function="", batched=False, url="", key_env="", mix={})
    if ":" in given:
        return dataclasses.replace(base, **{**empty, "function": given}).beside(Path())
    if given not in KINDS:
        raise ConfigError(
            f"--reward {given} is not one of {', '.join(KINDS)}; give one of them, or a function "
            "of your own as file.py:name or package.module:name"
        )
    return dataclasses.replace(base, **{**empty, "kind": given})


def _rollout(
    arguments: argparse.Namespace, base: RolloutConfig, sampling: Sampling
) -> RolloutConfig:
    """The engines: those of a recipe or one, changed by the options."""
    changed = {
        "backend": arguments.backend,
        "engines": arguments.engines,
        "engine_tensor": arguments.tensor,
        "engine_memory_gb": arguments.cache_gb,
        "engine_args": arguments.engine_args and tuple(arguments.engine_args),
        "start_timeout_s": arguments.start_timeout or (ADOPTED_S if arguments.urls else None),
    }
    starts = [f"--{key}" for key in ("backend", "engines", "tensor") if getattr(arguments, key)]
    if arguments.urls and (starts or arguments.scheme):
        option = (starts or ["--scheme"])[0]
        raise ConfigError(f"{option} is for engines that are started here; leave it or --url out")
    if not ENGINE_KINDS[arguments.backend or base.backend].takes_gpus:
        if (arguments.tensor or 1) > 1 or arguments.engine_args:
            raise ConfigError("--tensor and --engine-arg are for --backend sglang")
        changed |= {"engine_tensor": 1, "engine_args": ()}
    settings: dict[str, Any] = {key: value for key, value in changed.items() if value is not None}
    if sampling.k > 1:
        settings["temperature"] = sampling.temperature
    return dataclasses.replace(
        base,
        **settings,
        urls=tuple(arguments.urls),
        rendezvous="",
        colocate=False,
        max_staleness=0,
        timeout_s=TIMEOUT_S,
        straggler_s=0.0,
        samples_per_prompt=sampling.k,
        max_new_tokens=sampling.max_new_tokens,
    )


def _scheme(given: str | None, defaults: Defaults, backend: str, model: Path) -> str:
    """What engines that are started here compute in.

    Raises:
        ConfigError: the backend cannot make that of this checkpoint; says what can.
    """
    scheme = given or defaults.scheme
    megatron = find_torch_dist(model) is not None
    config = read_config(description_of(model))
    if ENGINE_KINDS[backend].quantizes:
        from qurl_megatron.engines.embedded.read_weights import refuse_other_scheme, stored_scheme

        if given is None and (stored := stored_scheme(model)):
            return stored  # as it is, whatever a run's recipe says
        refuse_other_scheme(model, scheme)
        return scheme
    if scheme not in SERVED:
        raise ConfigError(f"--scheme {scheme} is simulated by embedded engines alone")
    stored = config.get("quantization_config")
    if not megatron and given is None and defaults.model is None:
        return stored.get("quant_method", "unknown") if stored else "none"
    quantization = read_quantization(config)
    holds = quantization[0] if quantization else "none"
    if holds == scheme and not megatron:
        return holds
    tool = (
        f"quantize.py --scheme {scheme} --model" if scheme != "none" else "megatron_to_hf.py --ckpt"
    )
    fix = f"convert it with `python checkpoints_tools/{tool} {model} --out FOLDER`"
    if megatron:
        raise ConfigError(
            f"SGLang cannot load the Megatron checkpoint {model}; {fix}, and give --model FOLDER"
        )
    if stored:
        fix = "give the checkpoint they were made from"
    raise ConfigError(f"{model} holds weights of scheme {holds}, not {scheme}; {fix}")


def _context(plan: EvaluationPlan) -> float:
    """Tokens that the model itself takes, where its config says so in plain words."""
    if any(argument.startswith("--context-length") for argument in plan.rollout.engine_args):
        return math.inf
    folder = description_of(plan.model)
    if not (folder / "config.json").is_file():  # a tokenizer alone, for engines that run
        return math.inf
    config = read_config(folder)
    if config.get("rope_scaling"):  # which may stretch what the next key says, or has done so
        return math.inf
    return config.get("max_position_embeddings") or math.inf


def _answer(
    plan: EvaluationPlan, evaluator: Evaluator, asked: Sequence[tuple[ProblemSet, Sequence[Prompt]]]
) -> Evaluated:
    """Answer benchmark after benchmark; what is known of them is written after each."""
    sampling, out = plan.sampling, plan.out
    engines = describe_engines(evaluator.fleet, _context(plan))
    limit = min(
        (engine["max_tokens"] for engine in engines if "max_tokens" in engine), default=math.inf
    )
    settings = plan.settings
    if plan.rollout.urls:
        settings["served"] = sorted({f"{e['model']} @ {e['weight_version']}" for e in engines})
    files = []
    for benchmark, prompts in asked:
        check_lengths(benchmark, prompts, sampling.max_new_tokens, limit)
        depends = {"problems": fingerprint(prompts), **settings}
        path = out / f"{benchmark.name}{ANSWERS}"
        files.append(AnswerFile(path, depends, sampling.responses))
    document: dict[str, Any] = {
        "model": str(plan.model),
        "settings": settings,
        "engines": engines,
        "versions": {
            "qurl": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in PACKAGES},
        },
        "benchmarks": {},
    }
    scores, shown = [], []
    lines: list[tuple[str, int | None, dict[str, results.BenchmarkScore], float | None]] = []
    with _scored(plan, files, evaluator.rewards.tally):
        for (benchmark, prompts), file in zip(asked, files, strict=True):
            evaluator.answer(benchmark, prompts, file)
            score = results.score(benchmark, file.answers, sampling.responses, sampling.seed)
            speed = results.tokens_per_second(file.answers)
            shown += _examples(benchmark, prompts, file, plan.show)
            left_out = {}
            if plan.rollout.environment:
                left_out["left_out"] = sum(answer.left_out for answer in file.every)
            scores.append(score)
            lines.append((benchmark.name, len(benchmark.problems), score, speed))
            document["benchmarks"][benchmark.name] = {
                "file": str(benchmark.path),
                "problems": len(benchmark.problems),
                **{mode: mode_score.as_json() for mode, mode_score in score.items()},
                "tokens_per_s": round(speed, 1),
                "weight_versions": results.weight_versions(file.answers),
                "unscored": tally_of(file.every).failed,
                **left_out,
                "rows": results.rows(benchmark, file.answers),
            }
            if benchmark is asked[-1][0] and len(asked) > 1:
                average = results.mean(scores)
                document["mean"] = {
                    mode: mode_score.as_json() for mode, mode_score in average.items()
                }
                lines.append(("mean", None, average, None))
            text = json.dumps(document, indent=1, ensure_ascii=False)
            write_whole(out / "results.json", text + "\n")
        notes = _notes(plan, [answer for file in files for answer in file.every])
        table = results.table(lines, right_or_wrong=plan.reward.right_or_wrong)
        page = "\n".join([table, *(f"\n{note}" for note in notes)])
        write_whole(out / "results.md", page + "\n")
    return Evaluated(page, [file.answers for file in files], shown)


def _notes(plan: EvaluationPlan, answers: Sequence[GradedAnswer]) -> list[str]:
    """What to know of the table, those of an earlier call among the answers: which have no score,
    and which conversations ended early."""
    notes = []
    if (tally := tally_of(answers)).failed:
        failed = f"{plan.reward.failed:g}"
        failed = failed if plan.reward_key.startswith("--") else f"reward.failed={failed}"
        notes.append(
            f"{how_many(tally.failed, 'response')} could not be scored and got {failed}: "
            f"{tally.said()}"
        )
    if left_out := sum(answer.left_out for answer in answers):
        notes.append(
            f"{left_out} of {how_many(len(answers), 'response')} ended early: what the environment "
            f"said next did not fit into --max-new-tokens {plan.sampling.max_new_tokens}, which "
            "all turns and its words share; raise it, or have the environment say less"
        )
    return notes


def _examples(
    benchmark: ProblemSet, prompts: Sequence[Prompt], file: AnswerFile, count: int
) -> list[str]:
    """Responses with the lowest and the highest rewards, for a person."""
    answers = file.every
    rewards = [graded.reward for graded in answers]
    problems = [graded.problem for graded in answers]
    shown = []
    for answer in map(answers.__getitem__, telling(rewards, problems, count)):
        prompt = prompts[answer.problem]
        example = Example(
            step=answer.version,
            of=benchmark.name,
            index=answer.problem,
            prompt=clipped(prompt.text),
            answer=prompt.answer,
            response=clipped(answer.text),
            reward=answer.reward,
            tokens=answer.tokens,
            finish=answer.finish,
        )
        shown.append(as_text(example, f"{benchmark.name} {answer.id}, {answer.mode}"))
    return shown


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """The folder is this process' own until the block ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock_file = (out / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from None
    with lock_file:
        if not lock(lock_file):
            raise ConfigError(
                f"{out} is in use by an evaluation that has not ended; wait for it, or give "
                "another --out"
            )
        yield
