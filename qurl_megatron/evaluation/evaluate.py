"""Benchmarks in, graded responses out: asked of the engines, decoded, checked, put on disk.

Avg@1 is decoded greedily, Avg@k sampled; both go through ``rollout.collect``, as in training.

Embedded engines get batches that follow from the file, the settings and the number of engines
alone, and a batch is kept whole or not at all: interrupted and resumed, an evaluation ends in the
same bits. Batches are of a few problems' samples 0 to 3, then 4 to 7, 8 to 15, and so on: asked for
4 and then for 8, it ends in those of 8 at once. SGLang engines get everything at once; a problem is
graded and kept as soon as it has all of its responses, while others are generated. Each response
has a seed of its own, but the engine's arithmetic depends on what else is in its batch.
"""

import hashlib
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qurl_megatron.data.rows import Question
from qurl_megatron.data.tokenizer import Tokenizer, ids_of
from qurl_megatron.evaluation.answers import AnswerFile, GradedAnswer, Key
from qurl_megatron.evaluation.benchmarks import ProblemSet
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.collect import EVALUATION, Finished, collect, greedy
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.fleet.supervisor import IN_ALL
from qurl_megatron.fleet.turns import Turns
from qurl_megatron.kit.errors import ConfigError, Interrupted
from qurl_megatron.rewards import RewardPool
from qurl_megatron.rewards.pool import graded
from qurl_megatron.types import Prompt, Sample
from qurl_megatron.wire.schema import count, or_none, shortened

BATCH = 256  # responses of one batch of an embedded engine, about
FIRST = 4  # samples of a problem that are drawn at once; then as many as there are, again and again
HEALS = 3  # times in a row that engines which all failed are waited for, without one new answer
TELL_S = 10.0  # between two lines on how far it is


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn; the limit is also that of greedy ones."""

    k: int
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"--k must be 1 or more, got {self.k}")
        if self.k > 1 and not self.temperature > 0:
            raise ConfigError(
                f"--temperature {self.temperature:g} would make all --k {self.k} responses the "
                "same; give a positive one, or --k 1 for greedy decoding alone"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p must lie in (0, 1], got {self.top_p:g}")
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens must be 1 or more, got {self.max_new_tokens}")
        if self.seed < 0:
            raise ConfigError(f"--seed must be 0 or more, got {self.seed}")

    @property
    def responses(self) -> dict[str, int]:
        """Of each problem, by mode."""
        return {"greedy": 1, "sampled": self.k} if self.k > 1 else {"greedy": 1}


def as_prompts(
    benchmark: ProblemSet, tokenizer: Tokenizer, *, chat: bool, suffix: str
) -> list[Prompt]:
    """What the engines are asked, in the order of the file; ``suffix`` is a line of its own."""
    end = f"\n{suffix}" if suffix else ""
    questions = [_ending(problem.question, end) for problem in benchmark.problems]
    return [
        Prompt(
            i,
            ids_of(question, tokenizer, chat=chat),
            question.text,
            question.answer,
            question.metadata,
            question.turns,
        )
        for i, question in enumerate(questions)
    ]


def _ending(question: Question, end: str) -> Question:
    """The question with a text at its end; of a chat, at the end of the last turn."""
    turns = question.turns
    if turns:
        turns = (*turns[:-1], {**turns[-1], "content": turns[-1]["content"] + end})
    return replace(question, text=question.text + end, turns=turns)


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Changes with every token that is asked, and with all that a reward gets of a question."""
    facts = [(prompt.input_ids, prompt.answer, prompt.metadata) for prompt in prompts]
    content = json.dumps(facts, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def check_lengths(
    benchmark: ProblemSet, prompts: Sequence[Prompt], max_new_tokens: int, limit: float
) -> None:
    """Raise ``ConfigError`` where the longest prompt and its response exceed ``limit`` tokens."""
    lengths = [len(prompt.input_ids) for prompt in prompts]
    longest = max(lengths)
    if longest + max_new_tokens <= limit:
        return
    fix = "leave it out, or take an engine with a longer context"
    if longest < limit:
        fix = f"give at most {limit - longest:.0f}"
    place = benchmark.problems[lengths.index(longest)].question.place
    raise ConfigError(
        f"{place}: the longest prompt, {longest} tokens, and --max-new-tokens {max_new_tokens} "
        f"exceed the {limit:.0f} tokens that the engine takes; {fix}"
    )


def describe_engines(fleet: Fleet, context: float) -> list[dict[str, Any]]:
    """What each engine says of itself, as far as it bears on results.

    Args:
        context: tokens that the model takes, for engines that do not say.
    """
    descriptions = []
    for engine in fleet.serving():
        if (client := engine.client) is None:  # it has died since
            continue
        info = client.server_info()
        facts = {
            "kind": engine.kind.name,
            "model": info.get("model_path"),
            "weight_version": client.weight_version(),
            "scheme": info.get("scheme") or info.get("quantization"),
            "dtype": info.get("dtype"),
            "tensor": engine.tp,
            "version": info.get("version"),
            "max_tokens": _max_tokens(info, context),
        }
        descriptions.append({key: value for key, value in facts.items() if value is not None})
    return descriptions


def _max_tokens(info: dict[str, Any], context: float) -> int | None:
    """Prompt and response together: what fits into the cache, and into the context."""
    cache, length = info.get("max_total_num_tokens"), info.get("context_length")
    if not (or_none(count)(cache) and or_none(count)(length)):
        reported = shortened([cache, length])
        raise ConfigError(
            f"the engine of {info.get('model_path')} reports {reported} for max_total_num_tokens "
            "and context_length, which are not numbers of tokens"
        )
    limit = min(cache or math.inf, length or context)
    return int(limit) if math.isfinite(limit) else None


class Evaluator:
    """Answers benchmarks with the engines of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        sampling: Sampling,
        turns: Turns | None = None,
    ) -> None:
        """
        Args:
            turns: with an environment, which answers as in training.
        """
        self.fleet, self.rewards, self.tokenizer, self.turns = fleet, rewards, tokenizer, turns
        self.sampling = sampling
        engines = fleet.serving()
        self.in_batches = all(engine.kind.repeats for engine in engines)
        self.batch = BATCH * len(engines)  # responses

    def answer(self, benchmark: ProblemSet, prompts: Sequence[Prompt], file: AnswerFile) -> None:
        """Add to the file what is not there yet.

        Raises:
            EngineError: no engine is left, or none can answer; what was answered is in the file.
        """
        for mode in self.sampling.responses:
            with ThreadPoolExecutor(1) as clerk:
                _Round(self, benchmark, file, mode, clerk).answer(prompts)

    def generate(
        self,
        prompts: Sequence[Prompt],
        mode: str,
        *,
        samples: Callable[[Prompt], Sequence[int]],
        stop: Callable[[], bool],
        finished: Finished | None,
    ) -> list[Sample]:
        """
        Args:
            samples: which of a prompt's samples to draw, where they are drawn.
        """
        if mode == "greedy":
            limit = self.sampling.max_new_tokens
            return greedy(
                self.fleet, prompts, limit, stop=stop, finished=finished, turns=self.turns
            )
        return collect(
            self.fleet,
            prompts,
            self.fleet.config,
            seed=self.sampling.seed,
            step=EVALUATION,
            top_p=self.sampling.top_p,
            samples=samples,
            stop=stop,
            finished=finished,
            turns=self.turns,
        )

    def await_engines(self) -> bool:
        """Wait for one to serve again; False where none will."""
        end = time.monotonic() + IN_ALL * self.fleet.config.start_limit_s
        while not self.fleet.serving():
            if not self.fleet.engines() or time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True


class _Round:
    """All problems of a benchmark in one mode."""

    def __init__(
        self,
        evaluator: Evaluator,
        benchmark: ProblemSet,
        file: AnswerFile,
        mode: str,
        clerk: ThreadPoolExecutor,
    ) -> None:
        self.evaluator, self.benchmark, self.file, self.mode = evaluator, benchmark, file, mode
        self.responses = evaluator.sampling.responses[mode]  # of each problem
        self.clerk = clerk  # one thread, which grades and writes
        self.failed = threading.Event()  # grading or writing
        self.told = 0.0

    def answer(self, prompts: Sequence[Prompt]) -> None:
        if not self.evaluator.in_batches:
            self._answer_batch(prompts, self.responses)
            return
        for first, last in _stretches(1 if self.mode == "greedy" else FIRST, self.responses):
            size = max(1, self.evaluator.batch // (last - first))
            for start in range(0, len(prompts), size):
                batch = prompts[start : start + size]
                self._drop_a_part(batch, last)
                self._answer_batch(batch, min(last, self.responses))

    def _drop_a_part(self, batch: Sequence[Prompt], last: int) -> None:
        """Where a batch was written in part, forget that part."""
        counts = self.file.counts
        keys = [self._key(prompt) for prompt in batch]
        fewest = min(counts.get(key, 0) for key in keys)
        if fewest < last:
            self.file.keep({**counts, **dict.fromkeys(keys, fewest)})

    def _answer_batch(self, batch: Sequence[Prompt], last: int) -> None:
        """Have each problem's samples before ``last`` in the file."""
        heals = HEALS
        while missing := self._missing(batch, last):
            try:
                self._generate(missing, last)
            except EngineError as error:
                heals = HEALS if len(self._missing(batch, last)) < len(missing) else heals - 1
                if error.ours or not heals or not self.evaluator.await_engines():
                    raise

    def _missing(self, batch: Sequence[Prompt], last: int) -> list[Prompt]:
        return [prompt for prompt in batch if self.file.count(self._key(prompt)) < last]

    def _key(self, prompt: Prompt) -> Key:
        return self.mode, prompt.index

    def _note(self, kept: Future) -> None:
        if kept.exception():
            self.failed.set()

    def _generate(self, prompts: Sequence[Prompt], last: int) -> None:
        first_missing = {prompt.index: self.file.count(self._key(prompt)) for prompt in prompts}
        kept: list[Future] = []
        since = time.monotonic()

        def hand_over(samples: list[Sample]) -> None:
            nonlocal since
            now = time.monotonic()
            kept.append(self.clerk.submit(self._keep, samples, (now - since) / len(samples)))
            kept[-1].add_done_callback(self._note)
            since = now

        in_batches = self.evaluator.in_batches
        try:
            samples = self.evaluator.generate(
                prompts,
                self.mode,
                samples=lambda prompt: range(first_missing[prompt.index], last),
                stop=self.failed.is_set,
                finished=None if in_batches else hand_over,
            )
            if in_batches:
                hand_over(samples)
        except Interrupted:
            assert self.failed.is_set()  # and its reason is raised below
        finally:
            for future in kept:
                future.result()

    def _keep(self, samples: list[Sample], seconds: float) -> None:
        """Grade and write.

        Args:
            seconds: of the engines' time that each response took.
        """
        evaluator = self.evaluator
        scored, grades = graded(samples, evaluator.rewards, evaluator.tokenizer)
        prompts = {sample.prompt.index: sample.prompt for sample in samples}
        numbers = {i: itertools.count(self.file.count(self._key(p))) for i, p in prompts.items()}
        self.file.add(
            GradedAnswer(
                mode=self.mode,
                problem=sample.prompt.index,
                id=self.benchmark.problems[sample.prompt.index].id,
                sample=next(numbers[sample.prompt.index]),
                reward=sample.reward,
                finish=sample.finish_reason,
                tokens=sample.written_tokens,
                seconds=seconds,
                version=max(version for version, _ in sample.versions),
                text=sample.text,
                unscored=f"{failure.cause}: {failure.why}" if failure else "",
                left_out=sample.left_out,
            )
            for sample, failure in zip(scored, grades.failures, strict=True)
        )
        self._tell()

    def _tell(self) -> None:
        """A line on stderr, now and then and at the end."""
        total = len(self.benchmark.problems)
        counts = [self.file.count((self.mode, index)) for index in range(total)]
        done = sum(count >= self.responses for count in counts)
        if time.monotonic() < self.told + TELL_S and done < total:
            return
        self.told = time.monotonic()
        rewards = [answer.reward for answer in self.file.every if answer.mode == self.mode]
        share = sum(rewards) / len(rewards)
        print(
            f"{self.benchmark.name}, {self.mode}: {done} of {total} problems, "
            f"mean reward {share:.3f} so far",
            file=sys.stderr,
            flush=True,
        )


def _stretches(first: int, count: int) -> Iterator[tuple[int, int]]:
    """From 0 to ``first``, then each as long as all before it, until ``count`` is reached."""
    start, end = 0, first
    while start < count:
        yield start, end
        start, end = end, 2 * end


def model_files(folder: Path) -> str:
    """Changes with every file of a model: their names, sizes and times, not their contents."""
    stats = sorted(
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    )
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
