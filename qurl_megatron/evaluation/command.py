"""``qurl eval``: engines up, benchmarks answered, results out."""

import argparse
import json
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from qurl_megatron import __version__
from qurl_megatron.checkpoints.integrity import refuse_damaged
from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.data.tokenizer import COMPARED, Tokenizer
from qurl_megatron.engines.starting import refuse_not_installed
from qurl_megatron.evaluation import results
from qurl_megatron.evaluation.answers import AnswerFile, GradedAnswer, tally_of
from qurl_megatron.evaluation.ask import Evaluator, describe_engines
from qurl_megatron.evaluation.benchmarks import (
    ProblemSet,
    as_prompts,
    check_lengths,
    fingerprint,
    read_benchmarks,
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
from qurl_megatron.rewards.environment import EnvironmentPool, check_environment
from qurl_megatron.rewards.pool import RewardDown, refuse_none_scored
from qurl_megatron.schemes import ROLLOUT, simulation
from qurl_megatron.tensors.arch import read_config
from qurl_megatron.types import Prompt

PACKAGES = ("math-verify", "numpy", "torch", "transformers")  # on which results may depend


@dataclass
class Asked:
    """The prompts and answers of one plan and benchmark."""

    benchmark: ProblemSet
    prompts: list[Prompt]
    file: AnswerFile | None = None  # until the plan's settings are known

    @property
    def answers(self) -> AnswerFile:
        assert self.file is not None
        return self.file

    def open(self, plan: EvaluationPlan, settings: dict[str, Any]) -> None:
        """Raise ``ConfigError`` where there are answers made with other settings."""
        depends = {"problems": fingerprint(self.prompts), **settings}
        path = plan.out / f"{self.benchmark.name}.samples.jsonl"
        self.file = AnswerFile(path, depends, plan.sampling.responses)


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
        answers=last.reward.needs_answers,
    )
    for benchmark in benchmarks:
        print(benchmark.summary, flush=True)
    tokenizers, asked_by_plan, longest = [], [], 0
    for plan in plans:
        tokenizer = _tokenizer(plan, benchmarks[0])
        asked_of_plan = []
        for benchmark in benchmarks:
            prompts = as_prompts(benchmark, tokenizer, chat=plan.chat, suffix=plan.suffix)
            longest = max(longest, *(len(prompt.input_ids) for prompt in prompts))
            asked_of_plan.append(Asked(benchmark, prompts))
        tokenizers.append(tokenizer)
        asked_by_plan.append(asked_of_plan)
    room = min(plan.context for plan in plans) - longest
    if arguments.max_new_tokens is None and 1 <= room < last.sampling.max_new_tokens:
        print(
            f"responses end at {room} tokens, which the model's context leaves beside the longest "
            "prompt (--max-new-tokens sets another limit)",
            flush=True,
        )
        plans = [plan.shortened(int(room)) for plan in plans]
    with ExitStack() as folders:
        for plan, asked_of_plan in zip(plans, asked_by_plan, strict=True):
            folders.enter_context(claimed(plan.out, "an evaluation"))
            if not plan.rollout.urls:  # else the engines must say first which weights they serve
                for asked in asked_of_plan:
                    asked.open(plan, plan.settings)
        for plan, tokenizer, asked_of_plan in zip(plans, tokenizers, asked_by_plan, strict=True):
            _run(plan, tokenizer, asked_of_plan)
        if len(plans) == 2:
            _compare(plans, asked_by_plan)
    return 0


def _tokenizer(plan: EvaluationPlan, first: ProblemSet) -> Tokenizer:
    """The tokenizer of a checkpoint that is whole."""
    if not plan.rollout.urls and (checkpoint := find_torch_dist(plan.model)):
        print(f"comparing the checksums of {checkpoint}", flush=True)
        refuse_damaged(checkpoint)  # once, where each engine would for itself
    tokenizer = Tokenizer(description_of(plan.model))
    questions = [problem.question.prompt for problem in first.problems[:COMPARED]]
    if disagreement := tokenizer.disagreement(questions, chat=plan.chat):
        print(disagreement, flush=True)
    return tokenizer


def _run(plan: EvaluationPlan, tokenizer: Tokenizer, asked: Sequence[Asked]) -> None:
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
    try:
        with ExitStack() as stack:
            rewards = stack.enter_context(RewardPool(plan.reward, plan.reward_key))
            turns = None
            if plan.rollout.environment:
                pool = stack.enter_context(EnvironmentPool(plan.rollout))
                turns = Turns(pool, tokenizer, chat=plan.chat)
            stack.enter_context(fleet)
            evaluator = Evaluator(fleet, rewards, tokenizer, plan.sampling, turns)
            page = _answer(plan, evaluator, asked)
    except (EngineError, RewardDown) as error:
        kept = any(plan.out.glob("*.samples.jsonl"))
        advice = "; the answers so far are kept, and the same command goes on" if kept else ""
        raise ConfigError(f"{error}{advice}") from error
    print(page)
    print(f"results: {plan.out / 'results.json'}", flush=True)


def _answer(plan: EvaluationPlan, evaluator: Evaluator, asked: Sequence[Asked]) -> str:
    """Answer benchmark after benchmark, writing the results so far after each.

    Returns:
        The table with its notes.
    """
    settings = plan.settings
    engines = describe_engines(evaluator.fleet, plan.context)
    if plan.rollout.urls:
        served = {f"{engine['model']} @ {engine['weight_version']}" for engine in engines}
        settings["served"] = sorted(served)
        for of_benchmark in asked:
            of_benchmark.open(plan, settings)
    if limits := [engine["max_tokens"] for engine in engines if "max_tokens" in engine]:
        for of_benchmark in asked:
            length = plan.sampling.max_new_tokens
            check_lengths(of_benchmark.benchmark, of_benchmark.prompts, length, min(limits))
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
    every: list[GradedAnswer] = []
    for of_benchmark in asked:
        benchmark, file = of_benchmark.benchmark, of_benchmark.answers
        _answer_benchmark(plan, evaluator, of_benchmark)
        every += file.every
        score = results.score(benchmark, file.answers, file.responses, plan.sampling.seed)
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
        if len(lines) == len(asked) > 1:
            average = results.mean([by_mode for _, _, by_mode, _ in lines])
            document["mean"] = results.as_json(average)
            lines.append(("mean", None, average, None))
        text = json.dumps(document, indent=1, ensure_ascii=False)
        write_whole(plan.out / "results.json", text + "\n")
    table = results.table(lines, right_or_wrong=plan.reward.right_or_wrong)
    page = "\n\n".join([table, *_notes(plan, every)])
    write_whole(plan.out / "results.md", page + "\n")
    return page


def _answer_benchmark(plan: EvaluationPlan, evaluator: Evaluator, asked: Asked) -> None:
    """Complete the answers to one benchmark.

    New answers without a single score would be an accuracy of 0: they are refused, and not kept.
    """
    file = asked.answers
    before = file.counts
    evaluator.answer(asked.benchmark, asked.prompts, file)
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
            f"said next did not fit into --max-new-tokens {plan.sampling.max_new_tokens}, which "
            "all turns and its words share; raise it, or have the environment say less"
        )
    return notes


def _compare(plans: Sequence[EvaluationPlan], asked_by_plan: Sequence[Sequence[Asked]]) -> None:
    """Print how two models differ on the same problems, and write it beside their results."""
    before, after = plans
    benchmarks: dict[str, Any] = {}
    document: dict[str, Any] = {
        "before": str(before.model),
        "after": str(after.model),
        "settings": after.settings,
        "benchmarks": benchmarks,
    }
    lines: list[tuple[str, int | None, results.Pairs]] = []
    for first, second in zip(*asked_by_plan, strict=True):
        responses, seed = after.sampling.responses, after.sampling.seed
        answers = first.answers.answers, second.answers.answers
        pairs = results.pair(first.benchmark, *answers, responses, seed)
        lines.append((first.benchmark.name, len(first.prompts), pairs))
        benchmarks[first.benchmark.name] = results.as_json(pairs)
    if len(lines) > 1:
        average = results.mean_pair([pairs for _, _, pairs in lines])
        document["mean"] = results.as_json(average)
        lines.append(("mean", None, average))
    path = after.out.parent / f"{before.out.name}_to_{after.out.name}.json"
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    table = results.pair_table(lines, right_or_wrong=after.reward.right_or_wrong)
    write_whole(path.with_suffix(".md"), table + "\n")
    print(f"before: {before.model}, after: {after.model}\n{table}\nresults: {path}", flush=True)
