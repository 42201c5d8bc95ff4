"""Engines under the load of a reinforcement-learning step, by engine, scheme and tensor size.

All engines have the same weights, in their scheme, and get the same load in turns: the same
lengths in the same order, on prompts that nobody has sent before. A step waits for the makespan.
"""

import argparse
import itertools
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qurl_megatron.bench.record import Case, Figure, in_turns, progress
from qurl_megatron.bench.rollout_engines import (
    StartedEngine,
    Version,
    config_of,
    model_folder,
    started,
)
from qurl_megatron.bench.rollout_load import LoadOutcome, drive, groups, long_tailed
from qurl_megatron.config import RolloutConfig
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import read_arch

TIMEOUT_S = 3600.0  # of a response
SETTINGS = ("model", "samples", "prompt", "mean", "max", "publish", "cache_gb")
"""Options that are keys of a case, beside the number of prompts."""


@dataclass(frozen=True)
class Subject:
    """One row of the table: an engine of a kind with weights of a scheme."""

    engine: str
    scheme: str  # as --schemes names it
    tensor: int = 1

    @property
    def name(self) -> str:
        tensor = f" tp{self.tensor}" if self.tensor > 1 else ""
        return f"{self.engine} {self.scheme}{tensor}"

    @property
    def quant_scheme(self) -> str:
        return {"bf16": "none"}.get(self.scheme, self.scheme)

    @property
    def dtype(self) -> str:
        """Format of unquantized tensors; an embedded engine on a CPU is fastest with FP32 there."""
        on_cpu = self.engine == "embedded" and not torch.cuda.is_available()
        if on_cpu and self.scheme != "bf16":
            return "float32"
        return "bfloat16"


def run(options: argparse.Namespace) -> list[Case]:
    """Measure all engines: in turns, or one after another where SGLang's fill the GPUs.

    Raises:
        ConfigError: an engine does not start, or does not take a version; or the options do not
            fit together.
    """
    products = itertools.product(options.engine, options.schemes, options.tensor)
    subjects = [Subject(*each) for each in products]
    fleets = [subjects]
    if torch.cuda.is_available() and "sglang" in options.engine:
        fleets = [[subject] for subject in subjects]
    cases = []
    try:
        for together in fleets:
            cases += _measured(together, options)
    except EngineError as error:
        raise ConfigError(f"bench rollout: {error}") from None
    return cases


def _measured(subjects: Sequence[Subject], options: argparse.Namespace) -> list[Case]:
    configs = {subject: engine_config(subject, options) for subject in subjects}
    vocab = read_arch(config_of(options.model)).vocab
    lengths = {
        prompts: long_tailed(prompts * options.samples, mean=options.mean, longest=options.max)
        for prompts in options.prompts
    }
    logs = options.out / "logs" if options.out else Path(tempfile.mkdtemp(prefix="qurl-bench-"))
    with tempfile.TemporaryDirectory(prefix="qurl-bench-") as work, ExitStack() as stack:
        empty = all(config.kind.starts_empty for config in configs.values())
        folder = model_folder(options.model, Path(work), empty=empty)
        versions: dict[tuple[str, str], Version] = {}
        engines: dict[str, StartedEngine] = {}
        for subject, config in configs.items():
            kind = (subject.quant_scheme, subject.dtype)
            if kind not in versions:
                versions[kind] = Version(folder, *kind, Path(work) / "-".join(kind))
            own_logs = logs / subject.name.replace(" ", "-")
            progress(f"starting {subject.name}; it logs to {own_logs}")
            engine = started(config, folder, versions[kind], own_logs)
            engines[subject.name] = stack.enter_context(engine)
        loads = {
            f"{name}, {len(each)} responses": _loads(engine, each, vocab, options)
            for name, engine in engines.items()
            for each in lengths.values()
        }
        measured = in_turns(loads, repeats=options.repeats, warm_up=1, seen=_show)
    if not options.out:
        shutil.rmtree(logs)
    settings = {name: getattr(options, name) for name in SETTINGS}
    cases = []
    for subject, prompts in itertools.product(configs, options.prompts):
        load = settings | {"prompts": prompts, "tokens": sum(lengths[prompts])}
        name = f"{subject.name}, {len(lengths[prompts])} responses"
        case = case_of(subject, load, measured[name], engines[subject.name].identity)
        cases.append(replace(case, name=name) if len(lengths) > 1 else case)
    return cases


def engine_config(subject: Subject, options: argparse.Namespace) -> RolloutConfig:
    """Return an engine's settings; raise ``ConfigError`` if there are no such engines."""
    if subject.engine == "embedded" and subject.tensor > 1:
        raise ConfigError(
            f"--tensor {subject.tensor} is not for --engine embedded, which is one process; "
            "measure it in a command of its own"
        )
    return RolloutConfig(
        backend=subject.engine,  # type: ignore[arg-type]
        engine_tensor=subject.tensor,
        engine_memory_gb=options.cache_gb,
        timeout_s=TIMEOUT_S,
        sglang_python=options.sglang_python,
    )


def _loads(
    engine: StartedEngine, lengths: Sequence[int], vocab: int, options: argparse.Namespace
) -> Callable[[], LoadOutcome]:
    """Return a function that puts the load on an engine, each time with other prompts."""
    repeats = itertools.count()

    def load() -> LoadOutcome:
        shape = dict(samples=options.samples, prompt=options.prompt, vocab=vocab)
        asks = groups(lengths, seed=next(repeats), **shape)
        return drive(engine.client, asks, publish=engine.publish, publications=options.publish)

    return load


def _show(name: str, outcome: LoadOutcome) -> None:
    rate = outcome.tokens / outcome.makespan
    progress(f"{name}: {outcome.tokens} tokens in {outcome.makespan:.2f} s, {rate:.0f}/s")


def case_of(
    subject: Subject,
    settings: Mapping[str, str | int | float | bool | None],
    outcomes: Sequence[LoadOutcome],
    identity: dict[str, object],
) -> Case:
    """Return figures and reasons of all repeats, with the load's settings as keys."""
    reasons: dict[str, str] = {}
    for outcome in outcomes:
        reasons |= outcome.reasons()
    keys = {"engine": subject.engine, "scheme": subject.scheme, "dtype": subject.dtype}
    # A repeat without a single whole answer leaves nothing to time.
    timed = all(outcome.tokens for outcome in outcomes)
    return Case(
        name=subject.name,
        keys={**keys, "tensor": subject.tensor, **settings},
        figures=figures_of(outcomes) if timed else [],
        reasons=list(reasons),
        notes={"identity": identity, **reasons},
    )


def figures_of(outcomes: Sequence[LoadOutcome]) -> list[Figure]:
    """Return a figure per quantity; the tail describes the load, and is not compared."""
    rates, makespans, tails, pauses = [], [], [], []
    for outcome in outcomes:
        rates.append(outcome.tokens / outcome.makespan)
        makespans.append(outcome.makespan)
        tails.append(100 * outcome.tail)
        pauses.append(max(outcome.paused_s, default=0.0))
    figures = [
        Figure(name="tokens/s", unit="1/s", better="higher", repeats=rates),
        Figure(name="makespan", unit="s", better="lower", repeats=makespans),
        Figure(name="tail", unit="%", better=None, repeats=tails),
    ]
    if any(pauses):
        figures.append(Figure(name="paused to publish", unit="s", better="lower", repeats=pauses))
    return figures


@dataclass(frozen=True)
class Speedup:
    """Tokens/s of an 8-bit case over those of BF16 in the same round."""

    case: Case
    median: float
    low: float
    high: float

    @property
    def scheme(self) -> str:
        return str(self.case.keys["scheme"]).upper()


def speedups(cases: Sequence[Case]) -> list[Speedup]:
    """Return one for each 8-bit case beside BF16's of the same engine and load, if both count.

    The interval is the median's, 95 % by the sign test; of five rounds or fewer, which are too few
    for one, the least and the most.
    """
    from scipy.stats import quantile_test  # it takes half a second to import

    compared = []
    for case, bf16 in itertools.permutations(cases, 2):
        load = {key for key in case.keys if case.keys[key] == bf16.keys[key]}
        alike = load >= case.keys.keys() - {"scheme", "dtype"}
        if not alike or bf16.keys["scheme"] != "bf16" or case.reasons or bf16.reasons:
            continue
        rates = zip(case.figures[0].repeats, bf16.figures[0].repeats, strict=True)
        rounds = [coded / base for coded, base in rates]
        low, high = quantile_test(rounds, p=0.5).confidence_interval(0.95)
        if math.isnan(low):
            low, high = min(rounds), max(rounds)
        compared.append(Speedup(case, statistics.median(rounds), float(low), float(high)))
    return compared


def ratios(cases: Sequence[Case]) -> list[str]:
    """Return a line for each of the ``speedups``."""
    lines = []
    for s in speedups(cases):
        span = f"{s.median:.2f} ({s.low:.2f} to {s.high:.2f})"
        lines.append(f"{s.case.name}: {s.scheme} / BF16 = {span}")
    return lines
