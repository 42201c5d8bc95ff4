"""Memory of each rank of a run, from its models' shapes and settings, and the tables of it that
``qurl show --dry-run`` prints.

A planner asks for hundreds of layouts, so no model is built and torch is not imported. Tests
compare the sums with models that are built.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.config import RunConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.text import aligned, how_many
from qurl_megatron.plan import memory
from qurl_megatron.plan.memory import GIB, Held, Pass, held_from_shapes, round_up
from qurl_megatron.schemes import SCHEMES, SERVED, title
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.training.shapes import Models, check_division, find_models
from qurl_megatron.wire import SLOTS

MIB = 1 << 20

NODE = 8
"""GPUs of a machine, at most."""

STATIC = 0.85
"""Share of a GPU that SGLang takes for weights and cache without --mem-fraction-static; its own
default depends on the GPU and is about this."""


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage. Sizes are bytes."""

    layers: int
    policy: Held
    reference: int
    codes: int  # and scales, where layers compute with the engines' codes
    critic: Held | None
    passes: int  # whose activations are held at once
    activations: int  # of all of them
    working: int  # the layer that is being gone through: its activations or their gradients
    logits: int
    publishing: int  # for as long as a version is published

    @property
    def trained(self) -> list[Held]:
        """Memory of each model that trains."""
        return [model for model in (self.policy, self.critic) if model]

    @cached_property
    def at_rest(self) -> int:
        """Memory in use between two passes, and while engines generate."""
        models = sum(model.total for model in self.trained)
        return models + self.reference + self.codes

    @cached_property
    def total(self) -> int:
        return self.at_rest + self.activations + self.working + self.logits

    @cached_property
    def loading(self) -> int:
        return sum(model.loading for model in self.trained)


@dataclass(frozen=True)
class EngineFootprint:
    """One rank of an engine. Sizes are bytes."""

    weights: dict[str, int]  # by scheme
    token: int  # keys and values of one token
    room: int  # for weights and cache

    def tokens(self, scheme: str) -> int:
        """Return how many tokens' keys and values fit beside the weights."""
        return max(0, self.room - self.weights[scheme]) // self.token


@dataclass(frozen=True)
class Footprint:
    config: RunConfig
    models: Models
    tokens: int  # of one pass on one rank
    stages: list[Stage]
    engine: EngineFootprint | None  # None: not SGLang
    gpu: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens

    def phases(self, stage: Stage) -> dict[str, dict[str, int]]:
        """Return the memory in use on a stage's GPU, by phase and by name."""
        engine = None
        if self.engine and self.config.rollout.colocate:
            engine = self.engine.room
        return memory.phases(
            stage.at_rest,
            stage.total,
            stage.publishing,
            stage.loading,
            engine=engine,
            mapped_by=_mapping_engines(self.config),
        )

    @cached_property
    def fullest(self) -> tuple[Stage, str, int]:
        """The stage and the phase with most on a GPU, and how much that is."""
        sums = []
        for stage in self.stages:
            for name, rows in self.phases(stage).items():
                sums.append((stage, name, sum(rows.values())))
        return max(sums, key=lambda stage_and_phase: stage_and_phase[2])

    @property
    def notes(self) -> list[str]:
        """Problems of room, each with a remedy."""
        notes = []
        _, phase, needed = self.fullest
        if needed > self.gpu:
            fix = "raise parallel.tensor, parallel.pipeline or parallel.data"
            if self.config.rollout.colocate and phase in ("publish", "save"):
                fix = "lower --mem-fraction-static in rollout.engine_args"
            notes.append(
                f"{needed / GIB:.1f} GiB do not fit in {self.gpu / GIB:g} in phase {phase}: {fix}"
            )
        if self.engine:
            tokens = self.engine.tokens(self.config.quant.scheme)
            if tokens < self.longest:
                notes.append(
                    f"an engine rank has room for {tokens} tokens, one prompt and response may "
                    f"take {self.longest}"
                )
        return notes


def footprint(
    config: RunConfig,
    models: Models | None = None,
    *,
    gpu_gib: float = 80,
    stages: list[Stage] | None = None,
) -> Footprint:
    """Add up the memory in use on the GPUs of trainer and engines.

    Args:
        models: None takes the recipe's.
        stages: from a recipe that differs in its engines alone; None computes them.

    Raises:
        ConfigError: no model is found, or it does not divide over the ranks or engines.
    """
    models = models or find_models(config)
    check_division(config, models.policy)
    passed = _pass(config)
    stages = stages or [
        _stage(config, models, passed, index) for index in range(config.parallel.pipeline)
    ]
    gpu = int(gpu_gib * GIB)
    engine = None
    if config.rollout.kind.takes_gpus:
        engine = _engine(config, models.policy, max(stage.at_rest for stage in stages), gpu)
    return Footprint(config, models, passed.tokens, stages, engine, gpu)


def _pass(config: RunConfig) -> Pass:
    """Return the largest pass: responses of full length, or the token budget if it is more."""
    train, parallel = config.train, config.parallel
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens, chunks = train.micro_batch * longest, 1
    if train.max_tokens:
        tokens = max(train.max_tokens, longest)
    if parallel.context > 1:
        chunks = 2 * parallel.context  # of a sequence
    return Pass(
        tokens=round_up(tokens, chunks * parallel.tensor) // parallel.context,
        tensor=parallel.tensor,
        itemsize=config.model.itemsize,
        expert=parallel.expert,
        transposed=not train.packed and (train.micro_batch > 1 or train.max_tokens > 0),
        fp32_output=config.model.fp32_output and config.model.dtype != "float32",
    )


def _stage(config: RunConfig, models: Models, passed: Pass, index: int) -> Stage:
    parallel, arch = config.parallel, models.policy
    itemsize = config.model.itemsize
    policy = held_from_shapes(arch, parallel, index, itemsize=itemsize)
    critic = None
    if models.critic:
        critic = held_from_shapes(models.critic, parallel, index, itemsize=itemsize, critic=True)
    recompute = config.model.recompute
    layers = arch.num_layers // parallel.pipeline
    # 1F1B: a stage has as many passes under way as there are stages from it to the end.
    passes = min(parallel.pipeline - index, _passes_per_update(config))
    kept = memory.stage_activations(arch, layers, passed, recompute=recompute)
    one_layer = memory.layer_activations(arch, passed)
    codes = cast = 0
    if config.train.align != "none":
        # FP8 codes without FP8 hardware are multiplied in FP32, of which this counts half.
        codes, cast = memory.aligned(arch, layers, parallel, passed.itemsize)
    reference = 0
    if config.algo.kl_coef > 0 and config.algo.reference_memory == "device":
        reference = policy.parameters * passed.itemsize
    bucket = round(config.sync.bucket_mb * MIB)
    if config.transport == "relay":
        # A matrix is never divided, so that each machine's part has one; of embedding and output
        # layer one part each.
        machines = math.ceil(parallel.world_size / NODE)
        matrix = memory.largest_matrix(arch, parallel)
        if config.quant.scheme == "none":
            matrix *= itemsize
        bucket = max(bucket, machines * matrix) + 2 * itemsize * policy.largest
    return Stage(
        layers=layers,
        policy=policy,
        reference=reference,
        codes=codes,
        critic=critic,
        passes=passes,
        activations=passes * kept,
        # Made again, and its gradients; without recomputation these alone.
        working=(2 * one_layer if recompute else one_layer)
        + memory.dispatched(arch, passed)
        + cast,
        logits=memory.logits(arch, passed) if index == parallel.pipeline - 1 else 0,
        publishing=memory.publishing(policy.largest, bucket, slots=SLOTS),
    )


def _passes_per_update(config: RunConfig) -> int:
    """Return the passes of one rank in one update, or with token budgets the most under way."""
    if config.train.max_tokens:
        return config.parallel.pipeline  # unknown; as many as can be under way
    per_rank = config.responses_per_step // (config.algo.minibatches * config.parallel.data)
    return per_rank // config.train.micro_batch


def _engine(config: RunConfig, arch: Arch, trainer: int, gpu: int) -> EngineFootprint:
    tensor = config.rollout.engine_tensor
    at_rest = None
    if config.rollout.colocate:
        at_rest = trainer
    itemsize = config.model.itemsize
    return EngineFootprint(
        weights={
            scheme: memory.engine_weights(arch, scheme, tensor, itemsize)
            for scheme in SERVED
            if SCHEMES[scheme].block is None or _leaves_squares_whole(config, arch, scheme)
        },
        token=memory.cached_token(arch, tensor, itemsize),
        room=int(memory.engine_free(gpu, at_rest) * _static_fraction(config)),
    )


def _leaves_squares_whole(config: RunConfig, arch: Arch, scheme: str) -> bool:
    try:
        check_division(replace(config, quant=replace(config.quant, scheme=scheme)), arch)
    except ConfigError:
        return False
    return True


def _mapping_engines(config: RunConfig) -> int:
    """Count engine ranks that map a trainer's slots on a GPU of their machine, not their own."""
    rollout = config.rollout
    elsewhere = rollout.adopts or not rollout.kind.takes_gpus
    if elsewhere or config.transport not in ("memory", "relay"):
        return 0
    return min(NODE, rollout.engines * rollout.engine_tensor) - rollout.colocate


def _static_fraction(config: RunConfig) -> float:
    """Return SGLang's share of free memory for weights and cache."""
    for argument in config.rollout.engine_args:
        option, _, value = argument.partition("=")
        if option == "--mem-fraction-static" and value:
            return float(value)
    return STATIC


def render(run: Footprint) -> str:
    config, arch, parallel = run.config, run.models.policy, run.config.parallel
    described_by = run.models.described_by
    source = os.path.relpath(described_by)
    if not described_by.is_file():
        source += ", to be made"
    experts = f", expert {parallel.expert}" if arch.experts else ""
    lines = [
        f"{arch.family}, {_count(parameter_count(arch))} parameters, {arch.num_layers} layers: "
        f"{source}",
        f"{parallel.world_size} training ranks: tensor {parallel.tensor}, pipeline "
        f"{parallel.pipeline}, context {parallel.context}, data {parallel.data}{experts}",
        "",
        f"GiB per rank, passes of {run.tokens} tokens, activations "
        f"{'recomputed' if config.model.recompute else 'kept'}",
    ]
    lines += _table([_column(run, index) for index in range(len(run.stages))])
    lines += ["", *_phase_lines(run)]
    if run.engine:
        lines += ["", *_engine_lines(run, run.engine)]
    lines += [f"note: {note}" for note in run.notes]
    return "\n".join(lines) + "\n"


def _count(parameters: int) -> str:
    if parameters >= 1e8:
        return f"{parameters / 1e9:.2f} B"
    return f"{parameters / 1e6:.2f} M"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _table(columns: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table, from the cells of each column by the label of their row."""
    labels = list(columns[0])
    rows = [[label, *(column[label] for column in columns)] for label in labels]
    return [f"  {line}" for line in aligned(rows, words=labels[:1])]


def _column(run: Footprint, index: int) -> dict[str, str]:
    """Return the cells of one pipeline stage, by the label of their row."""
    stage = run.stages[index]
    policy, critic = stage.policy, stage.critic
    dtype = "BF16" if run.config.model.dtype == "bfloat16" else "FP32"
    resident = {
        f"weights, {dtype}": policy.weights,
        "gradients, FP32": policy.gradients,
        "masters, FP32": policy.masters,
        "Adam's moments, FP32": policy.moments,
    }
    if any(each.reference for each in run.stages):
        resident[f"reference, {dtype}"] = stage.reference
    if any(each.codes for each in run.stages):
        resident[f"codes, {run.config.quant.scheme}, and scales"] = stage.codes
    if critic:
        resident["critic, all of these"] = critic.total
    passing = {
        "their activations": stage.activations,
        "one layer's work": stage.working,
        "logits": stage.logits,
        "sum": stage.total,
        "sum at rest": stage.at_rest,
    }
    return {
        "pipeline stage": str(index),
        "layers": str(stage.layers),
        "parameters, millions": f"{policy.parameters / 1e6:.0f}",
        **{name: _gib(size) for name, size in resident.items()},
        "passes under way": str(stage.passes),
        **{name: _gib(size) for name, size in passing.items()},
    }


def _phase_lines(run: Footprint) -> list[str]:
    """Return lines on the fullest rank's GPU and host, phase by phase."""
    stage, _, _ = run.fullest
    phases = run.phases(stage)
    names = max(phases.values(), key=len)  # names of the phase that has them all
    columns = []
    for phase, sizes in phases.items():
        column = {"phase": phase}
        for name in names:
            column[name] = _gib(sizes.get(name, 0))
        columns.append(column | {"sum": _gib(sum(sizes.values()))})
    lines = [f"GiB on a GPU of stage {run.stages.index(stage)}, of {run.gpu / GIB:g}"]
    lines += _table(columns)
    host = stage.policy.host
    ranks = min(NODE, run.config.parallel.world_size)
    lines.append(
        f"host memory of a rank: {host['start'] / GIB:.1f} GiB while weights load, "
        f"{host['save'] / GIB:.1f} while a checkpoint is written or read; of {ranks} ranks on a "
        f"machine: {ranks * host['start'] / GIB:.0f} and {ranks * host['save'] / GIB:.0f}"
    )
    return lines


def _engine_lines(run: Footprint, engine: EngineFootprint) -> list[str]:
    rollout = run.config.rollout
    placement = "none of them the trainer's"
    if rollout.colocate:
        placement = "beside a trainer at rest"
    lines = [
        f"{how_many(rollout.engines, 'SGLang engine')} of "
        f"{how_many(rollout.engine_tensor, 'GPU')} each, {placement}: "
        f"{engine.room / GIB:.1f} GiB a GPU for weights and cache, "
        f"{engine.token / 1024:g} KiB a token of cache"
    ]
    for scheme in sorted(engine.weights, key="none".__eq__):
        tokens = engine.tokens(scheme)
        lines.append(
            f"  {title(scheme):9} weights {engine.weights[scheme] / GIB:6.2f} GiB, cache of "
            f"{tokens / 1000:6.0f} k tokens: {tokens // run.longest} responses of full length"
        )
    return lines
