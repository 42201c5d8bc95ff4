"""What the leading rank alone has: engines, prompts, answers, and the places where metrics go."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qurl_megatron.config import RunConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.observe.metrics import Max, Mean, Metric, Timer
from qurl_megatron.observe.progress import Progress
from qurl_megatron.observe.sinks import JsonlSink, TensorBoardSink
from qurl_megatron.rewards.pool import RewardPool
from qurl_megatron.rollout.collect import collect, greedy
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.training.rank import StopRequest
from qurl_megatron.training.state import TrainState
from qurl_megatron.types import Sample
from qurl_megatron.weights.checkpoint import description_of

EVALUATION = 0  # the step number that evaluation seeds are made with; training steps begin with 1


@dataclass(frozen=True)
class Rollout:
    """One step's samples, prompt-major, and what is to be seen of them; goes to every rank."""

    samples: list[Sample]
    metrics: dict[str, Metric]


class Lead:
    """Use as a context manager: entering starts engines and workers, leaving ends them."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        stop: StopRequest,
        start_step: int,
        cursor: dict[str, Any] | None,
    ) -> None:
        """
        Args:
            start_step: steps done before; what metrics.jsonl says of later ones is dropped.
            cursor: where the prompts go on, from a checkpoint.
        """
        self.config = config
        self.run_dir = run_dir
        self.stop = stop
        self.start_step = start_step
        self.tokenizer = Tokenizer(description_of(config.model.path))
        self.prompts = PromptStream(config.data, self.tokenizer, seed=config.train.seed)
        if cursor:
            self.prompts.load_state_dict(cursor)

    def __enter__(self) -> "Lead":
        config = self.config
        with ExitStack() as stack:
            self.fleet = stack.enter_context(
                Fleet(
                    config.rollout,
                    model_dir=Path(config.model.path),
                    scheme=config.quant.scheme,
                    dtype=config.model.dtype,
                    log_dir=self.run_dir / "logs",
                )
            )
            self.rewards = stack.enter_context(RewardPool(config.reward))
            resume = self.start_step + 1 if self.start_step else 0
            self.sinks = [
                JsonlSink(self.run_dir / "metrics.jsonl", resume_step=resume),
                TensorBoardSink(self.run_dir / "tensorboard", resume_step=resume),
            ]
            for sink in self.sinks:
                stack.callback(sink.close)
            self.progress = stack.enter_context(Progress(config.train.steps, self.start_step))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def rollout(self, step: int, timer: Timer) -> Rollout:
        """Generate and score the responses of one step.

        Raises:
            Interrupted: a stop was requested while the engines generated; nothing is lost, because
                the same prompts and seeds come again after a restart.
        """
        config = self.config
        prompts = self.prompts.next_batch(config.data.prompts_per_step)
        with timer.phase("rollout"):
            samples = collect(
                self.fleet,
                prompts,
                config.rollout,
                seed=config.train.seed,
                step=step,
                stop=lambda: bool(self.stop),
            )
        with timer.phase("reward"):
            samples = self._graded(samples)
        return Rollout(samples, _sample_metrics(samples, newest=step - 1))

    def evaluate(self, step: int) -> float:
        """Accuracy on held-out prompts, by the engines as they are: at rollout precision."""
        train = self.config.train
        self.progress.phase("evaluate")
        prompts = self.prompts.held_out(train.eval_prompts)
        if train.eval_samples == 1:
            samples = greedy(self.fleet, prompts, self.config.rollout.max_new_tokens)
        else:
            sampling = replace(self.config.rollout, samples_per_prompt=train.eval_samples)
            # One seed for all evaluations: they differ by the policy, not by luck.
            samples = collect(self.fleet, prompts, sampling, seed=train.seed, step=EVALUATION)
        accuracy = sum(s.reward for s in self._graded(samples)) / len(samples)
        for sink in self.sinks:
            sink.write(step, {"eval/accuracy": accuracy})
        return accuracy

    def finish(self, state: TrainState) -> None:
        """Write the report and say how the run ended."""
        from qurl_megatron.observe.report import write_report  # matplotlib takes a second to import

        self.progress.close()
        print(state.summary())
        if state.step or state.accuracy is not None:  # else there is nothing to draw yet
            print(f"report: {write_report(self.run_dir)}", flush=True)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self.sinks:
            sink.write(step, metrics)
        self.progress.step(step, metrics)

    def _graded(self, samples: list[Sample]) -> list[Sample]:
        texts = [self.tokenizer.decode(sample.response_ids) for sample in samples]
        pairs = [(text, sample.prompt.answer) for text, sample in zip(texts, samples, strict=True)]
        return [
            replace(sample, text=text, reward=reward)
            for sample, text, reward in zip(samples, texts, self.rewards.score(pairs), strict=True)
        ]


def _sample_metrics(samples: list[Sample], *, newest: int) -> dict[str, Metric]:
    """What is to be seen of the samples; ``newest`` is the version they should come from."""
    rewards = [sample.reward for sample in samples]
    mean = sum(rewards) / len(rewards)
    tokens = sum(len(sample.response_ids) for sample in samples)
    return {
        "reward/mean": Mean(sum(rewards), len(rewards)),
        "reward/std": Max(math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))),
        "sync/version": Max(newest),
        "sync/staleness": Max(newest - min(min(s.versions, default=newest) for s in samples)),
        "response/length": Mean(tokens, len(samples)),
        "response/truncated": Mean(sum(sample.truncated for sample in samples), len(samples)),
    }
