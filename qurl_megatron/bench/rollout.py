"""Engines under the load of a reinforcement-learning step, by engine, scheme and tensor size.

All engines have the same weights, in their scheme, and get the same load in turns: the same
lengths in the same order, on prompts that nobody has sent before. The makespan and its tail come
first, as a step waits for them; then rates and latencies, each beside the least that the bytes of a
decode step allow.
"""

import argparse
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch

from qurl_megatron.bench import load_figures, machine_limits
from qurl_megatron.bench.drive import DrivenLoad, Publishing
from qurl_megatron.bench.options import quant_scheme
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import Repeats, interleaved, progress
from qurl_megatron.bench.rollout_engines import (
    Target,
    Version,
    engine_config,
    model_folder,
    reached,
    started,
)
from qurl_megatron.bench.rollout_load import (
    PROMPTS,
    Ask,
    LoadOutcome,
    groups,
    long_tailed,
    recorded,
    serial_digits,
)
from qurl_megatron.engines.kinds import ENGINE_KINDS
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.plan.rollout_time import DecodeRank, decode_rank, schedule
from qurl_megatron.tensors.arch import Arch, read_arch

ITEMSIZE = {"bfloat16": 2, "float32": 4}
SETTINGS = ("seed", "mean", "sigma", "max", "threads", "cache_gb", "protocol")
"""Options that are keys of a case as they are."""
LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class LoadPlan:
    """One load, the same for all engines and repeats but for the ids of its prompts."""

    model: str
    lengths: Sequence[int]
    samples: int
    prompt: int
    at_once: int  # 0: all
    vocab: int
    seed: int
    first: int  # serial number of the first prompt
    publish: str | None = None  # "half", "2.5s", "1000tokens" or never
    settings: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """Of ``SETTINGS``, and where lengths are from: only records of equal ones are compared."""

    @property
    def prompts(self) -> int:
        return len(self.lengths) // self.samples

    @property
    def slots(self) -> int:
        """Responses that run at once, if the engine holds them."""
        return min(self.at_once or len(self.lengths), len(self.lengths))

    def asks(self, repeat: int) -> list[Ask]:
        return groups(
            self.lengths,
            samples=self.samples,
            prompt=self.prompt,
            vocab=self.vocab,
            first=self.first + repeat * self.prompts,
            seed=self.seed,
        )

    def publishing(self, target: Target) -> Publishing | None:
        if self.publish is None:
            return None
        if target.publish is None:
            raise ConfigError(
                "--publish-every needs an engine that this command starts; leave it out, or give "
                "--engine embedded or sglang"
            )
        if self.publish == "half":
            return Publishing(target.publish, tokens=sum(self.lengths) // 2, once=True)
        if self.publish.endswith("tokens"):
            return Publishing(target.publish, tokens=int(self.publish.removesuffix("tokens")))
        return Publishing(target.publish, seconds=float(self.publish.removesuffix("s")))


@dataclass(frozen=True)
class Subject:
    """One row of the table: an engine of a kind with weights of a scheme."""

    engine: str  # "embedded", "sglang" or a URL
    scheme: str  # as --schemes names it
    tensor: int = 1

    @property
    def name(self) -> str:
        tensor = f" tp{self.tensor}" if self.tensor > 1 else ""
        return f"{self.engine} {self.scheme}{tensor}"

    @property
    def is_url(self) -> bool:
        return "://" in self.engine

    @property
    def dtype(self) -> str:
        """Format of unquantized tensors; an embedded engine on a CPU is fastest with FP32 there."""
        on_cpu = self.engine == "embedded" and not torch.cuda.is_available()
        beside_codes = on_cpu and quant_scheme(self.scheme) != "none"
        return "float32" if self.scheme == "fp32" or beside_codes else "bfloat16"

    @property
    def elsewhere(self) -> bool:
        """Whether it is on another machine."""
        return self.is_url and urlsplit(self.engine).hostname not in LOCAL


def run(options: argparse.Namespace) -> list[Case]:
    """Measure all engines, in turns.

    Raises:
        ConfigError: an engine does not start or answer, or the options do not fit together.
    """
    arch = read_arch(config_of(options.model))
    plan, subjects = plan_of(options, arch), subjects_of(options)
    logs = (
        options.out / "logs" if options.out else Path(tempfile.mkdtemp(prefix="qurl-bench-logs-"))
    )
    with tempfile.TemporaryDirectory(prefix="qurl-bench-") as work, ExitStack() as stack:
        targets = _targets(options, subjects, Path(work), logs, stack)
        before = {name: _identity(name, target) for name, target in targets.items()}
        candidates = {name: _candidate(plan, target) for name, target in targets.items()}
        measured = interleaved(candidates, repeats=options.repeats, seen=_show)
        changed = {name: changed_since(before[name], target) for name, target in targets.items()}
    if any(changed.values()):
        progress(f"the engines' logs are in {logs}")
    elif not options.out:  # an error on the way here names one of them
        shutil.rmtree(logs)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cases, devices = [], set()
    for subject in subjects:
        name = subject.name
        device = device_of(before[name])
        devices.add(device)
        least = least_of(plan, subject, arch, device, gpu)
        cases.append(case_of(plan, subject, measured[name], least, changed[name], before[name]))
    # The record has the limits of the engines' device.
    options.device = "cuda" if gpu and "cuda" in devices else "cpu"
    return cases


def _identity(name: str, target: Target) -> dict[str, object]:
    try:
        return target.identity()
    except EngineError as error:
        raise ConfigError(f"{name} does not answer: {error}") from None


def device_of(identity: Mapping[str, object]) -> str:
    """ "cuda" or "cpu", by what an engine says of itself; "" where it does not say.

    Without a GPU that this side sees, an engine that does not say is taken to run on the CPU.
    """
    device = str(identity.get("device") or "").partition(":")[0]
    return device or ("" if torch.cuda.is_available() else "cpu")


def changed_since(before: Mapping[str, object], target: Target) -> str:
    """Return the facts of an engine that have changed, or that it no longer answers; or ""."""
    try:
        after = target.identity()
    except EngineError as error:  # the others' results are no worse for it
        return f"it does not answer any more: {error}"
    return "; ".join(
        f"{name} was {before.get(name)}, is {after.get(name)}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    )


def plan_of(options: argparse.Namespace, arch: Arch) -> LoadPlan:
    count = options.prompts * options.samples
    if options.lengths:
        lengths = recorded(options.lengths, count, seed=options.seed)
    else:
        lengths = long_tailed(
            count, mean=options.mean, sigma=options.sigma, longest=options.max, seed=options.seed
        )
    return LoadPlan(
        options.model,
        lengths,
        options.samples,
        options.prompt,
        options.clients,
        arch.vocab,
        options.seed,
        # An engine that was there before may have cached the prompts of an earlier command.
        random.randrange(PROMPTS // 2),
        options.publish_every,
        {name: getattr(options, name) for name in SETTINGS}
        | {"lengths": str(options.lengths) if options.lengths else None},
    )


def subjects_of(options: argparse.Namespace) -> list[Subject]:
    """Every engine in every scheme; tensor sizes are SGLang's."""
    subjects = []
    for engine in options.engine:
        if engine not in ENGINE_KINDS and "://" not in engine:
            raise ConfigError(f"--engine {engine} is neither {', '.join(ENGINE_KINDS)} nor a URL")
        if "://" in engine and len(options.schemes) > 1:
            raise ConfigError(
                f"--engine {engine} serves one scheme; say which one with --schemes, for its limit"
            )
        split = engine not in ENGINE_KINDS or ENGINE_KINDS[engine].takes_gpus
        tensors = options.tensor if split else [_alone(options)]
        subjects += [Subject(engine, s, t) for s in options.schemes for t in tensors]
    return subjects


def _alone(options: argparse.Namespace) -> int:
    """Ranks of an embedded engine: one, which must be asked for; other sizes are for others."""
    more = [size for size in options.tensor if size != 1]
    if more and (1 not in options.tensor or set(options.engine) == {"embedded"}):
        raise ConfigError(
            f"--tensor {more[0]} is not for --engine embedded, which is one process; leave it out, "
            f"or give --engine embedded,sglang --tensor 1 {more[0]}, where SGLang takes both"
        )
    return 1


def _targets(
    options: argparse.Namespace,
    subjects: Sequence[Subject],
    work: Path,
    logs: Path,
    stack: ExitStack,
) -> dict[str, Target]:
    """Every engine, up and with its weights; ``stack`` ends them."""
    targets: dict[str, Target] = {}
    folder = cache(partial(model_folder, options.model, work))  # where an engine is started
    versions: dict[tuple[str, str], Version] = {}
    for subject in subjects:
        if subject.is_url:
            targets[subject.name] = reached(
                subject.engine, options.protocol, timeout_s=options.timeout
            )
            continue
        kind = quant_scheme(subject.scheme), subject.dtype
        if kind not in versions:
            versions[kind] = Version(folder(), *kind, work / f"versions-{'-'.join(kind)}")
        progress(f"starting {subject.name}")
        config = engine_config(
            subject.engine,
            tensor=subject.tensor,
            threads=options.threads,
            timeout_s=options.timeout,
            cache_gb=options.cache_gb,
            sglang_python=options.sglang_python,
        )
        own_logs = logs / subject.name.replace(" ", "-")
        try:
            engine = started(config, folder(), versions[kind], own_logs)
            targets[subject.name] = stack.enter_context(engine)
        except EngineError as error:
            raise ConfigError(f"{subject.name} did not start: {error}") from None
    return targets


def _candidate(plan: LoadPlan, target: Target) -> Callable[[], LoadOutcome]:
    repeats = itertools.count()

    def load() -> LoadOutcome:
        driven = DrivenLoad(
            target.client,
            target.protocol,
            target.model,
            look=target.look,
            publishing=plan.publishing(target),
        )
        return driven.drive(plan.asks(next(repeats)), plan.at_once)

    return load


def _show(name: str, outcome: LoadOutcome) -> None:
    answers = outcome.answers
    seconds, tokens = load_figures.makespan(answers), load_figures.tokens(answers)
    failed = sum(bool(answer.failure) for answer in answers)
    failures = f", {failed} failed" if failed else ""
    progress(f"{name}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f}/s{failures}")
    if outcome.unseen:
        progress(f"{name}: not looked at: {outcome.unseen}")


def least_of(
    plan: LoadPlan, subject: Subject, arch: Arch, device: str, gpu: str | None
) -> float | None:
    """Return the least makespan of one engine, in seconds; None where this side cannot know it.

    Args:
        device: that the engine says it uses, "cuda" or "cpu"; "" where it does not say.
        gpu: its driver's name of the GPU that this side sees; None: it sees none.
    """
    on_gpu = device == "cuda"
    if subject.elsewhere or not device or (on_gpu and not gpu):
        return None
    read_gb_s = machine_limits.limits(device)["read_gb_s"]  # of the memory, or of one GPU's
    rank = decode_rank(arch, quant_scheme(subject.scheme), subject.tensor, ITEMSIZE[subject.dtype])
    # Ranks on CPUs share the memory's rate; GPUs have each their own.
    rate = 1e9 * read_gb_s / (1 if on_gpu else subject.tensor)
    return least_seconds(rank, plan.lengths, plan.prompt, plan.slots, rate)


def least_seconds(
    rank: DecodeRank, lengths: Sequence[int], prompt: int, slots: int, bytes_per_s: float
) -> float:
    """Return the seconds that a load's decode steps take at the memory's rate.

    A step reads all weights once, and the keys and values so far of every running response.
    Prompts, and all else, count as nothing.

    Args:
        lengths: tokens of each response, in the order in which they begin.
        prompt: tokens of each prompt.
        slots: responses at once.
        bytes_per_s: that one rank of the engine reads.
    """
    read = 0.0
    for steps, running, tokens in schedule(lengths, slots):
        read += steps * (rank.weights + running * (prompt + tokens) * rank.token)
    return read / bytes_per_s


def case_of(
    plan: LoadPlan,
    subject: Subject,
    repeats: Repeats[LoadOutcome],
    least: float | None,
    changed: str,
    identity: dict[str, object],
) -> Case:
    """Figures and reasons of all repeats.

    Args:
        least: seconds of the makespan, the limit.
        changed: facts of the engine that differ from those before the first repeat.
        identity: its facts then.
    """
    outcomes = repeats.results
    reasons: dict[str, str] = {}
    for outcome in outcomes:
        reasons |= load_figures.reasons(outcome, serial_digits(plan.vocab) - 1)
    if changed:
        reasons["engine changed"] = changed
    notes: dict[str, object] = {"identity": identity, **reasons}
    if unseen := [outcome.unseen for outcome in outcomes if outcome.unseen]:
        notes["not looked at"] = unseen[0]
    # A repeat without a single whole answer leaves nothing to time.
    timed = all(load_figures.tokens(outcome.answers) for outcome in outcomes)
    return Case(
        name=subject.name,
        keys={
            "model": plan.model,
            "engine": subject.engine,
            "scheme": subject.scheme,
            "dtype": subject.dtype,
            "tensor": subject.tensor,
            "prompts": plan.prompts,
            "samples": plan.samples,
            "prompt tokens": plan.prompt,
            "tokens": sum(plan.lengths),
            "longest": max(plan.lengths),
            "clients": f"concurrency:{plan.at_once}" if plan.at_once else "closed",
            "publish": plan.publish,
            **plan.settings,
        },
        figures=figures_of(outcomes, least) if timed else [],
        # Of this machine: an engine on another one has another speed.
        yardsticks=[] if subject.elsewhere else repeats.yardsticks,
        reasons=[*reasons, *(reason for reason in repeats.reasons if reason not in reasons)],
        notes=notes,
    )


Kind = tuple[str, Literal["higher", "lower"] | None]
LATENCY: Kind = ("ms", "lower")
KINDS: Mapping[str, Kind] = {
    "tokens/s": ("1/s", "higher"),
    "makespan": ("s", "lower"),
    "tail": ("%", None),
    "cache in use, mean": ("%", None),
    "cache in use, most": ("%", None),
    "preemptions": ("times", None),
    "paused to publish": ("s", "lower"),
    "first valid token": ("s", "lower"),
    "client's CPU": ("%", None),
}
"""Unit of each figure but latencies, and which way is better: a faster engine keeps this side
busier, its cache fuller, and its tail as long as the lengths are."""


def figures_of(outcomes: Sequence[LoadOutcome], least: float | None) -> list[Figure]:
    """A figure per quantity. One that only some repeats have is reported, not compared: repeats are
    compared beside the yardstick of their own round."""
    measured = [_measured(outcome) for outcome in outcomes]
    tokens = load_figures.tokens(outcomes[0].answers)
    limits = {"tokens/s": tokens / least, "makespan": least} if least else {}
    figures = []
    for name in dict.fromkeys(name for quantities in measured for name in quantities):
        repeats = [quantities[name] for quantities in measured if name in quantities]
        unit, better = KINDS.get(name, LATENCY)
        figures.append(
            Figure(
                name=name,
                unit=unit,
                better=better if len(repeats) == len(outcomes) else None,
                repeats=repeats,
                limit=limits.get(name),
                limit_of="DRAM bytes" if name in limits else "",
            )
        )
    return figures


def _measured(outcome: LoadOutcome) -> dict[str, float]:
    """Every quantity of one repeat, in its unit."""
    answers = outcome.answers
    seconds = load_figures.makespan(answers)
    quantities = {
        "tokens/s": load_figures.tokens(answers) / seconds,
        "makespan": seconds,
        "tail": 100 * load_figures.tail_share(answers),
    }
    latencies = {
        "first token": load_figures.first_token(answers),
        "between tokens": load_figures.gaps(answers),
        "per token": load_figures.per_token(answers),
    }
    for name, values in latencies.items():
        for percent, value in load_figures.percentiles(values).items():
            quantities[f"{name}, p{percent}"] = 1e3 * value
    if (used := load_figures.occupancy(outcome)) is not None:
        quantities["cache in use, mean"], quantities["cache in use, most"] = (100 * u for u in used)
    quantities["preemptions"] = load_figures.preemptions(outcome)
    if published := outcome.publications:
        quantities["paused to publish"] = max(p.paused_s for p in published)
        valid = [load_figures.first_valid(p, answers) for p in published]
        if times := [seconds for seconds in valid if seconds is not None]:
            quantities["first valid token"] = max(times)
    quantities["client's CPU"] = 100 * outcome.client_cpu_s / seconds
    return quantities
