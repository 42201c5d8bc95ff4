"""Engines under the load of a reinforcement-learning step, by engine, scheme and tensor size.

All engines have the same weights, in their scheme, and get the same load in turns: the same
lengths in the same order, on prompts that nobody has sent before. What a step waits for comes
first, the makespan and its tail; then rates and latencies, each beside the least that the bytes
of a decode step allow.
"""

import argparse
import ipaddress
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch

from qurl_megatron.bench.load import limits, load_figures, reasons
from qurl_megatron.bench.load.drive import DrivenLoad, Publishing
from qurl_megatron.bench.load.engines import Target, reached, started
from qurl_megatron.bench.load.guidellm import GuideLLM, program
from qurl_megatron.bench.load.lengths import long_tailed, recorded
from qurl_megatron.bench.load.model import Version, checkpoint_of, model_folder
from qurl_megatron.bench.load.outcome import LoadOutcome
from qurl_megatron.bench.load.requests import (
    PROMPTS,
    Ask,
    Clients,
    arriving,
    groups,
    serial_digits,
)
from qurl_megatron.bench.load.words import Words
from qurl_megatron.bench.options import quant_scheme
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import Repeats, interleaved, progress
from qurl_megatron.engines.kinds import ENGINE_KINDS
from qurl_megatron.errors import ConfigError
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.planning import machine, machine_limits
from qurl_megatron.planning.constants import Gpu, constants_of
from qurl_megatron.planning.rollout_time import decode_rank, engine_rank
from qurl_megatron.tensors.arch import Arch, read_arch

ITEMSIZE = {"bfloat16": 2, "float32": 4}
SETTINGS = ("seed", "mean", "sigma", "max", "threads", "cache_gb", "protocol")
"""Options that are keys of a case as they are."""
GPU_NODES = ("nvidia[0-9]*", "kfd", "dxg")  # of NVIDIA, of AMD, of Windows' Linux
OURS, GUIDELLM = SENDERS = ("qurl", "GuideLLM")
"""Who sends the requests."""


@dataclass(frozen=True)
class LoadPlan:
    """One load, the same for all engines and repeats but for the ids of its prompts."""

    model: str
    lengths: Sequence[int]
    samples: int
    prompt: int
    clients: Clients
    vocab: int
    seed: int
    first: int  # serial number of the first prompt
    publish: str | None = None  # "half", "2.5s", "1000tokens" or never
    settings: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """Of ``SETTINGS``, and where lengths are from: only records of equal ones are compared."""
    words: Words | None = None  # that prompts are made of, where they are sent as text as well

    @property
    def prompts(self) -> int:
        return len(self.lengths) // self.samples

    @property
    def ids(self) -> Sequence[int]:
        """Of which prompts are made: not the first and the last one, to which engines give
        meanings of their own."""
        return self.words.ids if self.words else range(1, self.vocab - 1)

    @property
    def slots(self) -> int:
        """Responses that run at once, if the engine holds them."""
        return min(self.clients.at_once or len(self.lengths), len(self.lengths))

    def asks(self, repeat: int) -> list[Ask]:
        made = groups(
            self.lengths,
            samples=self.samples,
            prompt=self.prompt,
            ids=self.ids,
            first=self.first + repeat * self.prompts,
            seed=self.seed,
        )
        rate = self.clients.rate
        return made if rate is None else arriving(made, rate, self.seed)

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
    sender: str = OURS  # of SENDERS

    @property
    def name(self) -> str:
        tensor = f" tp{self.tensor}" if self.tensor > 1 else ""
        sender = f", {self.sender}" if self.sender != OURS else ""
        return f"{self.engine} {self.scheme}{tensor}{sender}"

    @property
    def dtype(self) -> str:
        """Of what is not quantized; an embedded engine on a CPU is fastest with FP32 there."""
        on_cpu = self.planned_on == "cpu" and not torch.cuda.is_available()
        beside_codes = on_cpu and quant_scheme(self.scheme) != "none"
        return "float32" if self.scheme == "fp32" or beside_codes else "bfloat16"

    @property
    def planned_on(self) -> str:
        """Where its speed is predicted; "" for an engine at a URL."""
        return ENGINE_KINDS[self.engine].planned_on if self.engine in ENGINE_KINDS else ""

    @property
    def elsewhere(self) -> str:
        """The host of an engine at a URL, if that is not this machine; or ""."""
        host = urlsplit(self.engine).hostname if "://" in self.engine else None
        if host is None or host == "localhost":
            return ""
        try:
            return "" if ipaddress.ip_address(host).is_loopback else host
        except ValueError:  # a name
            return host


def run(options: argparse.Namespace) -> list[Case]:
    """
    Raises:
        ConfigError: an engine does not start or answer, or the options do not fit together.
    """
    arch = read_arch(config_of(options.model))
    plan, subjects = plan_of(options, arch), subjects_of(options)
    guidellm = program(options.guidellm) if options.guidellm else None
    logs = (
        options.out / "logs" if options.out else Path(tempfile.mkdtemp(prefix="qurl-bench-logs-"))
    )
    with tempfile.TemporaryDirectory(prefix="qurl-bench-") as work, ExitStack() as stack:
        folder = _folder(options, subjects, Path(work))
        if guidellm:
            plan = replace(plan, words=Words(folder, plan.vocab))
        targets = _targets(options, plan, subjects, folder, Path(work), logs, stack)
        before = {name: _identity(name, target) for name, target in targets.items()}
        candidates = _candidates(plan, targets, guidellm)
        found = interleaved(candidates, repeats=options.repeats, seen=_tell)
        changed = {name: changed_since(before[name], target) for name, target in targets.items()}
    if any(changed.values()):
        progress(f"the engines' logs are in {logs}")
    elif not options.out:  # an error on the way here names one of them
        shutil.rmtree(logs)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    # Measured where it is asked for: no engine uses it any more.
    cpu = cache(partial(machine.here, threads=options.threads))
    cases, devices = [], set()
    for subject in subjects:
        name = subject.name
        device = device_of(before[name])
        devices.add(device)
        bounds = bounds_of(plan, subject, arch, device, gpu, cpu)
        for sender in SENDERS[: 2 if guidellm else 1]:
            one = replace(subject, sender=sender)
            repeats = found[one.name]
            cases.append(case_of(plan, one, repeats, bounds, changed[name], before[name]))
    # The record has the limits of what the engines ran on.
    options.device = "cuda" if gpu and "cuda" in devices else "cpu"
    return cases


def _identity(name: str, target: Target) -> dict[str, object]:
    try:
        return target.identity()
    except EngineError as error:
        raise ConfigError(f"{name} does not answer: {error}") from None


def device_of(identity: Mapping[str, object], nodes: Path = Path("/dev")) -> str:
    """ "cuda" or "cpu", by what an engine says of itself; "" where it does not say.

    Args:
        nodes: has the device files of this machine; without those of a GPU, nothing runs on one.
    """
    told = str(identity.get("device") or "").partition(":")[0]
    return told or ("" if any(next(nodes.glob(name), None) for name in GPU_NODES) else "cpu")


def changed_since(before: Mapping[str, object], target: Target) -> str:
    """What an engine says otherwise than before, or that it says nothing any more; or ""."""
    try:
        return reasons.changed(before, target.identity())
    except EngineError as error:  # what the others did is no worse for it
        return f"it does not answer any more: {error}"


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
        Clients.read(options.clients),
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
    if options.guidellm and options.publish_every:
        raise ConfigError(
            "--guidellm cannot go with --publish-every: it does not say which weights made a "
            "token; leave one of them out"
        )
    found = []
    for engine in options.engine:
        if engine not in ENGINE_KINDS and "://" not in engine:
            raise ConfigError(f"--engine {engine} is neither {', '.join(ENGINE_KINDS)} nor a URL")
        if "://" in engine and len(options.schemes) > 1:
            raise ConfigError(
                f"--engine {engine} serves one scheme; say which one with --schemes, for its limit"
            )
        split = engine not in ENGINE_KINDS or ENGINE_KINDS[engine].takes_gpus
        tensors = options.tensor if split else [_alone(options)]
        found += [Subject(engine, s, t) for s in options.schemes for t in tensors]
    return found


def _alone(options: argparse.Namespace) -> int:
    """Ranks of an embedded engine: one, which must be asked for; other sizes are for others."""
    more = [size for size in options.tensor if size != 1]
    if more and (1 not in options.tensor or set(options.engine) == {"embedded"}):
        raise ConfigError(
            f"--tensor {more[0]} is not for --engine embedded, which is one process; leave it out, "
            f"or give --engine embedded,sglang --tensor 1 {more[0]}, where SGLang takes both"
        )
    return 1


def _folder(options: argparse.Namespace, subjects: Sequence[Subject], work: Path) -> Path:
    """The model of the engines: where they are started, with weights."""
    if all("://" in subject.engine for subject in subjects):
        return Path(options.model)
    return model_folder(options.model, work)


def _targets(
    options: argparse.Namespace,
    plan: LoadPlan,
    subjects: Sequence[Subject],
    folder: Path,
    work: Path,
    logs: Path,
    stack: ExitStack,
) -> dict[str, Target]:
    """Every engine, up and with its weights; ``stack`` ends them."""
    found: dict[str, Target] = {}
    versions: dict[tuple[str, str], Version] = {}
    for subject in subjects:
        if "://" in subject.engine:
            found[subject.name] = reached(
                subject.engine, options.protocol, timeout_s=options.timeout
            )
            continue
        kind = quant_scheme(subject.scheme), subject.dtype
        if kind not in versions:
            source = checkpoint_of(folder)
            versions[kind] = Version(source, *kind, work / f"versions-{'-'.join(kind)}")
        progress(f"starting {subject.name}")
        try:
            engine = started(
                subject.engine,
                folder,
                versions[kind],
                plan.vocab,
                logs / subject.name.replace(" ", "-"),
                tensor=subject.tensor,
                threads=options.threads,
                timeout_s=options.timeout,
                cache_gb=options.cache_gb,
                text=plan.words is not None,
            )
            found[subject.name] = stack.enter_context(engine)
        except EngineError as error:
            raise ConfigError(f"{subject.name} did not start: {error}") from None
    return found


def _candidates(
    plan: LoadPlan, targets: Mapping[str, Target], guidellm: str | None
) -> dict[str, Callable[[], LoadOutcome]]:
    """What is measured, by name; each sends prompts that nobody else does."""
    found = {}
    step = 2 if guidellm else 1
    for name, target in targets.items():
        found[name] = _candidate(plan, target, itertools.count(0, step))
        if guidellm:
            found[f"{name}, {GUIDELLM}"] = _through(
                guidellm, plan, target, itertools.count(1, step)
            )
    return found


def _through(program: str, plan: LoadPlan, target: Target, repeats: itertools.count):
    words = plan.words
    assert words is not None, "GuideLLM sends text"

    def load() -> LoadOutcome:
        one = GuideLLM(program, target.client, target.look, words.text)
        return one.drive(plan.asks(next(repeats)), plan.clients)

    return load


def _candidate(plan: LoadPlan, target: Target, repeats: itertools.count):
    def load() -> LoadOutcome:
        one = DrivenLoad(
            target.client,
            target.protocol,
            target.model,
            look=target.look,
            publishing=plan.publishing(target),
        )
        return one.drive(plan.asks(next(repeats)), plan.clients.at_once)

    return load


def _tell(name: str, outcome: LoadOutcome) -> None:
    answers = outcome.answers
    seconds, tokens = load_figures.makespan(answers), load_figures.tokens(answers)
    wrong = sum(not answer.done for answer in answers)
    failures = f", {wrong} failed" if wrong else ""
    progress(f"{name}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f}/s{failures}")
    if outcome.unseen:
        progress(f"{name}: not looked at: {outcome.unseen}")


@dataclass(frozen=True)
class Bounds:
    """Seconds of the makespan; None where a rate of arrivals decides, or another machine."""

    least: float | None = None  # by the bytes of its decode steps
    predicted: float | None = None  # by qurl plan, where it knows the machine
    why: str = ""  # there is no limit, where that is not the load's doing
    unplanned: str = ""  # why there is a limit and no prediction


def case_of(
    plan: LoadPlan,
    subject: Subject,
    repeats: Repeats[LoadOutcome],
    bounds: Bounds,
    changed: str,
    identity: dict[str, object],
) -> Case:
    """Figures and reasons of all repeats.

    Args:
        changed: what the engine says otherwise than before the first repeat.
        identity: what it said then.
    """
    told: dict[str, object] = {}
    for outcome in repeats.results:
        told |= reasons.found(outcome, serial_digits(len(plan.ids)) - 1)
    if changed:
        told["engine changed"] = changed
    names = [*told, *(reason for reason in repeats.reasons if reason not in told)]
    lengths = plan.lengths
    keys = {
        "model": plan.model,
        "engine": subject.engine,
        "scheme": subject.scheme,
        "dtype": subject.dtype,
        "tensor": subject.tensor,
        "prompts": plan.prompts,
        "samples": plan.samples,
        "prompt tokens": plan.prompt,
        "tokens": sum(lengths),
        "longest": max(lengths),
        "clients": plan.clients.text,
        "publish": plan.publish,
        **plan.settings,
        **({"sent by": subject.sender} if plan.words else {}),
    }
    outcomes = [o for o in repeats.results if any(answer.done for answer in o.answers)]
    whole = len(outcomes) == len(repeats.results)  # else there is nothing to time
    figures = figures_of(outcomes, bounds) if whole else []
    notes = _notes(bounds, repeats.results)
    if partial := [figure.name for figure in figures if len(figure.repeats) < len(outcomes)]:
        notes["not compared"] = f"{', '.join(partial)}, which only some repeats have"
    return Case(
        name=subject.name,
        keys=keys,
        figures=figures,
        # Of this machine, whose speed is not that of an engine on another one.
        yardsticks=[] if subject.elsewhere else repeats.yardsticks,
        reasons=names,
        notes={"identity": identity, **told, **notes},
    )


def _notes(bounds: Bounds, outcomes: Sequence[LoadOutcome]) -> dict[str, str]:
    """What figures lack, and why."""
    found = {}
    if bounds.why:
        found["limit"] = f"none: {bounds.why}"
    if bounds.unplanned:
        found["prediction"] = f"none: {bounds.unplanned}"
    if outcomes[0].sender:
        found["sent by"] = outcomes[0].sender
    if unseen := [outcome.unseen for outcome in outcomes if outcome.unseen]:
        found["not looked at"] = unseen[0]
    valid = [
        v
        for o in outcomes
        for v in (load_figures.first_valid(p, o.answers) for p in o.publications)
    ]
    if missing := valid.count(None):
        found["first valid token"] = f"{missing} of {len(valid)} publications had none after them"
    return found


def bounds_of(
    plan: LoadPlan,
    subject: Subject,
    arch: Arch,
    device: str,
    gpu: str | None,
    cpu: Callable[[str], Gpu],
) -> Bounds:
    """
    Args:
        device: that the engine says it uses, "cuda" or "cpu"; "" where it does not say.
        gpu: what its driver calls the GPU that this side sees; None: it sees none.
        cpu: measures this machine, where what is not quantized is of a ``model.dtype``.
    """
    if plan.clients.rate is not None:
        return Bounds()
    if why := _unmeasured(subject, device, gpu):
        return Bounds(why=why)
    on_gpu = device == "cuda"
    read_gb_s = machine_limits.limits(device)["read_gb_s"]  # of the memory, or of one GPU's
    scheme = quant_scheme(subject.scheme)
    rank = decode_rank(arch, scheme, subject.tensor, ITEMSIZE[subject.dtype])
    # Ranks on CPUs share the memory's rate; GPUs have each their own.
    share = 1 if on_gpu else subject.tensor
    load = {"prompt": plan.prompt, "slots": plan.slots}
    least = limits.least_seconds(rank, plan.lengths, **load, bytes_per_s=1e9 * read_gb_s / share)
    if not on_gpu and subject.planned_on != "cpu":
        why = "on CPUs, only embedded engines that this command started are predicted"
        return Bounds(least, unplanned=why)
    known = limits.gpu_named(gpu or "", scheme) if on_gpu else cpu(subject.dtype).of_rank(1)
    if known is None:
        return Bounds(least, unplanned=f"qurl plan has no data sheet of {gpu} for {scheme}")
    predicted = limits.predicted_seconds(
        engine_rank(arch, scheme, subject.tensor, ITEMSIZE[subject.dtype], known),
        plan.lengths,
        **load,
        prompts=plan.prompts,
        gpu=known,
        constants=constants_of(known, scheme),
    )
    return Bounds(least, predicted)


def _unmeasured(subject: Subject, device: str, gpu: str | None) -> str:
    """Why this side cannot measure what an engine runs on; or ""."""
    if subject.elsewhere:
        return f"{subject.elsewhere} is another machine"
    if not device:
        return "the engine does not say whether it runs on a GPU"
    return "this side's torch does not see the engine's GPU" if device == "cuda" and not gpu else ""


def figures_of(outcomes: Sequence[LoadOutcome], bounds: Bounds) -> list[Figure]:
    """A figure per quantity. One that only some repeats have is reported, not compared: repeats are
    compared beside the yardstick of their own round."""
    measured = [_measured(outcome) for outcome in outcomes]
    tokens = load_figures.tokens(outcomes[0].answers)
    least, predicted = (s and tokens / s for s in (bounds.least, bounds.predicted))
    told = {
        "tokens/s": Bounds(least, predicted),
        "makespan": bounds,
    }
    figures = []
    for name in dict.fromkeys(name for one in measured for name in one):
        repeats = [one[name] for one in measured if name in one]
        own = told.get(name, Bounds())
        unit, better = KINDS.get(name, LATENCY)
        figures.append(
            Figure(
                name=name,
                unit=unit,
                better=better if len(repeats) == len(outcomes) else None,
                repeats=repeats,
                limit=own.least,
                limit_of="DRAM bytes" if own.least else "",
                predicted=own.predicted,
            )
        )
    return figures


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
    "tokens computed anew": ("tokens", None),
    "client's CPU": ("%", None),
}
"""Unit of each figure but latencies, and which way is better: a faster engine keeps this side
busier, its cache fuller, and its tail as long as the lengths are."""


def _measured(outcome: LoadOutcome) -> dict[str, float]:
    """Every quantity of one repeat, in its unit."""
    answers = outcome.answers
    seconds = load_figures.makespan(answers)
    found = {
        "tokens/s": load_figures.tokens(answers) / seconds,
        "makespan": seconds,
        "tail": 100 * load_figures.tail_share(answers),
    }
    latencies = {
        "first token": load_figures.first_token(answers),
        "between tokens": [] if outcome.sender else load_figures.gaps(answers),
        "per token": load_figures.per_token(answers),
    }
    for name, values in latencies.items():
        for percent, value in load_figures.percentiles(values).items():
            found[f"{name}, p{percent}"] = 1e3 * value
    if (used := load_figures.occupancy(outcome)) is not None:
        found["cache in use, mean"], found["cache in use, most"] = (100 * share for share in used)
    if not outcome.sender or any(look.preemptions is not None for look in outcome.looks):
        found["preemptions"] = load_figures.preemptions(outcome)
    if published := outcome.publications:
        found["paused to publish"] = max(p.paused_s for p in published)
        valid = (load_figures.first_valid(p, answers) for p in published)
        if told := [seconds for seconds in valid if seconds is not None]:
            found["first valid token"] = max(told)
        found["tokens computed anew"] = sum(load_figures.recomputed(p, answers) for p in published)
    if outcome.client is not None:
        found["client's CPU"] = 100 * outcome.client.cpu_s / seconds
    return found
