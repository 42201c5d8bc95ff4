"""A run as one HTML page that works offline: key figures, pictures, numbers, recipe."""

import json
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import printable
from qurl_megatron.observe import drawing
from qurl_megatron.observe.catalogue import METRICS, known
from qurl_megatron.observe.metrics import History
from qurl_megatron.observe.samples import HELD_OUT, TRAIN, Example, facts, read_samples
from qurl_megatron.observe.sinks import METRICS_FILE, Record, read_metrics
from qurl_megatron.observe.text import duration, how_many, number, percent, reading
from qurl_megatron.observe.timeline import HALTED, TIMELINE_FILE, TRACE_FILE, Span, Timeline
from qurl_megatron.schemes import title

CONFIG_FILE = "config.toml"
REPORT_FILE = "report.html"
QUOTED = 600  # characters of a text that are not folded away
MEASURED = {"eval/accuracy": "Held-out accuracy", "eval/reward": "Held-out reward"}
"""Metrics of evaluations: an accuracy if each score is 1 or 0, else a mean."""


def write_report(run_dir: Path | str) -> Path:
    """Write ``run_dir/report.html`` from metrics.jsonl and, where present, config.toml.

    The timeline becomes ``trace.json`` besides, for ui.perfetto.dev and chrome://tracing.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / METRICS_FILE)
    history = History(records)
    recipe_file = run_dir / CONFIG_FILE
    recipe = recipe_file.read_text(encoding="utf-8") if recipe_file.is_file() else ""
    tables = _tables(recipe)
    spans = Timeline.read(run_dir / TIMELINE_FILE)
    if spans:
        write_trace(spans, run_dir / TRACE_FILE)
    text = _rendered(
        name=run_dir.resolve().name,
        facts=_facts(records, history, tables),
        figures=list(_key_figures(history, tables)),
        acted=what_acted(history, tables.get("algo", {})),
        sections=drawing.drawn_sections(history),
        quotes=list(_quotes(read_samples(run_dir))),
        quoted=QUOTED,
        events=list(_events(spans)),
        banners=list(_banners(spans, history.last_step)),
        non_finite=history.non_finite,
        groups=_groups(history),
        last_step=history.last_step,
        recipe=recipe,
    )
    path = run_dir / REPORT_FILE
    path.write_text(text, encoding="utf-8")
    return path


def _rendered(**values: Any) -> str:
    """Return report.html with these values; a name that it lacks is an error."""
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = (folder / "report.css").read_text(encoding="utf-8")
    return printable(environment.get_template("report.html").render(css=css, **values))


def _tables(recipe: str) -> dict:
    try:
        return tomllib.loads(recipe)
    except tomllib.TOMLDecodeError:  # shown verbatim all the same; only the summary lacks it
        return {}


def _facts(records: Sequence[Record], history: History, recipe: dict) -> list[str]:
    """Return the parts of the line under the title: model, steps, time."""
    facts = []
    if model := recipe.get("model", {}).get("path"):
        facts.append(Path(model).name)
    if planned := recipe.get("train", {}).get("steps"):
        facts.append(f"{history.last_step} of {planned} steps")
    else:
        facts.append(how_many(history.last_step, "step"))
    if share := history.mean("reward/failed_fraction"):
        facts.append(f"{percent(share)} of the responses unscored")
    facts.append(time.strftime("%-d %B %Y, %H:%M", time.localtime(records[-1].time)))
    return facts


def _key_figures(history: History, recipe: dict) -> Iterator[tuple[str, str, str, str]]:
    """Yield (label, value, note, the value it started from or "") for the headline row."""
    evaluations = [name for name in MEASURED if name in history]
    if evaluations:
        newest = max(evaluations, key=lambda name: history[name][0][-1])
        steps, values = history[newest]
        yield MEASURED[newest], *_ends(newest, steps, values)
    if "reward/mean" in history:
        steps, values = history["reward/mean"]
        yield "Reward", *_ends("reward/mean", steps, drawing.smooth(values))
    if speed := history.mean("throughput/rollout_tokens_per_s"):
        yield "Rollout", number(speed), "tokens per second, mean of the steps", ""
    if "time/step" in history:
        _, seconds = history["time/step"]
        yield "Training time", duration(seconds.sum()), f"{duration(seconds.mean())} a step", ""
    if "quant" in recipe and "algo" in recipe:
        quant = recipe["quant"]
        scheme = title(quant["scheme"])
        objective = recipe["algo"]["objective"].upper()
        yield "Scheme", f"{scheme} {objective}", f"UAQ s = {quant['uaq_scale']:g}", ""


def _ends(metric: str, steps: np.ndarray, values: np.ndarray) -> tuple[str, str, str]:
    """Return (last value, the steps it covers, first value)."""
    first, last = (reading(metric, value) for value in values[[0, -1]])
    if len(steps) == 1:
        return last, f"step {steps[0]}", ""
    return last, f"step {steps[0]} to step {steps[-1]}", first


def _events(spans: Sequence[Span]) -> Iterator[tuple[int, str, str]]:
    """Yield (step, time of day, event)."""
    alarms = ("guard", "sampling", "weights", "rollout", "reward")
    lanes = {"fleet": "", "run": "", **{lane: f"{lane}: " for lane in alarms}}
    for span in spans:
        if span.lane in lanes:
            clock = time.strftime("%H:%M:%S", time.localtime(span.start))
            yield span.step, clock, lanes[span.lane] + span.name


def _banners(spans: Sequence[Span], last_step: int) -> Iterator[tuple[str, str]]:
    """Yield (halt of the run by the guard, reason) for the head of the page."""
    for span in spans:
        action, _, reason = span.name.partition(": ")
        if span.lane == "guard" and action == HALTED:
            again = ", and started again" if last_step > span.step else ""
            yield f"Halted at step {span.step}{again}", reason


def _quotes(examples: Sequence[Example]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield (title, facts, texts by name) of the lowest and highest reward of the first, the middle
    and the last step that has any, of evaluations and of training."""
    for of in (HELD_OUT, TRAIN):
        steps = sorted({example.step for example in examples if example.of == of})
        for step in sorted({*steps[:1], *steps[len(steps) // 2 :][:1], *steps[-1:]}):
            of_step = [example for example in examples if (example.step, example.of) == (step, of)]
            ranked = sorted(of_step, key=lambda example: example.reward)
            ends = {"lowest": ranked[0], "highest": ranked[-1]}
            for end, example in list(ends.items())[: len(ranked)]:
                texts = {
                    "prompt": printable(example.prompt),
                    "response": printable(example.response) or "(empty)",
                    "answer": printable(example.answer),
                }
                yield f"Step {step}, {of}, {end} reward", facts(example), texts


def _groups(history: History) -> dict[str, list[tuple[str, str, int, list[str]]]]:
    """Return table rows by group, in the catalogue's order: a metric's name, its description, the
    step it was last measured at; its last, smallest and largest value."""
    order = list(dict.fromkeys(name.split("/")[0] for name in METRICS))
    groups: dict[str, list[tuple[str, str, int, list[str]]]] = {group: [] for group in order}
    for name in sorted(history):
        steps, values = history[name]
        cells = [reading(name, value) for value in (values[-1], values.min(), values.max())]
        row = (name, known(name).says, int(steps[-1]), cells)
        groups.setdefault(name.split("/")[0], []).append(row)
    return {group: rows for group, rows in groups.items() if rows}


ACTS = {
    "tis": (
        "rollout/truncated_weight_fraction",
        "TIS acted: {share} of the importance weights cut to {cap:g} (largest {ratio})",
        "TIS never acted: no importance weight above C = {cap:g} (largest {ratio})",
    ),
    "icepop": (
        "correction/banded_fraction",
        "IcePop acted: {share} of the tokens left out (largest {ratio})",
        "IcePop never acted: no importance weight outside its band (largest {ratio})",
    ),
    "acr": (
        "acr/active_fraction",
        "ACR acted: a wider clip range for {share} of the tokens, {rescued} rescued from TIS's, "
        "{gradient} of the gradient (C = {cap:g}, largest importance weight {ratio})",
        "ACR never acted: no token of a positive advantage had an importance weight above "
        "C = {cap:g} (largest {ratio})",
    ),
}
"""Per objective that corrects: the share of tokens it acts on, and a sentence for each outcome."""


def what_acted(history: History, algo: Mapping[str, Any]) -> str:
    """Say in one sentence whether ``algo.objective`` corrected any token of the run.

    At 8 bits an importance weight above the cap C is rare: most runs under ACR train as they would
    without it.

    Returns:
        The sentence without its full stop; "" where nothing compared the policies, for an objective
        that corrects nothing, and for a loss of one's own.
    """
    acts = ACTS.get(algo.get("objective", ""))
    if acts is None or algo.get("function") or "rollout/rho_max" not in history:
        return ""
    metric, acted, idle = acts
    share = history.mean(metric)
    ratio = history["rollout/rho_max"][1].max()
    if algo["objective"] == "acr" and ratio <= algo["cap"]:
        idle = "ACR never acted: no importance weight above C = {cap:g} (largest {ratio})"
    if not share:
        acted = idle
    return acted.format(
        share=percent(share),
        cap=algo["cap"],
        ratio=number(ratio),
        rescued=percent(history.mean("acr/rescued_fraction")),
        gradient=percent(history.mean("acr/gradient_share")),
    )


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Write spans in the Trace Event format: a process for each lane, times in microseconds.

    Spans are asynchronous events, since batches in flight overlap within the engines' lane.
    """
    lanes = list(dict.fromkeys(span.lane for span in spans))
    events: list[dict[str, Any]] = []
    for lane_id, lane in enumerate(lanes):
        events.append({"ph": "M", "name": "process_name", "pid": lane_id, "args": {"name": lane}})
    for span_id, span in enumerate(spans):
        event = {
            "name": span.name,
            "cat": span.lane,
            "pid": lanes.index(span.lane),
            "tid": 0,
            "args": {"step": span.step},
        }
        for phase, at in (("b", span.start), ("e", span.end)):
            events.append({**event, "ph": phase, "id": span_id, "ts": round(1e6 * at)})
    write_whole(path, json.dumps({"traceEvents": events}) + "\n")
