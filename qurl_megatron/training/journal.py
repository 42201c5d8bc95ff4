"""The run's records: metrics, timeline, examples, alarms, its display, its report.

It lives on the leading rank. A failed write must not end that rank in the middle of a collective
operation: the journal then writes no more, and ``refused`` keeps the reason for all ranks.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from qurl_megatron.kit.clock import now
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusal, refusing
from qurl_megatron.observe.metrics import History, Timer
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
from qurl_megatron.observe.sinks import JsonlSink, TensorBoardSink, WandbSink, read_metrics
from qurl_megatron.observe.text import percent
from qurl_megatron.observe.timeline import Span, Timeline
from qurl_megatron.rewards.pool import Tally
from qurl_megatron.training.mismatch import Alarms
from qurl_megatron.training.state import RECIPE, Claim, TrainState, score_sentence, stop_sentence
from qurl_megatron.types import Sample

Proximal = Mapping[int, np.ndarray]
"""Log-probs of the written tokens, float32, by the response's place in the step."""

TABLE_EVERY = 10  # steps between tables of W&B, each an upload
LOST = ("failed", "died", "gave up")  # events of an engine that leaves the traffic


class Journal:
    """Use as a context manager: leaving it closes the files."""

    def __init__(
        self, claimed: Claim, state: TrainState, weight_norm: float, remarks: Sequence[str] = ()
    ) -> None:
        """
        Args:
            claimed: the run's directory and recipe.
            state: the state that the run goes on from; records of later steps are dropped.
            weight_norm: of the weights it goes on with.
            remarks: changes since the state was saved, each an event of the report.

        Raises:
            ConfigError: the run's directory cannot be written.
        """
        self.claimed, self.config, self.run_dir = claimed, claimed.config, claimed.run_dir
        self._weight_norm, self._mismatch = weight_norm, Alarms()
        self._refused: ConfigError | None = None
        resume = state.step + 1 if state.step else 0
        evaluates = state.unevaluated and self.config.train.eval_prompts > 0
        with ExitStack() as stack, refusing(self.run_dir, key="train.run_dir"):
            path = self.run_dir / "metrics.jsonl"
            metrics = JsonlSink(path, resume_step=resume, evaluates=evaluates)
            stack.callback(metrics.close)
            self.examples = SampleFile(
                self.run_dir / SAMPLES_FILE, resume_step=resume, evaluates=evaluates
            )
            stack.callback(self.examples.close)
            board = TensorBoardSink(self.run_dir / "tensorboard", resume_step=resume)
            stack.callback(board.close)
            self.sinks: list[JsonlSink | TensorBoardSink | WandbSink] = [metrics, board]
            self.wandb: WandbSink | None = None
            if project := self.config.observe.wandb_project:
                self.wandb = WandbSink(
                    project, self.run_dir, asdict(self.config), resume_step=resume
                )
                stack.push(self.wandb.__exit__)
                self.sinks.append(self.wandb)
            last = metrics.last_step or 0
            if last < state.step:
                print(
                    f"{path} ends with step {last}, and the checkpoint is of step {state.step}: "
                    "the steps between are missing there and in the report",
                    flush=True,
                )
            self.timeline = Timeline(self.run_dir / "timeline.jsonl", resume_step=resume)
            stack.callback(self.timeline.close)
            for change in remarks:
                self.timeline.event("run", change, state.step)
                print(change, flush=True)
            self.progress = stack.enter_context(Progress(self.config.train.steps, state.step))
            self._stack = stack.pop_all()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    @property
    def refused(self) -> ConfigError | None:
        """Why nothing is written any more; None while the journal still writes."""
        if self._refused is None and (error := self.timeline.refused):
            self._refused = refusal(error, self.run_dir / "timeline.jsonl", key="train.run_dir")
        return self._refused

    def timer(self, step: int) -> Timer:
        """Return a timer of one step's phases, for its metrics and the timeline."""

        def record(phase: str, seconds: float) -> None:
            end = now()
            self.timeline.add(Span("trainer", phase, step, end - seconds, end))

        self.progress.begin()
        return Timer(self.progress.phase, record=record)

    def alarm(self, lane: str, text: str, step: int) -> None:
        """Say something loudly, and keep it in the timeline."""
        self.progress.alarm(f"{lane}, step {step}: {text}")
        self.timeline.event(lane, text, step)

    def record_events(self, step: int, events: Sequence[Mapping[str, Any]]) -> None:
        """Record the engines' events (``Fleet.drain``), and raise an alarm for lost engines."""
        for event in events:
            description = " ".join(
                (event["engine"], event["event"], event["message"].splitlines()[0])
            )
            self.timeline.event("fleet", description.strip(), step, event["time"])
            if event["event"] in LOST:
                self.progress.alarm(f"fleet, step {step}: {description.strip()}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics, and the alarms that they cause."""
        self._log(step, metrics)
        self.progress.step(step, metrics)
        norm = metrics["optimizer/weight_norm"]
        if norm > 2 * self._weight_norm:  # no useful learning rate brings this about
            self.alarm(
                "weights",
                f"the norm of the weights has grown from {self._weight_norm:.4g} to {norm:.4g}; "
                f"optimizer.lr={self.config.optimizer.lr:g} is far too large",
                step,
            )
            self._weight_norm = norm
        if mismatch := self._mismatch.noticed(metrics):
            self.alarm("rollout", mismatch, step)

    def keep_examples(
        self, step: int, kept: Mapping[int, Sample], advantages: Mapping[int, float]
    ) -> None:
        """Keep responses of a step that was trained on.

        Args:
            kept: by their places among the step's responses.
            advantages: of those that were scored.
        """
        examples = [
            example_of(sample, step, TRAIN, advantages.get(index)) for index, sample in kept.items()
        ]
        in_table = step % TABLE_EVERY == 0 or step in (1, self.config.train.steps)
        self._keep_examples(step, examples, in_table=in_table)

    def keep_rollout(self, step: int, samples: Sequence[Sample], proximal: Proximal) -> None:
        """Save all responses of a step, with their log-probs under the policy before the update."""
        path = self.run_dir / "rollouts" / f"step_{step:06d}.jsonl"

        def write() -> None:
            path.parent.mkdir(exist_ok=True)  # not a run's folder that was renamed meanwhile
            records = (_record(sample, proximal[i]) for i, sample in enumerate(samples))
            # A table's metadata may hold types that JSON lacks, such as dates.
            write_whole(path, "".join(json.dumps(r, default=str) + "\n" for r in records))

        self._keep(path, write)

    def evaluated(self, state: TrainState, samples: Sequence[Sample], tally: Tally) -> float:
        """Write and print the outcome of an evaluation of ``state``; return its score."""
        right_or_wrong = self.config.reward.right_or_wrong
        score = sum(sample.reward for sample in samples) / len(samples)
        measured = {"eval/accuracy" if right_or_wrong else "eval/reward": score}
        if tally.failed:
            measured["eval/failed_fraction"] = tally.failed / len(samples)
        self._log(state.step, measured)
        print(score_sentence(state, score, right_or_wrong=right_or_wrong), flush=True)
        self._show_held_out(state.step, samples)
        return score

    def _show_held_out(self, step: int, samples: Sequence[Sample]) -> None:
        """Print the first prompts' responses; keep these, and the telling ones."""
        observe, each = self.config.observe, self.config.train.eval_samples
        shown = range(0, min(observe.show * each, len(samples)), each)
        for index in shown:
            say(as_text(example_of(samples[index], step, HELD_OUT), longest=SHORT))
        if observe.samples:
            rewards = [sample.reward for sample in samples]
            prompts = [sample.prompt.index for sample in samples]
            kept = sorted({*shown, *telling(rewards, prompts, observe.samples)})
            self._keep_examples(step, [example_of(samples[i], step, HELD_OUT) for i in kept])

    def saved(self) -> None:
        """Keep the settings of this start, now that a checkpoint has been made with them.

        Had they been kept earlier, a restart from the previous checkpoint would miss the changes.
        """
        if self.claimed.changes:
            self._keep(self.run_dir / RECIPE, self.claimed.keep_recipe)

    def finish(self, state: TrainState, stopped_by: str = "") -> None:
        """Write the report and say how the run ended.

        Args:
            stopped_by: as ``StopRequest.by``.

        Raises:
            ConfigError: the disk refused the report, or metrics before it.
        """
        # matplotlib takes a second to import
        from qurl_megatron.observe.report import what_acted, write_report

        self.progress.close()
        print(state.summary(right_or_wrong=self.config.reward.right_or_wrong))
        if stopped_by and not state.finished(self.config.train.steps):
            print(stop_sentence(stopped_by, state.step, self.config.train.steps))
        if state.step or state.accuracy is not None:  # else there is nothing to draw yet
            history = History(read_metrics(self.run_dir / "metrics.jsonl"))
            if acted := what_acted(history, asdict(self.config.algo)):
                print(acted)
            if share := history.mean("reward/failed_fraction"):
                print(
                    f"{percent(share)} of the responses could not be scored and got "
                    f"reward.failed={self.config.reward.failed:g}"
                )
            with refusing(self.run_dir / "report.html", key="train.run_dir"):
                path = write_report(self.run_dir)
            print(f"report: {path}", flush=True)
        if self.refused:
            raise ConfigError(f"{self.refused}; step {state.step} is saved all the same")

    def _keep(self, path: Path, write: Callable[[], None]) -> None:
        if self.refused:
            return
        try:
            with refusing(path, key="train.run_dir"):
                write()
        except ConfigError as error:
            self._refused = error

    def _keep_examples(
        self, step: int, examples: Sequence[Example], *, in_table: bool = True
    ) -> None:
        if not examples:
            return

        def write() -> None:
            self.examples.append(*examples)
            if in_table and self.wandb is not None:
                self.wandb.show(step, examples)

        self._keep(self.run_dir / SAMPLES_FILE, write)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        def write() -> None:
            for sink in self.sinks:
                sink.write(step, metrics)

        self._keep(self.run_dir / "metrics.jsonl", write)


def _record(sample: Sample, proximal: np.ndarray) -> dict[str, Any]:
    spread = np.full(len(sample.written), None)  # for tokens that the policy did not write
    spread[sample.written] = proximal.tolist()
    record = {
        "prompt": asdict(sample.prompt),
        "response_ids": sample.response_ids.tolist(),
        "behaviour_log_probs": sample.behaviour_log_probs.tolist(),
        "proximal_log_probs": spread.tolist(),
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
