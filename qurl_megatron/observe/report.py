"""A run as one HTML page that works offline: key figures, pictures, numbers, recipe."""

import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.observe import drawing, panels
from qurl_megatron.observe.catalogue import GROUPS, known
from qurl_megatron.observe.history import History, unscored, what_acted
from qurl_megatron.observe.panels import Picture
from qurl_megatron.observe.samples import HELD_OUT, TRAIN, Example, facts, read_samples, visible
from qurl_megatron.observe.sinks import METRICS_FILE, Record, read_metrics
from qurl_megatron.observe.text import duration, how_many, number, percent, reading
from qurl_megatron.observe.timeline import (
    HALTED,
    TIMELINE_FILE,
    TRACE_FILE,
    Span,
    read_timeline,
    write_trace,
)

CONFIG_FILE = "config.toml"
REPORT_FILE = "report.html"


MEASURED = {"eval/accuracy": "Held-out accuracy", "eval/reward": "Held-out reward"}
"""What evaluations measure: an accuracy where each score is 1 or 0, else a mean."""


@dataclass(frozen=True)
class KeyFigure:
    """A key figure in the headline row."""

    label: str
    value: str
    note: str = ""
    before: str = ""
    """The value it started from, shown smaller with an arrow."""


@dataclass(frozen=True)
class Drawing:
    """One picture, drawn, with what the page writes around it."""

    picture: Picture
    url: str
    legend: list[tuple[str, str, str, bool]]  # label, colour, value at its end, drawn as rings
    smoothed: bool  # a thin line shows the values as measured


@dataclass(frozen=True)
class MetricRow:
    """One metric in the table."""

    name: str
    says: str  # what it is
    step: int
    last: str
    low: str
    high: str


@dataclass(frozen=True)
class Quote:
    """What was asked and said, with the part of a long text that is folded away."""

    title: str
    facts: str
    texts: list[tuple[str, str, str]]  # name, beginning, rest


QUOTED = 600  # characters of a text that are not folded away


def write_report(run_dir: Path | str) -> Path:
    """Write ``run_dir/report.html`` from metrics.jsonl and, where present, config.toml.

    The timeline becomes ``trace.json`` besides, for ui.perfetto.dev and chrome://tracing.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / METRICS_FILE)
    history = History(records)
    recipe_file = run_dir / CONFIG_FILE
    recipe = recipe_file.read_text(encoding="utf-8") if recipe_file.is_file() else ""
    spans = read_timeline(run_dir / TIMELINE_FILE)
    if spans:
        write_trace(spans, run_dir / TRACE_FILE)
    text = _rendered(
        name=run_dir.resolve().name,
        facts=_facts(records, history, _tables(recipe)),
        figures=list(_key_figures(history, _tables(recipe))),
        acted=what_acted(history, _tables(recipe).get("algo", {})),
        sections={
            title: _drawings(chosen, history) for title, chosen in panels.pictures(history).items()
        },
        quotes=_quotes(read_samples(run_dir)),
        events=_events(spans),
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


def save_overview_png(run_dir: Path | str, path: Path | str) -> Path:
    """Save the pictures that sum up a run as one image, e.g. for a README."""
    history = History(read_metrics(Path(run_dir) / METRICS_FILE))
    all_pictures = [picture for section in panels.pictures(history).values() for picture in section]
    chosen = [
        picture for picture in all_pictures if picture.key in panels.OVERVIEW
    ] or all_pictures[:2]
    if not chosen:
        raise ConfigError(f"{run_dir} has none of the metrics that the overview draws")
    path = Path(path)
    drawing.render_figure(chosen, history).savefig(path, dpi=130)
    return path


def _tables(recipe: str) -> dict:
    try:
        return tomllib.loads(recipe)
    except tomllib.TOMLDecodeError:  # shown verbatim all the same; only the summary lacks it
        return {}


def _facts(records: Sequence[Record], history: History, recipe: dict) -> list[str]:
    """The line under the title: model, steps, when."""
    facts = []
    if model := recipe.get("model", {}).get("path"):
        facts.append(Path(model).name)
    planned = recipe.get("train", {}).get("steps")
    done = history.last_step
    plural = "step" if done == 1 and not planned else "steps"
    facts.append(f"{done} of {planned} {plural}" if planned else f"{done} {plural}")
    for name, kind in (("data/too_long", "prompt"), ("data/held_out_too_long", "held-out prompt")):
        if left_out := int(history.last(name) or 0):
            facts.append(f"{how_many(left_out, kind)} too long, left out")
    if share := unscored(history):
        since = history.since("reward/failed_fraction")
        facts.append(f"{percent(share)} of the responses unscored{since}")
    facts.append(time.strftime("%-d %B %Y, %H:%M", time.localtime(records[-1].time)))
    return facts


def _key_figures(history: History, recipe: dict) -> Iterator[KeyFigure]:
    newest = max(
        (n for n in MEASURED if n in history), key=lambda n: history.series(n)[0][-1], default=""
    )
    if newest:
        steps, values = history.newest(newest)
        shown = [reading(newest, value) for value in values[[0, -1]]]
        if len(steps) > 1:
            note = f"step {steps[0]} to step {steps[-1]}"
            yield KeyFigure(MEASURED[newest], shown[1], note, before=shown[0])
        else:
            yield KeyFigure(MEASURED[newest], shown[0], f"step {steps[0]}")
    if "reward/mean" in history:
        steps, values = history.newest("reward/mean")
        ends = [reading("reward/mean", value) for value in drawing.smooth(values)[[0, -1]]]
        if len(values) > 1:
            smoothed = ", smoothed" if len(values) > drawing.MEASURED else ""
            note = f"step {steps[0]} to step {steps[-1]}{smoothed}"
            yield KeyFigure("Reward", ends[1], note, before=ends[0])
        else:
            yield KeyFigure("Reward", ends[1], f"step {steps[0]}")
    if tokens := _rollout_speed(history):
        yield KeyFigure("Rollout", number(tokens), "tokens per second")
    if "time/step" in history:
        _, seconds = history.series("time/step")
        note = f"{duration(seconds.mean())} a step"
        yield KeyFigure("Training time", duration(seconds.sum()), note)
    if "quant" in recipe or "algo" in recipe:
        quant, algo = recipe.get("quant", {}), recipe.get("algo", {})
        scheme = str(quant.get("scheme", "int8"))
        scheme = "BF16" if scheme == "none" else scheme.upper()
        objective = str(algo.get("objective", "acr")).upper()
        note = f"UAQ s = {quant['uaq_scale']:g}" if "uaq_scale" in quant else ""
        yield KeyFigure("Scheme", f"{scheme} {objective}", note)
    if "sync/version" in history:
        note = ""
        if "sync/staleness" in history:
            note = f"staleness at most {history.series('sync/staleness')[1].max():g}"
        # The metric is the number of a version, and the first one is 0.
        versions = history.series("sync/version")[1].max() + 1
        yield KeyFigure("Policy versions", f"{versions:.0f}", note)


def _rollout_speed(history: History) -> float | None:
    """Tokens over seconds of all rollouts: the plain mean would weigh short ones too much."""
    name = "throughput/rollout_tokens_per_s"
    if name not in history:
        return None
    steps, speeds = history.series(name)
    seconds = np.ones(len(steps))
    if "time/rollout" in history:
        rollout_seconds = dict(zip(*history.series("time/rollout"), strict=True))
        if all(step in rollout_seconds for step in steps):
            seconds = np.array([rollout_seconds[step] for step in steps])
    return float(np.average(speeds, weights=seconds)) if seconds.sum() > 0 else None


def _events(spans: Sequence[Span]) -> list[tuple[int, str, str]]:
    """(step, time of day, what happened)."""
    alarms = ("guard", "sampling", "weights", "rollout", "reward")
    lanes = {"fleet": "", "run": "", **{lane: f"{lane}: " for lane in alarms}}
    return [
        (
            span.step,
            time.strftime("%H:%M:%S", time.localtime(span.start)),
            lanes[span.lane] + span.name,
        )
        for span in spans
        if span.lane in lanes
    ]


def _banners(spans: Sequence[Span], last_step: int) -> Iterator[tuple[str, str]]:
    """(that the guard halted the run, why), for the head of the page."""
    for span in spans:
        action, _, reason = span.name.partition(": ")
        if span.lane == "guard" and action == HALTED:
            again = ", and started again" if last_step > span.step else ""
            yield f"Halted at step {span.step}{again}", reason


def _drawings(chosen: Sequence[Picture], history: History) -> list[Drawing]:
    drawings = []
    for picture in chosen:
        legend = []
        smoothed = False
        for line in picture.present(history):
            _, values = drawing.drawn(picture, line, history)
            legend.append((line.label, line.color, reading(line.metric, values[-1]), line.rings))
            smoothed |= len(values) > drawing.MEASURED and not line.rings
        url = drawing.picture_url(picture, history)
        drawings.append(Drawing(picture, url, legend, smoothed))
    return drawings


def _quotes(examples: Sequence[Example]) -> list[Quote]:
    """The lowest and the highest reward of the first, the middle and the last step that has any, of
    evaluations and of training."""
    quotes = []
    for of in (HELD_OUT, TRAIN):
        some = [example for example in examples if example.of == of]
        steps = sorted({example.step for example in some})
        for step in sorted({steps[i] for i in (0, len(steps) // 2, -1)} if steps else ()):
            ranked = sorted((e for e in some if e.step == step), key=lambda e: e.reward)
            quotes.append(_quote("lowest reward", ranked[0]))
            if len(ranked) > 1:
                quotes.append(_quote("highest reward", ranked[-1]))
    return quotes


def _quote(what: str, example: Example) -> Quote:
    texts = (
        ("prompt", example.prompt),
        ("response", example.response or "(empty)"),
        ("answer", example.answer),
    )
    return Quote(
        f"Step {example.step}, {example.of}, {what}",
        facts(example),
        [(name, visible(text[:QUOTED]), visible(text[QUOTED:])) for name, text in texts if text],
    )


def _groups(history: History) -> dict[str, list[MetricRow]]:
    """Table rows by heading, in the order of ``GROUPS``."""
    order = {prefix: index for index, prefix in enumerate(GROUPS)}
    names = sorted(history, key=lambda name: (order.get(name.split("/")[0], len(order)), name))
    groups: dict[str, list[MetricRow]] = {}
    for name in names:
        steps, values = history.newest(name)
        prefix = name.split("/")[0]
        heading = GROUPS[prefix].heading if prefix in GROUPS else prefix
        entry = known(name)
        groups.setdefault(heading, []).append(
            MetricRow(
                name=name,
                says=entry.says if entry else "",
                step=int(steps[-1]),
                last=reading(name, values[-1]),
                low=reading(name, values.min()),
                high=reading(name, values.max()),
            )
        )
    return groups
