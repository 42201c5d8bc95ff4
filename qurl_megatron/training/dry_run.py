"""``qurl show --dry-run``: a run built on the meta device, and what each rank of it would hold.

Every pipeline stage is built as its own tensor rank 0 would build it: Megatron's model, gradient
buffers and optimizer, in one process and without weights. The tensor ranks of a stage are alike,
and so are its data ranks but for the padding of their shares. So a recipe that passes is cut in
a way that works, and what it holds is known before there is a GPU.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import qurl_megatron
from qurl_megatron.config import RunConfig
from qurl_megatron.data.pack import round_up
from qurl_megatron.errors import ConfigError
from qurl_megatron.model import memory
from qurl_megatron.model.build import build_model, transformer_config
from qurl_megatron.model.critic import ValueHead
from qurl_megatron.model.memory import GIB, Held, Pass
from qurl_megatron.model.trained import with_optimizer
from qurl_megatron.rollout.transport.memory import SLOTS
from qurl_megatron.runtime.megatron import Ranks
from qurl_megatron.runtime.pretend import META, pretended_rank, without_gpus
from qurl_megatron.weights import Arch, read_arch, read_config
from qurl_megatron.weights.arch import read_json
from qurl_megatron.weights.checkpoint import description_of

SHAPES = Path(qurl_megatron.__file__).parents[1] / "launch" / "models"
"""config.json of the models that recipes name, for machines without their weights."""

MIB = 1 << 20
NODE = 8
"""GPUs of a machine, at most."""

STATIC = 0.85
"""What SGLang takes for weights and cache where no --mem-fraction-static says so; its own default
depends on the GPU and is about this."""


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage. Sizes are bytes."""

    layers: int
    policy: Held
    reference: int
    critic: Held | None
    passes: int  # whose activations are held at once
    activations: int  # of all of them
    working: int  # the layer that is being gone through: its activations or their gradients
    logits: int
    publishing: int  # for as long as a version is published

    @property
    def at_rest(self) -> int:
        """What stays between two passes, and while engines generate."""
        return self.policy.total + self.reference + (self.critic.total if self.critic else 0)

    @property
    def total(self) -> int:
        return self.at_rest + self.activations + self.working + self.logits

    @property
    def loading(self) -> int:
        return memory.loading(self.policy) + (memory.loading(self.critic) if self.critic else 0)


@dataclass(frozen=True)
class Engine:
    """One rank of an engine. Sizes are bytes."""

    weights: dict[str, int]  # by scheme
    token: int  # keys and values of one token
    room: int  # for weights and cache
    colocated: bool

    def tokens(self, scheme: str) -> int:
        """How many tokens' keys and values fit beside the weights."""
        return max(0, self.room - self.weights[scheme]) // self.token


@dataclass(frozen=True)
class DryRun:
    """What a recipe would need."""

    config: RunConfig
    arch: Arch
    described_by: Path  # the config.json
    tokens: int  # of one pass on one rank
    recompute: bool
    stages: list[Stage]
    engine: Engine | None  # None: not SGLang
    notes: list[str]
    gpu: int

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.total)

    def phases(self, stage: Stage) -> dict[str, dict[str, int]]:
        """What lies on a GPU of a stage in each phase, by name."""
        engine = self.engine.room if self.engine and self.engine.colocated else None
        return memory.phases(
            stage.at_rest,
            stage.total,
            stage.publishing,
            stage.loading,
            engine=engine,
            mapped_by=_mapping_engines(self.config),
        )

    @property
    def fullest(self) -> tuple[Stage, str, int]:
        """The stage and the phase with most on a GPU, and how much that is."""
        sums = [
            (stage, name, sum(rows.values()))
            for stage in self.stages
            for name, rows in self.phases(stage).items()
        ]
        return max(sums, key=lambda found: found[2])


def dry_run(config: RunConfig, model_config: Path | None = None, *, gpu_gib: float = 80) -> DryRun:
    """Build every stage of a run without weights, and add up.

    Args:
        model_config: the model's config.json or the folder it is in; None takes that of
            ``model.path``, else one that ships under its name.
        gpu_gib: memory of a GPU, in GiB.

    Raises:
        ConfigError: no config is found, or the model does not divide over the ranks or engines.
    """
    path = _find("model.path", config.model.path, model_config)
    arch = read_arch(read_json(path))
    parallel, rollout = config.parallel, config.rollout
    arch.check_parallel(parallel.tensor, parallel.pipeline)
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    passed = _pass(config, longest)
    stages = without_gpus(_stages, config, arch, passed)
    gpu = int(gpu_gib * GIB)
    engine = None
    if rollout.backend == "sglang":
        engine = _engine(config, arch, max(stage.at_rest for stage in stages), gpu)
    found = DryRun(
        config=config,
        arch=arch,
        described_by=path,
        tokens=passed.tokens,
        recompute=config.model.recompute,
        stages=stages,
        engine=engine,
        notes=[],
        gpu=gpu,
    )
    found.notes.extend(_notes(found, longest))
    return found


def _find(key: str, model_path: str, given: Path | None) -> Path:
    """The config.json of the checkpoint that ``key`` names."""
    if given is not None:
        path = given / "config.json" if given.is_dir() else given
        if not path.is_file():
            raise ConfigError(f"--config {given} is neither a config.json nor a folder with one")
        return path
    folder = Path(model_path)
    if folder.exists():
        folder = description_of(folder)
        read_config(folder)  # tells what is wrong with it
        return folder / "config.json"
    shipped = SHAPES / folder.name / "config.json"
    if not shipped.is_file():
        known = ", ".join(sorted(p.name for p in SHAPES.glob("*/")))
        raise ConfigError(
            f"{key}={model_path} does not exist, and launch/models has no {folder.name} "
            f"(but {known}); name the model's config.json with --config"
        )
    return shipped


def _pass(config: RunConfig, longest: int) -> Pass:
    """The largest pass: responses of full length, or the token budget where that is more."""
    train, parallel = config.train, config.parallel
    tokens = max(train.max_tokens, longest) if train.max_tokens else train.micro_batch * longest
    chunks = 1 if parallel.context == 1 else 2 * parallel.context  # of a sequence
    return Pass(
        tokens=round_up(tokens, chunks * parallel.tensor) // parallel.context,
        tensor=parallel.tensor,
        sequence=parallel.sequence and parallel.tensor > 1,
        itemsize=getattr(torch, config.model.dtype).itemsize,
        transposed=not train.packed and (train.micro_batch > 1 or train.max_tokens > 0),
        fp32_output=config.model.fp32_output and config.model.dtype != "float32",
    )


def _stages(config: RunConfig, arch: Arch, passed: Pass) -> list[Stage]:
    return [_stage(config, arch, passed, index) for index in range(config.parallel.pipeline)]


def _stage(config: RunConfig, arch: Arch, passed: Pass, index: int) -> Stage:
    parallel = config.parallel
    # Megatron numbers tensor ranks innermost and pipeline stages outermost.
    rank = index * (parallel.world_size // parallel.pipeline)
    with pretended_rank(parallel, rank) as ranks:
        assert (ranks.pipeline.rank, ranks.tensor.rank, ranks.data.rank) == (index, 0, 0)
        policy = _policy(config, arch, ranks)
        critic = _critic(config, arch, ranks)
        last = ranks.last_stage
    recompute = config.model.recompute
    layers = arch.num_layers // parallel.pipeline
    # 1F1B: a stage has as many passes under way as there are stages from it to the end.
    passes = min(parallel.pipeline - index, _passes_per_update(config))
    kept = memory.stage_activations(arch, layers, passed, recompute=recompute)
    one_layer = memory.layer_activations(arch, passed)
    in_reference = config.algo.kl_coef > 0 and config.algo.reference_memory == "device"
    return Stage(
        layers=layers,
        policy=policy,
        reference=policy.parameters * passed.itemsize if in_reference else 0,
        critic=critic,
        passes=passes,
        activations=passes * kept,
        # Made anew, and its gradients; without recomputation these alone.
        working=2 * one_layer if recompute else one_layer,
        logits=memory.logits(arch, passed) if last else 0,
        publishing=memory.publishing(
            policy.largest, round(config.sync.bucket_mb * MIB), slots=SLOTS
        ),
    )


def _policy(config: RunConfig, arch: Arch, ranks: Ranks) -> Held:
    megatron = transformer_config(arch, config.model, config.parallel)
    with META:
        gpt = build_model(arch, megatron, ranks)
    model, optimizer, _ = with_optimizer(gpt, megatron, config.optimizer)
    return memory.held(model, optimizer)


def _critic(config: RunConfig, actor: Arch, ranks: Ranks) -> Held | None:
    """The same for the critic, a body with a head of its own; none where there is no critic."""
    if config.algo.advantage != "gae":
        return None
    arch = actor
    if config.critic.path:
        arch = read_arch(read_json(_find("critic.path", config.critic.path, None)))
    arch = replace(arch, tied=False)
    megatron = transformer_config(arch, config.model, config.parallel)
    with META:
        gpt = build_model(arch, megatron, ranks)
        if ranks.last_stage:
            gpt.output_layer = ValueHead(megatron, ranks)
    model, optimizer, _ = with_optimizer(gpt, megatron, config.optimizer)
    return memory.held(model, optimizer)


def _passes_per_update(config: RunConfig) -> int:
    """Passes of one rank in one update, where all take a fixed number of responses."""
    if config.train.max_tokens:
        return config.parallel.pipeline  # unknown; as many as can be under way
    per_rank = config.responses_per_step // (config.algo.minibatches * config.parallel.data)
    return per_rank // config.train.micro_batch


def _engine(config: RunConfig, arch: Arch, trainer: int, gpu: int) -> Engine:
    tensor = config.rollout.engine_tensor
    if arch.heads % tensor or (arch.kv_heads % tensor and tensor % arch.kv_heads):
        raise ConfigError(
            f"rollout.engine_tensor={tensor} does not divide the model's "
            f"num_attention_heads={arch.heads} and num_key_value_heads={arch.kv_heads}"
        )
    colocated = config.rollout.colocate
    free = memory.engine_free(gpu, trainer if colocated else None)
    itemsize = getattr(torch, config.model.dtype).itemsize
    return Engine(
        weights={
            scheme: memory.engine_weights(arch, scheme, tensor, itemsize)
            for scheme in ("int8", "fp8", "none")
        },
        token=memory.cached_token(arch, tensor, itemsize),
        room=int(free * _static_fraction(config)),
        colocated=colocated,
    )


def _mapping_engines(config: RunConfig) -> int:
    """Engine ranks that map, by the memory transport, a trainer's slots on a GPU not their own."""
    rollout = config.rollout
    elsewhere = rollout.urls or rollout.rendezvous or rollout.backend != "sglang"
    if elsewhere or config.sync.transport not in ("auto", "memory"):
        return 0
    return min(NODE, rollout.engines * rollout.engine_tensor) - rollout.colocate


def _static_fraction(config: RunConfig) -> float:
    """SGLang's share of the memory that it finds free, for weights and cache."""
    for argument in config.rollout.engine_args:
        option, _, value = argument.partition("=")
        if option == "--mem-fraction-static" and value:
            return float(value)
    return STATIC


def _notes(run: DryRun, longest: int) -> list[str]:
    config, notes = run.config, []
    _, phase, needed = run.fullest
    if needed > run.gpu:
        mend = (
            "lower --mem-fraction-static in rollout.engine_args"
            if run.engine and run.engine.colocated and phase in ("publish", "save")
            else "raise parallel.tensor, parallel.pipeline or parallel.data"
        )
        notes.append(
            f"{needed / GIB:.1f} GiB do not fit in {run.gpu / GIB:g} in phase {phase}: {mend}"
        )
    if run.engine and run.engine.tokens(config.quant.scheme) < longest:
        notes.append(
            f"an engine rank has room for {run.engine.tokens(config.quant.scheme)} tokens, one "
            f"prompt and response may take {longest}"
        )
    if longest > run.arch.max_position:
        notes.append(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest} is more than "
            f"max_position_embeddings={run.arch.max_position}: raise it in the model's config.json,"
            " or engines will refuse such prompts"
        )
    if 0 < config.train.max_tokens < longest:
        notes.append(
            f"train.max_tokens={config.train.max_tokens} is less than one prompt and response of "
            f"full length, {longest}; such a response has a pass of its own"
        )
    return notes


def render(run: DryRun) -> str:
    """The tables, as text."""
    config, arch, parallel = run.config, run.arch, run.config.parallel
    lines = [
        f"{arch.family}, {_count(memory.parameters(arch))} parameters, {arch.num_layers} layers: "
        f"{os.path.relpath(run.described_by)}",
        f"{parallel.world_size} training ranks: tensor {parallel.tensor}, pipeline "
        f"{parallel.pipeline}, context {parallel.context}, data {parallel.data}",
        "",
        f"GiB per rank, passes of {run.tokens} tokens, activations "
        f"{'recomputed' if run.recompute else 'kept'}",
    ]
    rows = _stage_rows(run)
    label = max(len(name) for name, _ in rows)
    for name, cells in rows:
        lines.append(f"  {name:{label}}" + "".join(f"{cell:>9}" for cell in cells).rstrip())
    lines += ["", *_phase_lines(run)]
    if run.engine:
        lines += ["", *_engine_lines(config, run.engine)]
    lines += [f"note: {note}" for note in run.notes]
    return "\n".join(lines) + "\n"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _stage_rows(run: DryRun) -> list[tuple[str, list[str]]]:
    stages = run.stages
    dtype = "BF16" if run.config.model.dtype == "bfloat16" else "FP32"

    def gib(size) -> list[str]:
        return [f"{size(stage) / GIB:.2f}" for stage in stages]

    rows = [
        ("pipeline stage", [str(index) for index in range(len(stages))]),
        ("layers", [str(stage.layers) for stage in stages]),
        ("parameters, millions", [f"{s.policy.parameters / 1e6:.0f}" for s in stages]),
        (f"weights, {dtype}", gib(lambda s: s.policy.weights)),
        ("gradients, FP32", gib(lambda s: s.policy.gradients)),
        ("masters, FP32", gib(lambda s: s.policy.masters)),
        ("Adam's moments, FP32", gib(lambda s: s.policy.moments)),
    ]
    if any(stage.reference for stage in stages):
        rows.append((f"reference, {dtype}", gib(lambda s: s.reference)))
    if stages[0].critic:
        rows.append(("critic, all of these", gib(lambda s: s.critic.total)))
    rows += [
        ("passes under way", [str(stage.passes) for stage in stages]),
        ("their activations", gib(lambda s: s.activations)),
        ("one layer's work", gib(lambda s: s.working)),
        ("logits", gib(lambda s: s.logits)),
        ("sum", gib(lambda s: s.total)),
        ("sum at rest", gib(lambda s: s.at_rest)),
    ]
    return rows


def _phase_lines(run: DryRun) -> list[str]:
    """The fullest rank's GPU and host, phase by phase."""
    stage, _, _ = run.fullest
    phases = run.phases(stage)
    names = list(dict.fromkeys(name for rows in phases.values() for name in rows))
    label = max(map(len, names))
    index = run.stages.index(stage)
    lines = [
        f"GiB on a GPU of stage {index}, of {run.gpu / GIB:g}",
        f"  {'phase':{label}}" + "".join(f"{phase:>9}" for phase in phases),
    ]
    for name in names:
        cells = [rows.get(name, 0) / GIB for rows in phases.values()]
        lines.append(f"  {name:{label}}" + "".join(f"{cell:9.2f}" for cell in cells))
    sums = [sum(rows.values()) / GIB for rows in phases.values()]
    lines.append(f"  {'sum':{label}}" + "".join(f"{cell:9.2f}" for cell in sums))
    host = memory.host(stage.policy)
    ranks = min(NODE, run.config.parallel.world_size)
    lines.append(
        f"host memory of a rank: {host['start'] / GIB:.1f} GiB while weights load, "
        f"{host['save'] / GIB:.1f} while a checkpoint is written or read; of {ranks} ranks on a "
        f"machine: {ranks * host['start'] / GIB:.0f} and {ranks * host['save'] / GIB:.0f}"
    )
    return lines


def _engine_lines(config: RunConfig, engine: Engine) -> list[str]:
    rollout = config.rollout
    count = rollout.engines
    where = "beside a trainer at rest" if engine.colocated else "on GPUs of their own"
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    lines = [
        f"{count} SGLang engine{'s' if count > 1 else ''} of {rollout.engine_tensor} "
        f"GPU{'s' if rollout.engine_tensor > 1 else ''}, {where}: {engine.room / GIB:.1f} GiB a "
        f"rank for weights and cache, {engine.token / 1024:g} KiB a token"
    ]
    for scheme, name in (("int8", "INT8"), ("fp8", "FP8"), ("none", "BF16")):
        tokens = engine.tokens(scheme)
        lines.append(
            f"  {name:5} weights {engine.weights[scheme] / GIB:6.2f} GiB, cache of "
            f"{tokens / 1000:6.0f} k tokens: {tokens // longest} responses of full length"
        )
    return lines
