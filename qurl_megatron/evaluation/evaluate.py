"""``qurl eval``: start engines, have them answer the benchmarks, write the results.

Avg@1 is decoded greedily, Avg@k sampled; both go through ``fleet.collect``, as in training.

Embedded engines get batches that follow from the file, the settings and the number of engines
alone, and a batch is kept whole or not at all: interrupted and resumed, an evaluation ends in the
same bits. SGLang engines get everything at once, and a problem is graded and kept as soon as it has
all of its responses. There each response has a seed of its own, but the engine's arithmetic depends
on the other responses in its batch.
"""

import json
import math
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from qurl_megatron import __version__
from qurl_megatron.checkpoints.integrity import refuse_damaged
from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.engines.starting import refuse_not_installed
from qurl_megatron.evaluation import results
from qurl_megatron.evaluation.benchmarks import (
    AnswerFile,
    Benchmark,
    GradedAnswer,
    read_benchmarks,
    tally_of,
    with_prompts,
)
from qurl_megatron.evaluation.eval_plan import EvaluationPlan
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.collect import EVALUATION, collect, greedy
from qurl_megatron.fleet.fleet import IN_ALL, Fleet
from qurl_megatron.fleet.turns import Turns
from qurl_megatron.kit.disk import claimed, write_whole
from qurl_megatron.kit.errors import ConfigError, Unscored
from qurl_megatron.observe.text import how_many
from qurl_megatron.rewards import RewardPool, check_rewards
from qurl_megatron.rewards.pool import RewardDown, graded, refuse_none_scored
from qurl_megatron.rewards.workers import EnvironmentPool, check_environment
from qurl_megatron.schemes import ROLLOUT, simulation
from qurl_megatron.tensors.arch import read_config
from qurl_megatron.types import Prompt, Sample

PACKAGES = ("math-verify", "numpy", "torch", "transformers")  # on which results may depend
BATCH = 256  # responses of one batch of an embedded engine, about
ATTEMPTS = 3  # at a batch whose engines have all failed
PROGRESS_S = 10.0  # between two lines of progress


def evaluate(files: Sequence[Path], plans: Sequence[EvaluationPlan]) -> int:
    """Answer the benchmarks, write the results and print the table; two plans, which differ by
    their model alone, are compared.

    Raises:
        ConfigError: a mistake in the input; an engine that cannot be reached or fails for good.
    """
    plan = plans[-1]
    config = plan.config
    refuse_not_installed(config.rollout)
    if plan.scheme in ROLLOUT and (simulated := simulation(plan.scheme)):
        print(simulated, flush=True)
    check_rewards(config.reward)
    check_environment(config.rollout)
    benchmarks = read_benchmarks(files, config.data, answers=bool(config.reward.kind))
    for benchmark in benchmarks:
        print(benchmark.summary, flush=True)
    scores = [_evaluate(plan, benchmarks) for plan in plans]
    if len(plans) > 1:
        _compare(plans, benchmarks, scores)
    return 0


def _evaluate(plan: EvaluationPlan, benchmarks: Sequence[Benchmark]) -> list[results.Scores]:
    """Have one plan's engines answer, write and print the results, and return the scores of each
    benchmark."""
    config = plan.config
    if not config.rollout.urls and (checkpoint := find_torch_dist(plan.model)):
        print(f"comparing the checksums of {checkpoint}", flush=True)
        refuse_damaged(checkpoint)  # once, where each engine would for itself
    described = description_of(plan.model)
    tokenizer = Tokenizer(described)
    chat = config.data.chat
    prompted = []
    for benchmark in benchmarks:
        prompted.append(with_prompts(benchmark, tokenizer, chat=chat, suffix=plan.suffix))
    room = plan.context - max(benchmark.longest for benchmark in prompted)
    if plan.fitted and 1 <= room < config.rollout.max_new_tokens:
        print(
            f"responses end at {room} tokens, which the model's context leaves beside the longest "
            "prompt (rollout.max_new_tokens sets another limit)",
            flush=True,
        )
        config = replace(config, rollout=replace(config.rollout, max_new_tokens=int(room)))
        plan = replace(plan, config=config)
    with ExitStack() as stack:
        stack.enter_context(claimed(plan.out, "an evaluation"))
        if not config.rollout.urls:  # else the engines must say first which weights they serve
            _answer_files(plan, prompted, plan.settings)
        print(f"evaluating {plan.model} by {config.reward.setting}", flush=True)
        fleet = Fleet(
            config.rollout,
            plan.model,
            scheme=plan.scheme,
            dtype=config.model.dtype,
            log_dir=plan.out / "logs",
            # A model for its own engines may say it elsewhere; here tokens are only decoded.
            vocabulary=read_config(described).get("vocab_size", 2**31),
            fixed=True,
        )
        try:
            rewards = stack.enter_context(RewardPool(config.reward))
            turns = None
            if config.rollout.environment:
                pool = stack.enter_context(EnvironmentPool(config.rollout))
                turns = Turns(pool, tokenizer, chat=chat)
            stack.enter_context(fleet)
            evaluator = Evaluator(plan, fleet, rewards, tokenizer, turns)
            scores = _answer(evaluator, prompted)
        except (EngineError, RewardDown) as error:
            advice = ""
            if any(plan.out.glob("*.samples.jsonl")):
                advice = "; the answers so far are kept, and the same command goes on"
            raise ConfigError(f"{error}{advice}") from error
    print((plan.out / "results.md").read_text(encoding="utf-8"), end="")
    print(f"results: {plan.out / 'results.json'}", flush=True)
    return scores


def _answer_files(
    plan: EvaluationPlan, benchmarks: Sequence[Benchmark], settings: dict[str, Any]
) -> list[AnswerFile]:
    """Return each benchmark's answers; raise ``ConfigError`` if other settings made them."""
    files = []
    for benchmark in benchmarks:
        depends = {"problems": benchmark.fingerprint, **settings}
        path = plan.out / f"{benchmark.name}.samples.jsonl"
        files.append(AnswerFile(path, depends, plan.responses))
    return files


def _answer(evaluator: "Evaluator", benchmarks: Sequence[Benchmark]) -> list[results.Scores]:
    """Answer benchmark after benchmark, writing the results so far after each."""
    plan, config = evaluator.plan, evaluator.plan.config
    settings = plan.settings
    engines = describe_engines(evaluator.fleet, plan.context)
    if config.rollout.urls:
        served = {f"{engine['model']} @ {engine['weight_version']}" for engine in engines}
        settings["served"] = sorted(served)
    files = _answer_files(plan, benchmarks, settings)
    if limits := [engine["max_tokens"] for engine in engines if "max_tokens" in engine]:
        for benchmark in benchmarks:
            benchmark.check_lengths(config.rollout.max_new_tokens, min(limits))
    versions = {"qurl": __version__, "python": platform.python_version()}
    document: dict[str, Any] = {
        "model": str(plan.model),
        "settings": settings,
        "engines": engines,
        "versions": versions | {package: metadata.version(package) for package in PACKAGES},
        "benchmarks": {},
    }
    lines: list[results.Line] = []
    every: list[GradedAnswer] = []
    for benchmark, file in zip(benchmarks, files, strict=True):
        evaluator.answer(benchmark, file)
        every += file.every
        score = results.score(benchmark, file.answers, plan.responses, plan.seed)
        speed = results.tokens_per_second(file.every)
        lines.append((benchmark.name, str(len(benchmark.problems)), score, f"{speed:.0f}"))
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
        _write(plan.out / "results.json", document)
    scores = [score for _, _, score, _ in lines]
    if len(benchmarks) > 1:
        average = results.mean(scores)
        lines.append(("mean", "", average, ""))
        _write(plan.out / "results.json", {**document, "mean": results.as_json(average)})
    table = results.table(lines, right_or_wrong=config.reward.right_or_wrong)
    write_whole(plan.out / "results.md", "\n\n".join([table, *_notes(plan, every)]) + "\n")
    return scores


def _notes(plan: EvaluationPlan, answers: Sequence[GradedAnswer]) -> list[str]:
    """Warn of responses without a score, and of conversations that ended early."""
    config, notes = plan.config, []
    if (tally := tally_of(answers)).failed:
        notes.append(
            f"{how_many(tally.failed, 'response')} could not be scored and got "
            f"{config.reward.failed:g}: {tally.said()}"
        )
    if left_out := sum(answer.left_out for answer in answers):
        notes.append(
            f"{left_out} of {how_many(len(answers), 'response')} ended early: what the environment "
            f"said next did not fit into rollout.max_new_tokens={config.rollout.max_new_tokens}, "
            "which all turns and its words share; raise it, or have the environment say less"
        )
    return notes


def _compare(
    plans: Sequence[EvaluationPlan],
    benchmarks: Sequence[Benchmark],
    scores: Sequence[Sequence[results.Scores]],
) -> None:
    """Print how two models differ on the same problems, and write it beside their results."""
    before, after = plans
    lines: list[tuple[str, int, results.Pairs]] = []
    changes = {}
    for benchmark, first, second in zip(benchmarks, *scores, strict=True):
        pairs = results.pairs(benchmark.name, first, second, after.seed)
        lines.append((benchmark.name, len(benchmark.problems), pairs))
        changes[benchmark.name] = results.as_json(pairs)
    document = {"before": str(before.model), "after": str(after.model), "benchmarks": changes}
    path = after.out.parent / f"{before.out.name}_to_{after.out.name}.json"
    _write(path, document)
    table = results.pair_table(lines, right_or_wrong=after.config.reward.right_or_wrong)
    write_whole(path.with_suffix(".md"), table + "\n")
    print(f"before: {before.model}, after: {after.model}\n{table}\nresults: {path}", flush=True)


def _write(path: Path, document: dict[str, Any]) -> None:
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def describe_engines(fleet: Fleet, context: float) -> list[dict[str, Any]]:
    """Return the facts of each engine that bear on results; ``context`` is the default for engines
    that do not report how many tokens the model takes."""
    descriptions = []
    for engine in fleet.serving():
        if (client := engine.client) is None:  # it has died since
            continue
        info = client.server_info()
        cache, length = info.get("max_total_num_tokens"), info.get("context_length")
        limit = min(cache or math.inf, length or context)
        facts = {
            "kind": engine.kind.name,
            "model": info.get("model_path"),
            "weight_version": client.weight_version(),
            "scheme": info.get("scheme") or info.get("quantization"),
            "dtype": info.get("dtype"),
            "tensor": engine.tp,
            "version": info.get("version"),
            "max_tokens": int(limit) if math.isfinite(limit) else None,
        }
        descriptions.append({key: value for key, value in facts.items() if value is not None})
    return descriptions


@dataclass
class Evaluator:
    plan: EvaluationPlan
    fleet: Fleet
    rewards: RewardPool
    tokenizer: Tokenizer
    turns: Turns | None  # where an environment answers, as in training

    def answer(self, benchmark: Benchmark, file: AnswerFile) -> None:
        """Add the missing answers to the file.

        New answers without a single score would be an accuracy of 0: they are refused, and not
        kept.

        Raises:
            EngineError: no engine is left, or none can answer; earlier answers are in the file.
            ConfigError, RewardDown: no new answer has a score.
        """
        before = set(file.answers)
        for mode, responses in self.plan.responses.items():
            _Round(self, benchmark, file, mode, responses).answer()
        new = [answer for answer in file.every if answer.key not in before]
        try:
            refuse_none_scored(tally_of(new), self.rewards.config.setting)
        except (ConfigError, RewardDown):
            file.forget({answer.key for answer in new})
            raise


@dataclass
class _Round:
    """All problems of a benchmark in one mode."""

    evaluator: Evaluator
    benchmark: Benchmark
    file: AnswerFile
    mode: str
    responses: int  # to a problem
    last_progress: float = 0.0

    def answer(self) -> None:
        prompts, engines = self.benchmark.prompts, self.evaluator.fleet.serving()
        if not all(engine.kind.repeats for engine in engines):
            self._answer_batch(prompts, self._hand_over)
            return
        size = max(1, BATCH * len(engines) // self.responses)
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            if self._missing(batch):  # a batch that is not whole is made again
                self.file.forget({(self.mode, prompt.index) for prompt in batch})
            self._answer_batch(batch, self._at_once)

    def _missing(self, batch: Sequence[Prompt]) -> list[Prompt]:
        return [prompt for prompt in batch if (self.mode, prompt.index) not in self.file.answers]

    def _answer_batch(
        self, batch: Sequence[Prompt], generate: Callable[[Sequence[Prompt]], None]
    ) -> None:
        """Generate until each problem has all its responses, waiting for engines that restart."""
        fleet, attempts = self.evaluator.fleet, ATTEMPTS
        while missing := self._missing(batch):
            try:
                generate(missing)
            except EngineError as error:
                attempts -= 1
                if error.ours or not attempts:
                    raise
                end = time.monotonic() + IN_ALL * fleet.config.start_limit_s
                while not fleet.serving():
                    if not fleet.engines() or time.monotonic() > end:
                        raise
                    time.sleep(0.2)

    def _at_once(self, prompts: Sequence[Prompt]) -> None:
        started = time.monotonic()
        samples = self._ask(prompts)
        self._keep(samples, time.monotonic() - started)

    def _hand_over(self, prompts: Sequence[Prompt]) -> None:
        """Grade and write each problem while others are generated."""
        started = time.monotonic()
        writes: deque[Future] = deque()

        def finished(samples: list[Sample]) -> None:
            nonlocal started
            if writes and writes[0].done():
                writes.popleft().result()  # nothing more is asked once answers cannot be kept
            now = time.monotonic()
            writes.append(thread.submit(self._keep, samples, now - started))
            started = now

        with ThreadPoolExecutor(1) as thread:
            try:
                self._ask(prompts, finished)
            finally:
                for write in writes:
                    write.result()

    def _ask(
        self, prompts: Sequence[Prompt], finished: Callable[[list[Sample]], None] | None = None
    ) -> list[Sample]:
        fleet, plan, turns = self.evaluator.fleet, self.evaluator.plan, self.evaluator.turns
        if self.mode == "greedy":
            limit = plan.config.rollout.max_new_tokens
            return greedy(fleet, prompts, limit, finished=finished, turns=turns)
        return collect(
            fleet,
            prompts,
            fleet.config,
            seed=plan.seed,
            step=EVALUATION,
            top_p=plan.top_p,
            finished=finished,
            turns=turns,
        )

    def _keep(self, samples: list[Sample], seconds: float) -> None:
        """Grade and write all responses to some problems, for which engines took ``seconds``, and
        print progress now and then."""
        evaluator = self.evaluator
        samples, scores = graded(samples, evaluator.rewards, evaluator.tokenizer)
        answers, ids = [], list(self.benchmark.problems)
        for place, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            unscored = f"{score.cause}: {score.why}" if isinstance(score, Unscored) else ""
            index = sample.prompt.index
            answers.append(
                GradedAnswer(
                    mode=self.mode,
                    problem=index,
                    id=ids[index],
                    sample=place % self.responses,
                    reward=sample.reward,
                    finish=sample.finish_reason,
                    tokens=sample.written_tokens,
                    seconds=seconds / len(samples),
                    version=max(version for version, _ in sample.versions),
                    text=sample.text,
                    unscored=unscored,
                    left_out=sample.left_out,
                )
            )
        self.file.add(answers)
        total = len(self.benchmark.prompts)
        missing = len(self._missing(self.benchmark.prompts))
        if time.monotonic() >= self.last_progress + PROGRESS_S or not missing:
            self.last_progress = time.monotonic()
            progress = f"{self.benchmark.name}, {self.mode}: {total - missing} of {total} problems"
            print(progress, file=sys.stderr, flush=True)
