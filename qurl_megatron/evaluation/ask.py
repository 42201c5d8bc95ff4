"""Prompts in, graded responses out: asked of the engines, decoded, scored, put on disk.

Avg@1 is decoded greedily, Avg@k sampled; both go through ``fleet.collect``, as in training.

Embedded engines get batches that follow from the file, the settings and the number of engines
alone, and a batch is kept whole or not at all: interrupted and resumed, an evaluation ends in the
same bits. SGLang engines get everything at once, and a problem is graded and kept as soon as it has
all of its responses. There each response has a seed of its own, but the engine's arithmetic depends
on what shares its batch.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.evaluation.answers import AnswerFile, GradedAnswer, Key
from qurl_megatron.evaluation.benchmarks import ProblemSet
from qurl_megatron.evaluation.eval_plan import EvaluationPlan
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.collect import EVALUATION, collect, greedy
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.fleet.supervisor import IN_ALL
from qurl_megatron.fleet.turns import Turns
from qurl_megatron.rewards import RewardPool
from qurl_megatron.rewards.pool import graded
from qurl_megatron.types import Prompt, Sample

BATCH = 256  # responses of one batch of an embedded engine, about
ATTEMPTS = 3  # at a batch whose engines have all failed
PROGRESS_S = 10.0  # between two lines of progress


def describe_engines(fleet: Fleet, context: float) -> list[dict[str, Any]]:
    """Each engine's report of itself, as far as it bears on results.

    Args:
        context: tokens that the model takes, for engines that do not say.
    """
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
    """Answers benchmarks with the engines of a fleet."""

    plan: EvaluationPlan
    fleet: Fleet
    rewards: RewardPool
    tokenizer: Tokenizer
    turns: Turns | None  # where an environment answers, as in training

    def __post_init__(self) -> None:
        engines = self.fleet.serving()
        self.in_batches = all(engine.kind.repeats for engine in engines)
        self.batch = BATCH * len(engines)  # responses

    def answer(self, benchmark: ProblemSet, file: AnswerFile) -> None:
        """Add the missing answers to the file.

        Raises:
            EngineError: no engine is left, or none can answer; earlier answers are in the file.
        """
        for mode in self.plan.responses:
            _Round(self, benchmark, file, mode).answer(benchmark.prompts)


@dataclass
class _Round:
    """All problems of a benchmark in one mode."""

    evaluator: Evaluator
    benchmark: ProblemSet
    file: AnswerFile
    mode: str
    last_progress: float = 0.0

    @property
    def responses(self) -> int:
        """Of each problem."""
        return self.evaluator.plan.responses[self.mode]

    def answer(self, prompts: Sequence[Prompt]) -> None:
        if not self.evaluator.in_batches:
            self._answer_batch(prompts)
            return
        size = max(1, self.evaluator.batch // self.responses)
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            keys = [self._key(prompt) for prompt in batch]
            fewest = min(map(self.file.count, keys))
            if fewest < self.responses:  # forget what was written of a batch that is not whole
                self.file.truncate({**self.file.counts, **dict.fromkeys(keys, fewest)})
            self._answer_batch(batch)

    def _key(self, prompt: Prompt) -> Key:
        return self.mode, prompt.index

    def _answer_batch(self, batch: Sequence[Prompt]) -> None:
        """Generate until each problem has all its responses, waiting for engines that restart."""
        attempts = ATTEMPTS
        while missing := self._missing(batch):
            try:
                self._generate(missing)
            except EngineError as error:
                attempts -= 1
                if error.ours or not attempts or not self._serving_again():
                    raise

    def _serving_again(self) -> bool:
        """Wait for an engine to serve again; False where none will."""
        fleet = self.evaluator.fleet
        end = time.monotonic() + IN_ALL * fleet.config.start_limit_s
        while not fleet.serving():
            if not fleet.engines() or time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def _missing(self, batch: Sequence[Prompt]) -> list[Prompt]:
        return [prompt for prompt in batch if self.file.count(self._key(prompt)) < self.responses]

    def _generate(self, prompts: Sequence[Prompt]) -> None:
        started = time.monotonic()
        if self.evaluator.in_batches:
            samples = self._ask(prompts)
            self._keep(samples, (time.monotonic() - started) / len(samples))
            return
        kept: deque[Future] = deque()

        def hand_over(samples: list[Sample]) -> None:
            nonlocal started
            if kept and kept[0].done():
                kept.popleft().result()  # nothing more is asked once answers cannot be kept
            now = time.monotonic()
            kept.append(clerk.submit(self._keep, samples, (now - started) / len(samples)))
            started = now

        with ThreadPoolExecutor(1) as clerk:  # grades and writes while others are generated
            try:
                self._ask(prompts, hand_over)
            finally:
                for future in kept:
                    future.result()

    def _ask(
        self, prompts: Sequence[Prompt], finished: Callable[[list[Sample]], None] | None = None
    ) -> list[Sample]:
        fleet, plan, turns = self.evaluator.fleet, self.evaluator.plan, self.evaluator.turns
        if self.mode == "greedy":
            limit = plan.rollout.max_new_tokens
            return greedy(fleet, prompts, limit, finished=finished, turns=turns)
        first_missing = {prompt.index: self.file.count(self._key(prompt)) for prompt in prompts}
        return collect(
            fleet,
            prompts,
            fleet.config,
            seed=plan.seed,
            step=EVALUATION,
            top_p=plan.top_p,
            samples=lambda prompt: range(first_missing[prompt.index], self.responses),
            finished=finished,
            turns=turns,
        )

    def _keep(self, samples: list[Sample], seconds: float) -> None:
        """Grade and write.

        Args:
            seconds: of the engines' time that each response took.
        """
        evaluator = self.evaluator
        scored, grades = graded(samples, evaluator.rewards, evaluator.tokenizer)
        numbers = self.file.counts
        answers = []
        for sample, failure in zip(scored, grades.failures, strict=True):
            index, key = sample.prompt.index, self._key(sample.prompt)
            number = numbers.get(key, 0)
            numbers[key] = number + 1
            answers.append(
                GradedAnswer(
                    mode=self.mode,
                    problem=index,
                    id=self.benchmark.problems[index].id,
                    sample=number,
                    reward=sample.reward,
                    finish=sample.finish_reason,
                    tokens=sample.written_tokens,
                    seconds=seconds,
                    version=max(version for version, _ in sample.versions),
                    text=sample.text,
                    unscored=f"{failure.cause}: {failure.why}" if failure else "",
                    left_out=sample.left_out,
                )
            )
        self.file.add(answers)
        self._print_progress()

    def _print_progress(self) -> None:
        """Print a line to stderr, now and then and at the end."""
        total = len(self.benchmark.problems)
        counts = [self.file.count((self.mode, index)) for index in range(total)]
        done = sum(count >= self.responses for count in counts)
        if time.monotonic() < self.last_progress + PROGRESS_S and done < total:
            return
        self.last_progress = time.monotonic()
        print(
            f"{self.benchmark.name}, {self.mode}: {done} of {total} problems",
            file=sys.stderr,
            flush=True,
        )
