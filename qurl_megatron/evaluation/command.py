"""``qurl eval``: engines up, benchmarks answered, results out."""

import argparse
import json
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import metadata
from typing import Any

from qurl_megatron import __version__
from qurl_megatron.checkpoints.integrity import refuse_damaged
from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.engines.starting import refuse_not_installed
from qurl_megatron.evaluation import results
from qurl_megatron.evaluation.answers import AnswerFile, GradedAnswer, tally_of
from qurl_megatron.evaluation.ask import Evaluator, describe_engines
from qurl_megatron.evaluation.benchmarks import (
    ProblemSet,
    check_lengths,
    fingerprint,
    read_benchmarks,
    with_prompts,
)
from qurl_megatron.evaluation.eval_plan import EvaluationPlan, make_plans
from qurl_megatron.evaluation.options import Defaults
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.fleet.turns import Turns
from qurl_megatron.kit.disk import claimed, write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.text import how_many
from qurl_megatron.rewards import RewardPool, check_rewards
from qurl_megatron.rewards.pool import RewardDown, refuse_none_scored
from qurl_megatron.rewards.workers import EnvironmentPool, check_environment
from qurl_megatron.schemes import ROLLOUT, simulation
from qurl_megatron.tensors.arch import read_config

PACKAGES = ("math-verify", "numpy", "torch", "transformers")  # on which results may depend


def evaluate(arguments: argparse.Namespace, defaults: Defaults | None = None) -> int:
    """Answer the benchmarks, write the results and print the table.

    Raises:
        ConfigError: a mistake in the input; an engine that cannot be reached or fails for good.
    """
    defaults = defaults or Defaults()
    plans = make_plans(arguments, defaults)
    last = plans[-1]  # the plans differ by their model alone
    refuse_not_installed(last.rollout)
    if last.scheme in ROLLOUT and (simulated := simulation(last.scheme, "--scheme ")):
        print(simulated, flush=True)
    check_rewards(last.reward, last.reward_key)
    check_environment(last.rollout)
    benchmarks = read_benchmarks(
        arguments.benchmarks,
        prompt_key=arguments.prompt_key or defaults.prompt_key,
        answer_key=arguments.answer_key or defaults.answer_key,
        answers=bool(last.reward.kind),
    )
    for benchmark in benchmarks:
        print(benchmark.summary, flush=True)
    fitted = arguments.max_new_tokens is None
    scores = [_evaluate(plan, benchmarks, fitted=fitted) for plan in plans]
    if arguments.before:
        _compare(plans, benchmarks, scores)
    return 0


def _evaluate(
    plan: EvaluationPlan, benchmarks: Sequence[ProblemSet], *, fitted: bool
) -> list[results.Scores]:
    """Have one plan's engines answer, write the results and print them.

    Args:
        fitted: responses end where the model's context does, if it is shorter than the plan's.

    Returns:
        The scores of each benchmark.

    Raises:
        ConfigError: an engine cannot be reached or fails for good; no response has a score; there
            are answers made with other settings.
    """
    tokenizer = _tokenizer(plan, benchmarks[0])
    prompted = []
    for benchmark in benchmarks:
        prompted.append(with_prompts(benchmark, tokenizer, chat=plan.chat, suffix=plan.suffix))
    room = plan.context - max(benchmark.longest for benchmark in prompted)
    if fitted and 1 <= room < plan.rollout.max_new_tokens:
        print(
            f"responses end at {room} tokens, which the model's context leaves beside the longest "
            "prompt (--max-new-tokens sets another limit)",
            flush=True,
        )
        plan = plan.shortened(int(room))
    with ExitStack() as stack:
        stack.enter_context(claimed(plan.out, "an evaluation"))
        if not plan.rollout.urls:  # else the engines must say first which weights they serve
            _answer_files(plan, prompted, plan.settings)
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
        try:
            rewards = stack.enter_context(RewardPool(plan.reward, plan.reward_key))
            turns = None
            if plan.rollout.environment:
                pool = stack.enter_context(EnvironmentPool(plan.rollout))
                turns = Turns(pool, tokenizer, chat=plan.chat)
            stack.enter_context(fleet)
            scores = _answer(Evaluator(plan, fleet, rewards, tokenizer, turns), prompted)
        except (EngineError, RewardDown) as error:
            kept = any(plan.out.glob("*.samples.jsonl"))
            advice = "; the answers so far are kept, and the same command goes on" if kept else ""
            raise ConfigError(f"{error}{advice}") from error
    print((plan.out / "results.md").read_text(encoding="utf-8"), end="")
    print(f"results: {plan.out / 'results.json'}", flush=True)
    return scores


def _answer_files(
    plan: EvaluationPlan, benchmarks: Sequence[ProblemSet], settings: dict[str, Any]
) -> list[AnswerFile]:
    """Raise ``ConfigError`` where there are answers made with other settings."""
    files = []
    for benchmark in benchmarks:
        depends = {"problems": fingerprint(benchmark.prompts), **settings}
        path = plan.out / f"{benchmark.name}.samples.jsonl"
        files.append(AnswerFile(path, depends, plan.responses))
    return files


def _tokenizer(plan: EvaluationPlan, first: ProblemSet) -> Tokenizer:
    """The tokenizer of a checkpoint that is whole."""
    if not plan.rollout.urls and (checkpoint := find_torch_dist(plan.model)):
        print(f"comparing the checksums of {checkpoint}", flush=True)
        refuse_damaged(checkpoint)  # once, where each engine would for itself
    tokenizer = Tokenizer(description_of(plan.model))
    return tokenizer


def _answer(evaluator: Evaluator, benchmarks: Sequence[ProblemSet]) -> list[results.Scores]:
    """Answer benchmark after benchmark, writing the results so far after each."""
    plan = evaluator.plan
    settings = plan.settings
    engines = describe_engines(evaluator.fleet, plan.context)
    if plan.rollout.urls:
        served = {f"{engine['model']} @ {engine['weight_version']}" for engine in engines}
        settings["served"] = sorted(served)
    files = _answer_files(plan, benchmarks, settings)
    if limits := [engine["max_tokens"] for engine in engines if "max_tokens" in engine]:
        for benchmark in benchmarks:
            check_lengths(benchmark, plan.rollout.max_new_tokens, min(limits))
    versions = {"qurl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        versions[package] = metadata.version(package)
    document: dict[str, Any] = {
        "model": str(plan.model),
        "settings": settings,
        "engines": engines,
        "versions": versions,
        "benchmarks": {},
    }
    lines: list[results.Line] = []
    scores: list[results.Scores] = []
    every: list[GradedAnswer] = []
    for benchmark, file in zip(benchmarks, files, strict=True):
        _answer_benchmark(evaluator, benchmark, file)
        every += file.every
        score = results.score(benchmark, file.answers, file.responses, plan.seed)
        scores.append(score)
        speed = results.tokens_per_second(file.every)
        lines.append((benchmark.name, len(benchmark.problems), score, speed))
        document["benchmarks"][benchmark.name] = {
            "file": str(benchmark.path),
            "problems": len(benchmark.problems),
            **results.as_json(score),
            "tokens_per_s": round(speed, 1),
            # More than one: somebody published to the engines meanwhile.
            "weight_versions": sorted({answer.version for answer in file.every}),
            "unscored": tally_of(file.every).failed,
            "left_out": sum(answer.left_out for answer in file.every),
            "rows": results.rows(benchmark, file.answers),
        }
        if len(lines) == len(benchmarks) > 1:
            average = results.mean(scores)
            document["mean"] = results.as_json(average)
            lines.append(("mean", None, average, None))
        text = json.dumps(document, indent=1, ensure_ascii=False)
        write_whole(plan.out / "results.json", text + "\n")
    table = results.table(lines, right_or_wrong=plan.reward.right_or_wrong)
    page = "\n\n".join([table, *_notes(plan, every)])
    write_whole(plan.out / "results.md", page + "\n")
    return scores


def _answer_benchmark(evaluator: Evaluator, benchmark: ProblemSet, file: AnswerFile) -> None:
    """Complete the answers to one benchmark.

    New answers without a single score would be an accuracy of 0: they are refused, and not kept.
    """
    plan, before = evaluator.plan, file.counts
    evaluator.answer(benchmark, file)
    new = [answer for answer in file.every if answer.sample >= before.get(answer.key, 0)]
    scorer = plan.reward.setting
    if plan.reward_key.startswith("--"):
        scorer = f"{plan.reward_key}={plan.reward.described}"
    try:
        refuse_none_scored(tally_of(new), scorer)
    except (ConfigError, RewardDown):
        file.truncate(before)
        raise


def _notes(plan: EvaluationPlan, answers: Sequence[GradedAnswer]) -> list[str]:
    """Warn of responses without a score, and of conversations that ended early."""
    notes = []
    if (tally := tally_of(answers)).failed:
        notes.append(
            f"{how_many(tally.failed, 'response')} could not be scored and got "
            f"{plan.reward.failed:g}: {tally.said()}"
        )
    if left_out := sum(answer.left_out for answer in answers):
        notes.append(
            f"{left_out} of {how_many(len(answers), 'response')} ended early: what the environment "
            f"said next did not fit into --max-new-tokens {plan.rollout.max_new_tokens}, which "
            "all turns and its words share; raise it, or have the environment say less"
        )
    return notes


def _compare(
    plans: Sequence[EvaluationPlan],
    benchmarks: Sequence[ProblemSet],
    scores: Sequence[Sequence[results.Scores]],
) -> None:
    """Print how two models differ on the same problems, and write it beside their results."""
    before, after = plans
    lines: list[tuple[str, int, results.Pairs]] = []
    changes = {}
    for benchmark, first, second in zip(benchmarks, *scores, strict=True):
        name = benchmark.name
        pairs = results.pairs(name, first, second, after.seed)
        lines.append((name, len(benchmark.problems), pairs))
        changes[name] = results.as_json(pairs)
    document = {
        "before": str(before.model),
        "after": str(after.model),
        "benchmarks": changes,
    }
    path = after.out.parent / f"{before.out.name}_to_{after.out.name}.json"
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    table = results.pair_table(lines, right_or_wrong=after.reward.right_or_wrong)
    write_whole(path.with_suffix(".md"), table + "\n")
    print(f"before: {before.model}, after: {after.model}\n{table}\nresults: {path}", flush=True)
