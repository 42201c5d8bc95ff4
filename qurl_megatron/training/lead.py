"""What the leading rank alone has: engines, prompts, answers, and the places where metrics go."""

import json
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qurl_megatron.config import RewardConfig, RunConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.responses import Responses
from qurl_megatron.environments import EnvironmentPool
from qurl_megatron.errors import ConfigError
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.collect import Interrupted, collect, greedy
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.fleet.supervisor import IN_ALL
from qurl_megatron.fleet.turns import Turns
from qurl_megatron.observe.clock import now
from qurl_megatron.observe.metrics import Max, Mean, Metric, Sum, Timer
from qurl_megatron.observe.progress import Progress
from qurl_megatron.observe.samples import (
    HELD_OUT,
    SAMPLES_FILE,
    SHORT,
    TRAIN,
    Example,
    SampleFile,
    as_text,
    example_of,
    say,
    telling,
)
from qurl_megatron.observe.sinks import (
    JsonlSink,
    Sink,
    TensorBoardSink,
    View,
    WandbSink,
    read_metrics,
)
from qurl_megatron.observe.text import how_many, percent
from qurl_megatron.observe.timeline import FALL_BACK, HALTED, Span, Timeline
from qurl_megatron.rewards import RewardPool, items_of, overlong_penalty
from qurl_megatron.rewards.pool import Tally, refuse_none_scored
from qurl_megatron.runtime.filesystem import refusal, refusing
from qurl_megatron.runtime.line_pool import Abandoned
from qurl_megatron.runtime.place import ranks_here
from qurl_megatron.tensors.arch import arch_of
from qurl_megatron.training.ahead import Ahead
from qurl_megatron.training.examples import kept_of
from qurl_megatron.training.finite import Growth
from qurl_megatron.training.guard import Guard, Verdict
from qurl_megatron.training.mismatch import BeyondRounding
from qurl_megatron.training.rank import StopRequest
from qurl_megatron.training.refill import Draft, fill, useful
from qurl_megatron.training.state import RECIPE, Claim, TrainState
from qurl_megatron.training.too_long import no_room_for_the_environment
from qurl_megatron.types import Prompt, Sample
from qurl_megatron.weights.places import description_of
from qurl_megatron.wire.lease import Owner

FORMATS = {"bfloat16": "BF16", "float32": "FP32"}  # of unquantized weights
LOST = ("failed", "died", "gave up")  # events of an engine that leaves the traffic
ENVIRONMENT_CAUSES = ("timeouts", "crashes", "exceptions", "invalid")
VIEWED = 10  # steps between two whose examples TensorBoard and W&B get, beside all evaluations
EVALUATION = 0  # the step number that evaluation seeds are made with; training steps begin with 1


@dataclass(frozen=True)
class Rollout:
    """One step's samples and their metrics, on every rank."""

    samples: Responses | None  # None only on the way: they are delivered by themselves
    metrics: dict[str, Metric]
    tokens: int  # that the engines generated, those of dropped groups included
    seconds: float  # that the engines took


class Lead:
    """Use as a context manager: entering starts engines and workers, leaving ends them."""

    def __init__(
        self,
        config: RunConfig,
        claimed: Claim,
        stop: StopRequest,
        state: TrainState,
        weight_norm: float,
        prompts: PromptStream,
        told: Sequence[str] = (),
    ) -> None:
        """
        Args:
            claimed: the run's directory, given back on leaving.
            state: what the run goes on from; what metrics.jsonl says of later steps is dropped.
            weight_norm: of the weights it goes on with.
            prompts: where the run goes on with them.
            told: what has changed since the state was saved, each an event of the report.
        """
        self.config = config
        self.claimed, self.run_dir, self._changed = claimed, claimed.run_dir, told
        self.stop = stop
        self.start_step = state.step
        self._evaluates = state.unevaluated and config.train.eval_prompts > 0  # that step
        self.unquantized_since = state.unquantized_since
        self._measured_since = {
            f"{name}/measured_since": float(step) for name, step in state.measured_since.items()
        }
        self._growth, self._beyond = Growth(weight_norm), BeyondRounding()
        self._refused: ConfigError | None = None
        own = not (config.rollout.urls or config.rollout.rendezvous)
        self.guard = Guard(config.guard, state.guard, own_engines=own)
        self.prompts, self.tokenizer = prompts, prompts.tokenizer
        self._arch = arch_of(description_of(config.model.path))
        self.cursor = self.prompts.state_dict()  # after the step that was taken last
        self._told: set[str] = set()  # what is said once
        self._kept: dict[int, Sample] = {}  # of the step at hand, by their places in it
        self._drawing, self._grading = threading.Lock(), threading.Lock()

    def __enter__(self) -> "Lead":
        config = self.config
        with ExitStack() as stack:
            stack.enter_context(self.claimed)
            print(self._engines_to_come(), flush=True)
            self.fleet = stack.enter_context(
                Fleet(
                    config.rollout,
                    # SGLang is told the model's shape, and gets its weights from the first version.
                    model_dir=Path(config.model.path)
                    if config.rollout.backend == "embedded"
                    else description_of(config.model.path),
                    scheme=self.scheme,
                    dtype=config.model.dtype,
                    log_dir=self.run_dir / "logs",
                    vocabulary=self._arch.vocab,
                    owner=Owner.of(self.run_dir),
                    trainer_ranks=ranks_here(os.environ),
                )
            )
            self.rewards = stack.enter_context(RewardPool(config.reward))
            self._turns = None
            if config.rollout.environment:
                pool = stack.enter_context(EnvironmentPool(config.rollout))
                self._turns = Turns(pool, self.tokenizer, chat=config.data.chat)
            with refusing(self.run_dir, key="train.run_dir"):
                self._open_logs(stack)
            self.progress = stack.enter_context(Progress(config.train.steps, self.start_step))
            self._ahead = stack.enter_context(
                Ahead(
                    self._draw,
                    self._produce,
                    self.prompts.state_dict,
                    first=self.start_step + 1,
                    last=config.train.steps,
                    max_staleness=config.rollout.max_staleness,
                )
            )
            stack.callback(self.rewards.leave)  # else a slow server would be waited for
            if self._turns:
                stack.callback(self._turns.pool.leave)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.__exit__(*exception)

    def _engines_to_come(self) -> str:
        rollout = self.config.rollout
        if where := rollout.rendezvous or ", ".join(rollout.urls):
            return f"looking for engines at {where}"
        engines = how_many(rollout.engines, f"{rollout.backend} engine")
        return f"starting {engines}; logs are in {self.run_dir / 'logs'}"

    def _open_logs(self, stack: ExitStack) -> None:
        resume = self.start_step + 1 if self.start_step else 0
        path = self.run_dir / "metrics.jsonl"
        metrics = JsonlSink(path, resume_step=resume, evaluates=self._evaluates)
        stack.callback(metrics.close)
        self.examples = SampleFile(
            self.run_dir / SAMPLES_FILE, resume_step=resume, evaluates=self._evaluates
        )
        stack.callback(self.examples.close)
        board = TensorBoardSink(self.run_dir / "tensorboard", resume_step=resume)
        stack.callback(board.close)
        self.views: list[View] = [board]
        if project := self.config.observe.wandb_project:
            recipe = asdict(self.config)
            wandb = WandbSink(project, self.run_dir, recipe, resume_step=resume)
            stack.push(wandb)
            self.views.append(wandb)
        self.sinks: list[Sink] = [metrics, *self.views]
        last = metrics.last_step or 0
        if last < self.start_step:
            first, end = last + 1, self.start_step
            lost = f"step {end} is" if first == end else f"steps {first} to {end} are"
            print(
                f"{path} ends with step {last}: {lost} in the checkpoint, but missing there and in "
                "the report",
                flush=True,
            )
        self.timeline = Timeline(self.run_dir / "timeline.jsonl", resume_step=resume)
        stack.callback(self.timeline.close)
        for told in self._changed:
            self.timeline.event("run", told, self.start_step)
            print(told, flush=True)

    def saved(self) -> None:
        """A checkpoint has been made with the settings of this start, which the run keeps now.

        Kept any earlier, a start from the checkpoint before would not know of the changes.
        """
        if self.claimed.changes:
            self._keep(self.run_dir / RECIPE, self.claimed.keep_recipe)

    @property
    def refused(self) -> ConfigError | None:
        """Why logs and samples are not written any more; told where all ranks listen."""
        if self._refused is None and (error := self.timeline.refused):
            self._refused = refusal(error, self.run_dir / "timeline.jsonl", key="train.run_dir")
        return self._refused

    def _keep(self, path: Path, write: Callable[[], None]) -> None:
        """Write, but what the disk refuses must not end this rank while the others go on."""
        if self.refused:
            return
        try:
            with refusing(path, key="train.run_dir"):
                write()
        except ConfigError as error:
            self._refused = error

    @property
    def scheme(self) -> str:
        """The number format of what is published next."""
        return self.config.quant.scheme if self.unquantized_since is None else "none"

    def timer(self, step: int) -> Timer:
        """Times the phases of one step, for its metrics and the timeline."""

        def record(phase: str, seconds: float) -> None:
            end = now()
            self.timeline.add(Span("trainer", phase, step, end - seconds, end))

        self.progress.begin()
        return Timer(self.progress.phase, record=record)

    def published(self, version: int) -> None:
        """Begin the batches that may be generated from ``version`` while the policy trains."""
        if self.config.rollout.max_staleness:
            self._ahead.admit(version)

    def rollout(self, step: int, timer: Timer) -> Rollout:
        """The graded responses of one step, generated ahead or now.

        Raises:
            Interrupted: a stop was requested while the engines generated; nothing is lost, because
                the same prompts come again after a restart.
            EngineError: no engine is left.
            ConfigError, RewardDown: a response has no score, and the recipe wants the run to end
                then; or none has.
        """
        self.progress.phase("rollout")
        self._ahead.admit(step - 1)
        start = time.perf_counter()
        draft, self.cursor = self._ahead.take(step, lambda: bool(self.stop))
        waited = time.perf_counter() - start
        # What the trainer waited for, grading last; the rest was hidden behind its own work.
        grading = min(draft.grading_s, waited)
        timer.add("rollout", waited - grading)
        timer.add("reward", grading)
        groups = draft.chosen()
        samples = [sample for group in groups for sample in group]
        # Groups that only fill up the batch say nothing of what is learnt from.
        dynamic = self.config.algo.dynamic_sampling
        learnt = [sample for group in groups if not dynamic or useful(group) for sample in group]
        metrics = _sample_metrics(samples, newest=step - 1) | _rewards(learnt) | draft.metrics()
        # Ahead admits no batch too early, and no engine serves less than what it confirmed.
        assert metrics["sync/staleness"].value <= self.config.rollout.max_staleness
        if self.config.rollout.environment:
            metrics |= _conversations(samples)
            self._tell_left_out(samples, step)
        metrics["rollout/quantized"] = Max(float(self._quantized(samples)))
        metrics |= draft.graded.metrics() | self._left_out()
        self._tell_unscored(draft.graded, step)
        if self.config.reward.overlong_fraction > 0:
            limit = self.config.rollout.max_new_tokens
            metrics["reward/overlong_penalty"] = _overlong(samples, limit, self.config.reward)
        if draft.unfilled:
            self.alarm(
                "sampling",
                f"{draft.unfilled} of {len(groups)} groups have answers that are all right or all "
                f"wrong, after {len(draft.groups)} prompts; they fill up the batch and teach "
                "nothing",
                step,
            )
        if self.config.train.save_rollouts:
            path = self.run_dir / "rollouts" / f"step_{step:06d}.jsonl"
            self._keep(path, lambda: save_samples(path, samples))
        responses = Responses.of(samples)
        count = self.config.observe.samples
        self._kept = {index: samples[index] for index in kept_of(responses.summary, count)}
        return Rollout(responses, metrics, draft.generated_tokens, draft.generating_s)

    def _tell_unscored(self, tally: Tally, step: int) -> None:
        """Say why responses have no score, each way once in a run; metrics go on counting."""
        if new := tally.ways.keys() - self._told:
            self._told |= new
            self.alarm(
                "reward",
                f"{tally.failed} of {how_many(tally.responses, 'response')} could not be scored "
                f"and got reward.failed={self.config.reward.failed:g}: {tally.said(new)}",
                step,
            )

    def _tell_left_out(self, samples: Sequence[Sample], step: int) -> None:
        """Say that the environment's words did not fit, once between two starts."""
        count = sum(sample.left_out for sample in samples)
        if not count or "left_out" in self._told:
            return
        self._told.add("left_out")
        longest = min(self.prompts.longest, self.config.data.max_prompt_tokens)
        ended = f"{count} of {how_many(len(samples), 'conversation')} ended early"
        why = no_room_for_the_environment(self.config.rollout, self._arch, longest)
        self.alarm("rollout", f"{ended}: {why}", step)

    def _left_out(self) -> dict[str, Metric]:
        """Prompts of the whole data that are too long."""
        found: dict[str, Metric] = {"data/too_long": Max(len(self.prompts.too_long))}
        if self.config.train.eval_prompts:
            found["data/held_out_too_long"] = Max(self.prompts.held_out_too_long)
        return found

    def recover(self) -> None:
        """No engine is left: wait until one can take the weights in again.

        Raises:
            EngineError: none came back, or a stop was requested meanwhile.
        """
        self.progress.phase("waiting for an engine")
        end = time.monotonic() + IN_ALL * self.config.rollout.start_limit_s
        while True:
            try:
                self.fleet.await_recruits(timeout_s=1.0)
                return
            except EngineError:
                if self.stop or not self.fleet.engines() or time.monotonic() > end:
                    raise

    def retry(self) -> None:
        """The engines have the weights again: generate what they left unanswered."""
        self._ahead.retry()

    def rest(self) -> None:
        """The engines have nothing to do until the next version: lend the trainer their memory."""
        if self.config.rollout.colocate:
            with suppress(EngineError):  # those that refuse are out; the next version heals them
                self.fleet.release()

    def judge(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """The guard's word on a step, also told in the terminal and in the timeline."""
        verdict = self.guard.judge(step, metrics, quantized=self.scheme != "none")
        if verdict.why:
            self.alarm("guard", f"{self._consequence(verdict)}: {verdict.why}", step)
        return verdict

    def fall_back(self, version: int) -> None:
        """Start the engines anew for unquantized weights, which come with ``version``.

        Batches in flight are finished first: they are as good as any of their age.

        Raises:
            Interrupted: a stop was requested; the next start begins with such engines.
            ConfigError: engines cannot be started any more.
        """
        self.unquantized_since = version
        self.progress.phase("finishing rollouts")
        self._ahead.settle(lambda: bool(self.stop))
        self.progress.phase("restarting engines")
        self.fleet.switch(self.scheme)
        end = time.monotonic() + IN_ALL * self.config.rollout.start_limit_s
        while self.fleet.starting() and time.monotonic() < end:
            if self.stop:
                raise Interrupted("stopped while engines were starting")
            time.sleep(0.05)

    def alarm(self, lane: str, text: str, step: int) -> None:
        """Say something loudly, and keep it in the timeline."""
        self.progress.alarm(f"{lane}, step {step}: {text}")
        self.timeline.event(lane, text, step)

    def _consequence(self, verdict: Verdict) -> str:
        if verdict.halt:
            return HALTED
        if verdict.fall_back:
            return FALL_BACK + f"{FORMATS[self.config.model.dtype]} rollouts"
        return "warning"

    def _quantized(self, samples: Sequence[Sample]) -> bool:
        """True where a token of a sample came from quantized weights."""
        if self.config.quant.scheme == "none" or self.unquantized_since is None:
            return self.config.quant.scheme != "none"
        return any(
            version < self.unquantized_since for sample in samples for version, _ in sample.versions
        )

    def _draw(self) -> tuple[dict[str, Any], Draft]:
        algo, count = self.config.algo, self.config.data.prompts_per_step
        with self._drawing:
            cursor = self.prompts.state_dict()
            prompts = self.prompts.next_batch(count)
        return cursor, Draft(prompts, count, algo.max_refills if algo.dynamic_sampling else None)

    def _produce(self, step: int, draft: Draft, stop: Callable[[], bool]) -> Draft:
        """Answers to one step's prompts, graded; runs on a thread of its own."""
        config = self.config

        def answer(prompts: Sequence[Prompt]) -> list[Sample]:
            start = now()
            samples = collect(
                self.fleet,
                prompts,
                config.rollout,
                seed=config.train.seed,
                step=step,
                stop=stop,
                turns=self._turns,
            )
            generated = now()
            samples, tally = self._graded(samples)
            draft.graded.add(tally)
            refuse_none_scored(draft.graded, config.reward.setting)
            end = now()
            self.timeline.add(Span("engines", "rollout", step, start, generated))
            self.timeline.add(Span("engines", "reward", step, generated, end))
            draft.generating_s += generated - start
            draft.grading_s += end - generated
            return samples

        def draw(count: int) -> list[Prompt]:
            with self._drawing:
                return self.prompts.next_batch(count)

        return fill(draft, answer, draw)

    def evaluate(self, step: int) -> float:
        """Mean score on held-out prompts, by the engines as they are: at rollout precision.

        Raises:
            Interrupted: a stop was requested meanwhile.
            EngineError, ConfigError, RewardDown: as ``rollout``.
        """
        train = self.config.train

        def stop() -> bool:
            return bool(self.stop)

        self.progress.phase("evaluate")
        prompts = self.prompts.held_out
        if train.eval_samples == 1:
            limit = self.config.rollout.max_new_tokens
            samples = greedy(self.fleet, prompts, limit, turns=self._turns, stop=stop)
        else:
            sampling = replace(self.config.rollout, samples_per_prompt=train.eval_samples)
            # One seed for all evaluations: they differ by the policy, not by luck.
            samples = collect(
                self.fleet,
                prompts,
                sampling,
                seed=train.seed,
                step=EVALUATION,
                turns=self._turns,
                stop=stop,
            )
        try:
            samples, tally = self._graded(samples, stop)
        except Abandoned:
            raise Interrupted("stopped while an evaluation was scored") from None
        refuse_none_scored(tally, self.config.reward.setting)
        self._tell_unscored(tally, step)
        self._tell_left_out(samples, step)
        score = sum(sample.reward for sample in samples) / len(samples)
        name = "eval/accuracy" if self.config.reward.right_or_wrong else "eval/reward"
        measured = {name: score}
        measured |= {
            f"eval/mix/{part}": total / len(samples) for part, total in tally.parts.items()
        }
        if tally.failed:
            measured["eval/failed_fraction"] = tally.failed / len(samples)
        self._log(step, measured | self._since("eval"))
        self._show_held_out(step, samples)
        return score

    def _show_held_out(self, step: int, samples: Sequence[Sample]) -> None:
        """Print the first prompts' responses; keep these, and those that are telling."""
        observe, each = self.config.observe, self.config.train.eval_samples
        shown = range(0, min(observe.show * each, len(samples)), each)
        for index in shown:
            say(as_text(example_of(samples[index], step, HELD_OUT), longest=SHORT))
        if observe.samples:
            rewards = [sample.reward for sample in samples]
            prompts = [sample.prompt.index for sample in samples]
            kept = sorted({*shown, *telling(rewards, prompts, observe.samples)})
            self._keep_all(step, [example_of(samples[i], step, HELD_OUT) for i in kept])

    def finish(self, state: TrainState) -> None:
        """Write the report and say how the run ended.

        Raises:
            ConfigError: the disk refused the report, or metrics before it.
        """
        # matplotlib takes a second to import
        from qurl_megatron.observe.report import History, unscored, write_report

        self.progress.close()
        print(state.summary(right_or_wrong=self.config.reward.right_or_wrong))
        if self.stop and not state.finished(self.config.train.steps):
            print(_stopped(self.stop, state.step, self.config.train.steps))
        if state.step or state.accuracy is not None:  # else there is nothing to draw yet
            if share := unscored(History(read_metrics(self.run_dir / "metrics.jsonl"))):
                print(
                    f"{percent(share)} of the responses could not be scored and got "
                    f"reward.failed={self.config.reward.failed:g}"
                )
            with refusing(self.run_dir / "report.html", key="train.run_dir"):
                path = write_report(self.run_dir)
            print(f"report: {path}", flush=True)
        if self.refused:
            raise ConfigError(f"{self.refused}; step {state.step} is saved all the same")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics, and what happened to the engines meanwhile."""
        metrics = {**metrics, **self.happened(step), **self._since("reward")}
        self._log(step, metrics)
        self.progress.step(step, metrics)
        if grown := self._growth.noticed(metrics["optimizer/weight_norm"]):
            lr = self.config.optimizer.lr
            self.alarm("weights", f"{grown}; optimizer.lr={lr:g} is far too large", step)
        if beyond := self._beyond.noticed(metrics):
            self.alarm("rollout", beyond, step)

    def keep_examples(self, step: int, advantages: Mapping[int, float]) -> None:
        """Keep responses of a step that was trained on.

        Args:
            advantages: of them, by their places among the step's responses.
        """
        examples = [
            example_of(sample, step, TRAIN, advantages.get(index))
            for index, sample in self._kept.items()
        ]
        self._keep_all(
            step, examples, view=step % VIEWED == 0 or step in (1, self.config.train.steps)
        )

    def _keep_all(self, step: int, examples: Sequence[Example], *, view: bool = True) -> None:
        if not examples:
            return

        def write() -> None:
            self.examples.write(examples)
            for one in self.views if view else ():
                one.show(step, examples)

        self._keep(self.run_dir / SAMPLES_FILE, write)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        def write() -> None:
            for sink in self.sinks:
                sink.write(step, metrics)

        self._keep(self.run_dir / "metrics.jsonl", write)

    def _since(self, group: str) -> dict[str, float]:
        """The step after which the group's metrics are measured as now; nothing where all are."""
        key = f"{group}/measured_since"
        return {key: self._measured_since[key]} if key in self._measured_since else {}

    def happened(self, step: int) -> dict[str, float]:
        """Log what happened to the engines since the last call; returns metrics of it."""
        events, metrics = self.fleet.drain()
        for event in events:
            what = " ".join((event["engine"], event["event"], event["message"].splitlines()[0]))
            self.timeline.event("fleet", what.strip(), step, event["time"])
            if event["event"] in LOST:
                self.progress.alarm(f"fleet, step {step}: {what.strip()}")
        return metrics

    def _graded(
        self, samples: list[Sample], stop: Callable[[], bool] = lambda: False
    ) -> tuple[list[Sample], Tally]:
        said = [self.tokenizer.said(sample) for sample in samples]
        with self._grading:  # the workers take one batch at a time
            grades = self.rewards.grade(items_of(samples, [policy for _, policy in said]), stop)
        graded = [
            replace(sample, text=text, reward=reward)
            for sample, (text, _), reward in zip(samples, said, grades.scores, strict=True)
        ]
        return graded, grades.tally


def _stopped(stop: StopRequest, step: int, steps: int) -> str:
    """What a person who stopped a run wants to know."""
    by = "Ctrl-C" if stop.signal == signal.SIGINT else signal.Signals(stop.signal).name
    if not step:
        return f"stopped by {by} before its first step was done: nothing is saved"
    return f"stopped by {by}: step {step} of {steps} is saved; the same command goes on from there"


def save_samples(path: Path, samples: Sequence[Sample]) -> None:
    """One JSON object per sample; the file appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    with aside.open("w", encoding="utf-8") as file:
        # A table's metadata may hold what JSON has no word for, such as dates.
        file.writelines(json.dumps(_record(sample), default=str) + "\n" for sample in samples)
    aside.rename(path)


def _record(sample: Sample) -> dict[str, Any]:
    """A sample as JSON says it, with one version per token, null where the policy wrote none."""
    record = {
        "prompt": asdict(sample.prompt),
        "response_ids": sample.response_ids.tolist(),
        "behaviour_log_probs": sample.behaviour_log_probs.tolist(),
        "finish_reason": sample.finish_reason,
        "versions": sample.token_versions,
        "text": sample.text,
        "reward": sample.reward,
    }
    if not sample.written.all():
        record["loss_mask"] = sample.written.astype(int).tolist()
    if sample.failure:
        record["failure"] = asdict(sample.failure)
    return record


def _sample_metrics(samples: list[Sample], *, newest: int) -> dict[str, Metric]:
    """Their metrics; ``newest`` is the version they should come from."""
    tokens = sum(sample.written_tokens for sample in samples)
    oldest = min((v for sample in samples for v, _ in sample.versions), default=newest)
    return {
        "sync/version": Max(newest),
        "sync/staleness": Max(newest - oldest),
        "response/length": Mean(tokens, len(samples)),
        "response/truncated": Mean(sum(sample.truncated for sample in samples), len(samples)),
    }


def _conversations(samples: Sequence[Sample]) -> dict[str, Metric]:
    """How long they were, what the environment said, and what became of it."""
    count = len(samples)
    failures = Counter(sample.failure.cause for sample in samples if sample.failure)
    said = sum(len(sample.response_ids) - sample.written_tokens for sample in samples)
    return {
        "environment/turns": Mean(sum(len(sample.turns) for sample in samples), count),
        "environment/tokens": Mean(said, count),
        "environment/left_out": Mean(sum(sample.left_out for sample in samples), count),
        "environment/failed_fraction": Mean(failures.total(), count),
        **{f"environment/{cause}": Sum(failures[cause]) for cause in ENVIRONMENT_CAUSES},
    }


def _rewards(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Mean and spread of what the verifier gave; nothing where there are no samples."""
    if not samples:
        return {}
    rewards = [sample.reward for sample in samples]
    mean = sum(rewards) / len(rewards)
    return {
        "reward/mean": Mean(sum(rewards), len(rewards)),
        "reward/std": Max(math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))),
    }


def _overlong(samples: Sequence[Sample], limit: int, reward: RewardConfig) -> Mean:
    """The mean that the soft punishment of long responses adds to the reward."""
    penalties = [
        overlong_penalty(
            sample.written_tokens, limit, reward.overlong_fraction, reward.overlong_penalty
        )
        for sample in samples
    ]
    return Mean(sum(penalties), len(penalties))
