"""Memory that each rank of a run would need, added up from its models' shapes and all else.

A planner asks for hundreds of layouts, so nothing is built and torch is not imported. Tests hold
the models' part to the byte against ranks that are really built.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.config import RunConfig
from qurl_megatron.data.dealing import round_up
from qurl_megatron.kit.disk import read_json
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.shipped import ROOT
from qurl_megatron.schemes import SERVED, simulation
from qurl_megatron.tensors.arch import Arch, arch_of, read_arch
from qurl_megatron.training import memory
from qurl_megatron.training.buffers import held_from_shapes
from qurl_megatron.training.inputs import longest_prompt
from qurl_megatron.training.memory import GIB, Held, Pass
from qurl_megatron.wire import SLOTS

SHAPES = ROOT / "launch/models"
"""config.json of the models that recipes name, for machines without their weights."""

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
    def at_rest(self) -> int:
        """Memory in use between two passes, and while engines generate."""
        critic = self.critic.total if self.critic else 0
        return self.policy.total + self.reference + self.codes + critic

    @property
    def total(self) -> int:
        return self.at_rest + self.activations + self.working + self.logits

    @property
    def loading(self) -> int:
        return memory.loading(self.policy) + (memory.loading(self.critic) if self.critic else 0)


@dataclass(frozen=True)
class EngineFootprint:
    """One rank of an engine. Sizes are bytes."""

    weights: dict[str, int]  # by scheme
    token: int  # keys and values of one token
    room: int  # for weights and cache
    colocated: bool

    def tokens(self, scheme: str) -> int:
        """How many tokens' keys and values fit beside the weights."""
        return max(0, self.room - self.weights[scheme]) // self.token


@dataclass(frozen=True)
class Footprint:
    """Memory that a recipe would need."""

    config: RunConfig
    arch: Arch
    described_by: Path  # the config.json
    tokens: int  # of one pass on one rank
    recompute: bool
    stages: list[Stage]
    engine: EngineFootprint | None  # None: not SGLang
    notes: list[str]
    gpu: int

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.total)

    def phases(self, stage: Stage) -> dict[str, dict[str, int]]:
        """Return the memory in use on a stage's GPU, by phase and by name."""
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


@dataclass(frozen=True)
class Models:
    """The shapes of the models that a run trains."""

    described_by: Path  # the policy's config.json
    policy: Arch
    critic: Arch | None


def find_models(config: RunConfig, model_config: Path | None = None) -> Models:
    """Read the shapes of the models that a run trains.

    Args:
        model_config: the model's config.json or the folder it is in; None takes ``model.path``'s,
            else the shape that a warm start would make there, else one that ships under its name.

    Raises:
        ConfigError: no config is found.
    """
    if model_config is None and config.warmstart.steps and not Path(config.model.path).exists():
        from qurl_megatron.training.warmstart import shape_of

        path = Path(config.model.path) / "config.json"
        policy = critic = read_arch(shape_of(config.data, config.warmstart))
    else:
        path = _find("model.path", config.model.path, model_config)
        policy = critic = read_arch(read_json(path))
    if config.algo.advantage != "gae":
        return Models(path, policy, None)
    if config.critic.path:
        critic = read_arch(read_json(_find("critic.path", config.critic.path, None)))
    return Models(path, policy, replace(critic, tied=False))


def check_division(config: RunConfig, models: Models) -> None:
    """Refuse a layout that the models do not divide over.

    Raises:
        ConfigError: policy or critic do not divide over the training ranks, or Megatron does not
            compute them so.
    """
    check_policy_division(config, models.policy)
    if models.critic:
        try:
            _check_division(config, models.critic)
        except ConfigError as error:
            raise ConfigError(f"critic.path={config.critic.path}: {error}") from None


def _check_division(config: RunConfig, arch: Arch) -> None:
    parallel = config.parallel
    arch.check_parallel(parallel.tensor, parallel.pipeline)
    arch.check_megatron(parallel.tensor, sequence=parallel.sequence)


def check_policy_division(config: RunConfig, arch: Arch) -> None:
    """``check_division``, of the policy alone."""
    _check_division(config, arch)
    tensor = config.engine_tensor
    if not engine_divides(arch, tensor):
        raise ConfigError(
            f"rollout.engine_tensor={tensor} does not divide the model's "
            f"num_attention_heads={arch.heads} and num_key_value_heads={arch.kv_heads}"
        )


def check_layout(config: RunConfig) -> None:
    """``check_division``, as far as it takes a moment: of models whose sizes are known.

    Raises:
        ConfigError: as ``check_division``; a config.json that is there cannot be read.
    """
    path, warmstart = Path(config.model.path), config.warmstart
    if warmstart.steps and not path.exists():
        sizes = {
            "model_type": "qwen2",
            "hidden_size": warmstart.hidden,
            "intermediate_size": warmstart.intermediate,
            "num_hidden_layers": warmstart.layers,
            "num_attention_heads": warmstart.heads,
            "num_key_value_heads": warmstart.kv_heads,
            "vocab_size": 1,  # known when there is a tokenizer; nothing is divided by it
        }
        check_division(config, Models(path, read_arch(sizes), None))
    elif path.exists() or _shipped(path).is_file():
        check_division(config, find_models(config))


def footprint(config: RunConfig, models: Models, *, gpu_gib: float = 80) -> Footprint:
    """Add up the memory in use on the GPUs of trainer and engines.

    Args:
        gpu_gib: memory of a GPU, in GiB.

    Raises:
        ConfigError: the model does not divide over the ranks or engines.
    """
    check_division(config, models)
    parallel = config.parallel
    options = dict(
        distributed=config.optimizer.distributed,
        overlap=config.optimizer.overlap_grad_reduce,
        itemsize=config.model.itemsize,
    )
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    passed = _pass(config, longest)
    stages = []
    for index in range(parallel.pipeline):
        policy = held_from_shapes(models.policy, parallel, index, **options)
        critic = None
        if models.critic:
            critic = held_from_shapes(models.critic, parallel, index, critic=True, **options)
        stages.append(_stage(config, models.policy, passed, index, policy, critic))
    gpu = int(gpu_gib * GIB)
    engine = None
    if config.rollout.kind.takes_gpus:
        engine = _engine(config, models.policy, max(stage.at_rest for stage in stages), gpu)
    total = Footprint(
        config=config,
        arch=models.policy,
        described_by=models.described_by,
        tokens=passed.tokens,
        recompute=config.model.recompute,
        stages=stages,
        engine=engine,
        notes=[],
        gpu=gpu,
    )
    total.notes.extend(_notes(total, longest))
    return total


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
        arch_of(folder)  # raises the fault of a broken folder
        return folder / "config.json"
    shipped = _shipped(folder)
    if not shipped.is_file():
        shapes = ", ".join(sorted(p.name for p in SHAPES.glob("*/")))
        raise ConfigError(
            f"{key}={model_path} does not exist, and launch/models has no {folder.name} "
            f"(but {shapes}); name the model's config.json with --config"
        )
    return shipped


def _shipped(model_path: Path) -> Path:
    """The config.json that ships for a model of that name, where one does."""
    return SHAPES / model_path.name / "config.json"


def _pass(config: RunConfig, longest: int) -> Pass:
    """The largest pass: responses of full length, or the token budget where that is more."""
    train, parallel = config.train, config.parallel
    tokens = max(train.max_tokens, longest) if train.max_tokens else train.micro_batch * longest
    chunks = 1 if parallel.context == 1 else 2 * parallel.context  # of a sequence
    return Pass(
        tokens=round_up(tokens, chunks * parallel.tensor) // parallel.context,
        tensor=parallel.tensor,
        sequence=parallel.sequence and parallel.tensor > 1,
        itemsize=config.model.itemsize,
        transposed=not train.packed and (train.micro_batch > 1 or train.max_tokens > 0),
        fp32_output=config.model.fp32_output and config.model.dtype != "float32",
    )


def _stage(
    config: RunConfig, arch: Arch, passed: Pass, index: int, policy: Held, critic: Held | None
) -> Stage:
    parallel = config.parallel
    recompute = config.model.recompute
    layers = arch.num_layers // parallel.pipeline
    # 1F1B: a stage has as many passes under way as there are stages from it to the end.
    passes = min(parallel.pipeline - index, _passes_per_update(config))
    kept = memory.stage_activations(arch, layers, passed, recompute=recompute)
    one_layer = memory.layer_activations(arch, passed)
    codes = cast = 0
    if config.train.align != "none":
        stage_layers = range(index * layers, (index + 1) * layers)
        # FP8 codes without FP8 hardware are multiplied in FP32, of which this counts half.
        codes, cast = memory.aligned(arch, stage_layers, parallel.tensor, passed.itemsize)
    in_reference = config.algo.kl_coef > 0 and config.algo.reference_memory == "device"
    return Stage(
        layers=layers,
        policy=policy,
        reference=policy.parameters * passed.itemsize if in_reference else 0,
        codes=codes,
        critic=critic,
        passes=passes,
        activations=passes * kept,
        # Made again, and its gradients; without recomputation these alone.
        working=(2 * one_layer if recompute else one_layer) + cast,
        logits=memory.logits(arch, passed) if index == parallel.pipeline - 1 else 0,
        publishing=memory.publishing(
            policy.largest, round(config.sync.bucket_mb * MIB), slots=SLOTS
        ),
    )


def _passes_per_update(config: RunConfig) -> int:
    """Passes of one rank in one update, where all take a fixed number of responses."""
    if config.train.max_tokens:
        return config.parallel.pipeline  # unknown; as many as can be under way
    per_rank = config.responses_per_step // (config.algo.minibatches * config.parallel.data)
    return per_rank // config.train.micro_batch


def engine_divides(arch: Arch, tensor: int) -> bool:
    """Whether an engine of ``tensor`` GPUs can split the heads; keys and values may be shared."""
    return not (arch.heads % tensor or (arch.kv_heads % tensor and tensor % arch.kv_heads))


def _engine(config: RunConfig, arch: Arch, trainer: int, gpu: int) -> EngineFootprint:
    tensor = config.rollout.engine_tensor
    colocated = config.rollout.colocate
    free = memory.engine_free(gpu, trainer if colocated else None)
    itemsize = config.model.itemsize
    return EngineFootprint(
        weights={
            scheme: memory.engine_weights(arch, scheme, tensor, itemsize) for scheme in SERVED
        },
        token=memory.cached_token(arch, tensor, itemsize),
        room=int(free * _static_fraction(config)),
        colocated=colocated,
    )


def _mapping_engines(config: RunConfig) -> int:
    """Engine ranks that map, by the memory transport, a trainer's slots on a GPU not their own."""
    rollout = config.rollout
    elsewhere = rollout.urls or rollout.rendezvous or not rollout.kind.takes_gpus
    if elsewhere or config.sync.on_one_machine != "memory":
        return 0
    return min(NODE, rollout.engines * rollout.engine_tensor) - rollout.colocate


def _static_fraction(config: RunConfig) -> float:
    """SGLang's share of the memory that it finds free, for weights and cache."""
    for argument in config.rollout.engine_args:
        option, _, value = argument.partition("=")
        if option == "--mem-fraction-static" and value:
            return float(value)
    return STATIC


def _notes(run: Footprint, longest: int) -> list[str]:
    config, notes = run.config, []
    _, phase, needed = run.fullest
    if needed > run.gpu:
        fix = (
            "lower --mem-fraction-static in rollout.engine_args"
            if run.engine and run.engine.colocated and phase in ("publish", "save")
            else "raise parallel.tensor, parallel.pipeline or parallel.data"
        )
        notes.append(
            f"{needed / GIB:.1f} GiB do not fit in {run.gpu / GIB:g} in phase {phase}: {fix}"
        )
    if run.engine and run.engine.tokens(config.quant.scheme) < longest:
        notes.append(
            f"an engine rank has room for {run.engine.tokens(config.quant.scheme)} tokens, one "
            f"prompt and response may take {longest}"
        )
    longest_allowed = longest_prompt(config.rollout, run.arch)
    if longest_allowed is not None and 0 < longest_allowed < config.data.max_prompt_tokens:
        notes.append(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest} is more than the "
            f"{run.arch.max_position} tokens that the model takes (max_position_embeddings): a run "
            f"refuses prompts of more than {longest_allowed} tokens; lower data.max_prompt_tokens "
            f"to {longest_allowed}, which leaves them out, or lower rollout.max_new_tokens"
        )
    if simulated := simulation(config.quant.scheme):
        notes.append(simulated)
    if 0 < config.train.max_tokens < longest:
        notes.append(
            f"train.max_tokens={config.train.max_tokens} is less than one prompt and response of "
            f"full length, {longest}; such a response has a pass of its own"
        )
    return notes
