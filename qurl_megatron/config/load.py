"""From a TOML file and ``section.key=value`` overrides to one checked ``RunConfig``."""

import copy
import dataclasses
import hashlib
import json
import re
import tomllib
import typing
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from qurl_megatron.config import sections
from qurl_megatron.config.algorithms import ALGORITHMS
from qurl_megatron.config.keys import Section, did_you_mean, require, rules_of
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.shipped import shipped, shipped_names
from qurl_megatron.schemes import SCHEMES

LONGEST_NAME = 200  # bytes of ASCII; file systems take 255
LISTED = 10  # keys of a section that a message names


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. Only the CLI and the training loop see it; parts below take their section."""

    model: sections.ModelConfig
    data: sections.DataConfig
    parallel: sections.ParallelConfig = field(default_factory=sections.ParallelConfig)
    optimizer: sections.OptimizerConfig = field(default_factory=sections.OptimizerConfig)
    quant: sections.QuantConfig = field(default_factory=sections.QuantConfig)
    algo: sections.AlgoConfig = field(default_factory=sections.AlgoConfig)
    correction: sections.CorrectionConfig = field(default_factory=sections.CorrectionConfig)
    critic: sections.CriticConfig = field(default_factory=sections.CriticConfig)
    guard: sections.GuardConfig = field(default_factory=sections.GuardConfig)
    rollout: sections.RolloutConfig = field(default_factory=sections.RolloutConfig)
    reward: sections.RewardConfig = field(default_factory=sections.RewardConfig)
    train: sections.TrainConfig = field(default_factory=sections.TrainConfig)
    checkpoint: sections.CheckpointConfig = field(default_factory=sections.CheckpointConfig)
    sync: sections.SyncConfig = field(default_factory=sections.SyncConfig)
    observe: sections.ObserveConfig = field(default_factory=sections.ObserveConfig)
    warmstart: sections.WarmstartConfig = field(default_factory=sections.WarmstartConfig)

    def __post_init__(self) -> None:
        self._check_step()
        self._check_schedule()
        self._check_engines()
        self._check_codes()

    def _check_step(self) -> None:
        """Check the sizes of a step, and its algorithm."""
        responses = self.responses_per_step
        rows = self.train.micro_batch if not self.train.max_tokens else 1
        per_update = self.algo.minibatches * self.parallel.data * rows
        require(
            responses % per_update == 0,
            f"data.prompts_per_step * rollout.samples_per_prompt = {responses} responses must be "
            "a multiple of algo.minibatches * parallel.data * train.micro_batch = "
            f"{self.algo.minibatches} * {self.parallel.data} * {rows} = {per_update}; "
            "change one of them",
        )
        parallel = self.parallel
        stage = parallel.world_size // parallel.pipeline
        require(
            stage % parallel.expert == 0,
            f"parallel.expert={parallel.expert} must divide the ranks of a pipeline stage, "
            f"parallel.tensor * parallel.context * parallel.data = {stage}; change one of them",
        )
        require(
            parallel.expert == 1 or parallel.expert % parallel.tensor == 0,
            f"parallel.expert={parallel.expert} must be 1, or a multiple of "
            f"parallel.tensor={parallel.tensor}: ranks with parts of one matrix have different "
            "experts; change one of them",
        )
        dispatcher, same_tokens = parallel.expert_dispatcher, parallel.tensor * parallel.context
        if dispatcher != "alltoall":
            require(
                parallel.expert > 1,
                f"parallel.expert_dispatcher={dispatcher} brings tokens to experts on other ranks, "
                "and with parallel.expert=1 none travels; leave it out",
            )
            require(
                self.model.dtype == "bfloat16",
                f"parallel.expert_dispatcher={dispatcher} carries tokens in BF16 alone, and "
                f"model.dtype={self.model.dtype}; leave it out",
            )
        if dispatcher == "hybridep" and self.train.max_tokens:
            require(
                parallel.expert <= same_tokens,
                "parallel.expert_dispatcher=hybridep needs equally many tokens on all ranks that "
                "exchange them, and with train.max_tokens those of data ranks differ; set deepep, "
                f"or parallel.expert to parallel.tensor * parallel.context = {same_tokens} at most",
            )
        require(
            self.algo.deal == "responses"
            or self.data.prompts_per_step % self.algo.minibatches == 0,
            f"data.prompts_per_step={self.data.prompts_per_step} must be a multiple of "
            f"algo.minibatches={self.algo.minibatches} for algo.deal=groups; change one of them, "
            "or set algo.deal=responses",
        )
        if self.rollout.samples_per_prompt == 1:
            require(
                self.algo.advantage in ("reinforce_pp", "gae"),
                "rollout.samples_per_prompt must be 2 or more for algo.advantage="
                f"{self.algo.advantage}: a group of one has no spread",
            )
            require(
                not self.algo.dynamic_sampling,
                "rollout.samples_per_prompt must be 2 or more for algo.dynamic_sampling: a group "
                "of one is always all right or all wrong",
            )
        require(
            not self.train.packed or self.train.max_tokens > 0,
            "train.packed needs train.max_tokens, the tokens of one forward/backward pass",
        )
        require(
            self.algo.kl_coef > 0 or not self.algo.reference,
            f"algo.reference={self.algo.reference} needs a penalty, but algo.kl_coef is 0; set "
            "both or neither",
        )

    def _check_schedule(self) -> None:
        """Check that a falling learning rate has updates left to fall in."""
        if self.optimizer.schedule == "constant" or not self.train.steps:
            return
        checked = {"optimizer": self.policy_optimizer}
        if self.algo.advantage == "gae":
            checked["critic"] = self.critic_optimizer
        for section, optimizer in checked.items():
            require(
                optimizer.warmup_steps < optimizer.decay_steps,
                f"{section}.warmup_steps={optimizer.warmup_steps} must be below the "
                f"{optimizer.decay_steps} updates at whose end optimizer.schedule="
                f"{optimizer.schedule} has fallen; lower it, or set optimizer.decay_steps",
            )

    def _check_engines(self) -> None:
        """Check the engines' abilities."""
        kind = self.rollout.kind
        require(
            self.sync.pause == "retract"
            or kind.exact_pause != ""
            and kind.exact_pause in self.rollout.engine_args,
            "sync.pause=in_place needs rollout.backend=sglang and --disable-overlap-schedule among "
            "rollout.engine_args: the token that SGLang overlaps with the pause would be said to "
            "come from the wrong version",
        )
        require(
            not (self.model.fp32_output and self.model.dtype == "bfloat16") or kind.wide_output,
            "model.fp32_output: embedded engines round logits to model.dtype; leave it out, or set "
            "rollout.backend=sglang or model.dtype=float32",
        )
        started = kind.wide_output and not self.rollout.adopts
        require(
            not started
            or self.model.fp32_output == ("--enable-fp32-lm-head" in self.rollout.engine_args),
            "model.fp32_output and --enable-fp32-lm-head among rollout.engine_args go together: "
            "else one side rounds logits to BF16 and the other does not; set both or neither",
        )
        require(
            not (self.rollout.deals_experts and self.sync.transport == "group"),
            "sync.transport=group cuts every expert over an engine's ranks, and --ep-size among "
            "rollout.engine_args deals them whole; leave it out, or set another sync.transport",
        )
        require(
            self.model.routing_replay != "rollout"
            or self.rollout.max_staleness == 0
            or self.sync.pause == "in_place",
            "model.routing_replay=rollout needs sync.pause=in_place where rollout.max_staleness "
            "lets engines write during an update: with sync.pause=retract they compute a "
            "response's first tokens again, and would report the experts of the new weights with "
            "log-probs of the old ones",
        )
        require(
            not self.rollout.environment or self.reward.kind != "exact",
            "reward kind exact compares all that the policy wrote, and a conversation with "
            "rollout.environment has several turns; take last_number, math or a function, which "
            "gets a line for each turn",
        )
        require(
            self.sync.transport != "relay" or self.rollout.each_node,
            "sync.transport=relay reaches engines on the trainer's own machines; set "
            "rollout.each_node=true, or sync.transport=files or group",
        )
        require(
            not (self.rollout.colocate and self.sync.transport == "group"),
            "sync.transport=group needs engines on GPUs of their own: with rollout.colocate both "
            "ends would be on one GPU, which NCCL refuses; set sync.transport=auto",
        )
        require(
            kind.few_bits or not SCHEMES[self.quant.scheme].simulated,
            f"quant.scheme={self.quant.scheme} is simulated by the embedded engine alone; set "
            "rollout.backend=embedded, or quant.scheme to int8 or fp8",
        )

    def _check_codes(self) -> None:
        """Check quant.rounding and train.align."""
        # Not the section's own check: after the guard's switch a run goes on with scheme none.
        require(
            self.quant.scheme != "none" or self.quant.rounding == "nearest",
            f"quant.rounding={self.quant.rounding} has no codes to choose from with "
            "quant.scheme=none; leave it out, or set quant.scheme to int8 or fp8",
        )
        align = self.train.align
        if align == "none":
            return
        require(
            self.quant.scheme != "none",
            f"train.align={align} computes as engines with quantized weights do, and "
            "quant.scheme=none leaves them as they are; set train.align=none, or a quant.scheme",
        )
        require(
            not SCHEMES[self.quant.scheme].block,
            f"train.align={align} computes with a scale per output channel, and "
            f"quant.scheme={self.quant.scheme} has one per square; set train.align=none, or "
            "quant.scheme to int8 or fp8",
        )
        require(
            self.quant.rounding == "nearest",
            f"train.align={align} computes with the nearest codes, and "
            f"quant.rounding={self.quant.rounding} publishes others; set quant.rounding=nearest "
            "or train.align=none",
        )
        require(
            align != "full" or self.parallel.tensor % self.engine_tensor == 0,
            f"train.align=full needs parallel.tensor={self.parallel.tensor} to be a multiple of "
            f"rollout.engine_tensor={self.engine_tensor}: each engine rank quantizes what it has "
            "of a token, and that must be whole parts of the trainer's; change one of them, or set "
            "train.align=weights",
        )

    @property
    def policy_optimizer(self) -> sections.OptimizerConfig:
        """The policy's optimizer, with the length of its schedule."""
        ahead = self.critic.ahead_steps if self.algo.advantage == "gae" else 0
        return self._over(self.optimizer, self.train.steps - ahead)

    @property
    def critic_optimizer(self) -> sections.OptimizerConfig:
        """The critic's optimizer: the policy's with its own learning rate and warm-up."""
        settings = dataclasses.replace(
            self.optimizer, lr=self.critic.lr, warmup_steps=self.critic.warmup_steps
        )
        return self._over(settings, self.train.steps)

    def _over(self, optimizer: sections.OptimizerConfig, steps: int) -> sections.OptimizerConfig:
        updates = max(steps, 0) * self.algo.epochs * self.algo.minibatches
        return dataclasses.replace(optimizer, decay_steps=optimizer.decay_steps or updates)

    @property
    def own_code(self) -> dict[str, str]:
        """The user's own Python, by key; empty where there is none."""
        return {
            "algo.function": self.algo.function,
            "reward.function": self.reward.function,
            "rollout.environment": self.rollout.environment,
        }

    @property
    def engine_tensor(self) -> int:
        """Over how many ranks an engine splits its layers."""
        return self.rollout.engine_tensor if self.rollout.kind.takes_gpus else 1

    @property
    def responses_per_step(self) -> int:
        return self.data.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def transport(self) -> str:
        """The transport that sync.transport means where memory has room."""
        return self.sync.chosen(each_node=self.rollout.each_node)

    @property
    def scores_first_minibatch(self) -> bool:
        """Whether a step's first minibatch needs its proximal log-probs before its update.

        Otherwise the update's own pass computes them.
        """
        algo = self.algo
        penalised = algo.kl_coef > 0 and algo.kl_in == "reward"
        replayed = self.model.routing_replay == "proximal" and algo.minibatches > 1
        early = penalised or replayed or self.correction.rejects or self.train.save_rollouts
        return algo.epochs > 1 or early


SECTIONS: dict[str, type[Section]] = typing.get_type_hints(RunConfig)
"""A run's sections by their names in recipes."""


def load(
    path: str | Path,
    overrides: typing.Sequence[str] = (),
    *,
    named_by: typing.Sequence[str] | None = None,
) -> RunConfig:
    """Read a recipe.

    Args:
        path: TOML file, one table per section; or the name of a recipe that ships.
        overrides: ``section.key=value`` strings; values are TOML (bare words are strings).
        named_by: the overrides that name a default train.run_dir; None: all.

    Raises:
        ConfigError: missing file, bad TOML, unknown section or key, value of the wrong type or
            range.
    """
    path = shipped(path, "launch/recipes")
    tables = read_tables(path, "recipe", f"these ship: {shipped_names('launch/recipes')}")
    algo = tables.get("algo")
    if isinstance(algo, dict):
        for name, value in _preset(algo.get("name")).items():
            _set(tables, name, value, over=False)
    settings = [_parse(override) for override in overrides]
    for key, value in [*_preset(dict(settings).get("algo.name")).items(), *settings]:
        _set(tables, key, value)
    config = build(RunConfig, tables, kind="section")
    for key, code in config.own_code.items():
        config = _with(config, key, sections.named_beside(path.parent, code))
    if not config.train.run_dir:
        default = _default_run_dir(path, settings if named_by is None else map(_parse, named_by))
        config = _with(config, "train.run_dir", default)
    if config.rollout.rendezvous == "auto" or (
        config.rollout.each_node and not config.rollout.rendezvous
    ):
        config = _with(config, "rollout.rendezvous", f"{config.train.run_dir}/engines")
    return config


def overridden(cls: type, tables: dict[str, Any], overrides: typing.Sequence[str]) -> Any:
    """Build a dataclass of some of a recipe's sections from tables and overrides, as ``load``."""
    for override in overrides:
        _set(tables, *_parse(override))
    return build(cls, tables, kind="section")


def _with(config: RunConfig, key: str, value: str) -> RunConfig:
    section, name = key.split(".")
    changed = dataclasses.replace(getattr(config, section), **{name: value})
    return dataclasses.replace(config, **{section: changed})


def read_tables(path: Path, kind: str, where: str) -> dict[str, Any]:
    """Return the tables of a TOML file; raise ``ConfigError`` if it is missing or bad.

    Args:
        kind: name of the file in messages.
        where: advice for a missing file.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{kind} {path} does not exist; {where}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{kind} {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{kind} {path} is not valid TOML: {error}") from None


def to_toml(config: Any) -> str:
    """Return sections, such as a ``RunConfig`` has, as TOML that reads back to equal ones."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        values = getattr(config, section.name)
        lines += [
            f"{f.name} = {_toml_value(getattr(values, f.name))}" for f in dataclasses.fields(values)
        ]
        lines.append("")
    return "\n".join(lines)


def _default_run_dir(recipe: Path, settings: typing.Iterable[tuple[str, Any]]) -> str:
    """Return runs/quickstart for a recipe, or runs/quickstart--quant.scheme-fp8 for a variant.

    The name has settings that change numbers, and layouts, which people compare.
    """
    variant = {}  # of several settings of a key the last one counts
    for key, value in settings:
        section, name = key.split(".")[:2]
        if section == "parallel" or rules_of(SECTIONS[section])[name] != "free":
            text = f"{value:.12g}" if type(value) is float else _toml_value(value)
            plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_")
            variant[key] = f"--{key}-{plain}"
    name = "".join([recipe.stem, *(variant[key] for key in sorted(variant))])
    if len(name) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: LONGEST_NAME - 9]}-{digest}"
    return f"runs/{name}"


def _parse(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not (equals and len(names) > 1 and all(names)):
        meant = " or ".join(f"{key}={text}" for key in keys_like(key.strip()))
        hint = f"; did you mean {meant}?" if equals and meant else ", e.g. quant.scheme=fp8"
        raise ConfigError(f"override {override!r} must look like section.key=value{hint}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word, such as fp8 or a path
    return key.strip(), value


def keys_like(name: str) -> list[str]:
    """Return the settings that were probably meant, as section.key."""
    names = [
        f"{name}.{key.name}"
        for name, section in SECTIONS.items()
        for key in dataclasses.fields(section)
    ]
    if name in names:
        return [name]
    if "." in name and (close := get_close_matches(name, names, n=1, cutoff=0.8)):
        return close
    last = {key: key.rpartition(".")[2] for key in names}
    close = get_close_matches(name.rpartition(".")[2], {*last.values()}, n=1, cutoff=0.8)
    similar = [key for key in names if last[key] in close]
    return [key for key in similar if not key.startswith("warmstart.")] or similar


def _set(tables: dict[str, Any], key: str, value: Any, *, over: bool = True) -> None:
    """Set ``section.key``, or a key of a table in it; without ``over`` only if it is unset."""
    *path, name = key.split(".")
    table = tables
    for depth, inner in enumerate(path, start=1):
        table = table.setdefault(inner, {})
        if not isinstance(table, dict):
            table_name = ".".join(path[:depth])
            raise ConfigError(f"{table_name} is not a table, so there is no {key}; it is {table!r}")
    if over or name not in table:
        table[name] = copy.deepcopy(value)  # another override may reach into it


def _preset(name: object) -> dict[str, Any]:
    """Return the settings of the preset ``algo.name``, by section.key."""
    # A name of another kind, or of no preset, is refused when the section is built.
    return ALGORITHMS.get(name, {}) if isinstance(name, str) else {}


def build(cls: type, values: dict[str, Any], prefix: str = "", *, kind: str = "key") -> Any:
    """Build an instance of the dataclass ``cls`` from TOML values.

    Args:
        prefix: of the names in messages, e.g. "quant.".
        kind: a word for those names in messages.

    Raises:
        ConfigError: unknown name, or value of the wrong type or range.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            close = get_close_matches(name, fields, n=1)
            hint = f"known: {', '.join(fields)}"
            if close:
                hint = f"did you mean {prefix}{close[0]}?"
            elif len(fields) > LISTED and prefix.rstrip(".") in SECTIONS:
                hint = f"`qurl show RECIPE` prints the {len(fields)} keys of {prefix.rstrip('.')}"
            raise ConfigError(f"unknown {kind} {prefix}{name}; {hint}")
    arguments = {}
    for name, hint in hints.items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            table = values.get(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{prefix}{name} must be a table [{name}], got {table!r}")
            arguments[name] = build(hint, table, f"{prefix}{name}.")
        elif name in values:
            value, allowed = values[name], fields[name].metadata.get("allowed")
            if hint is str and type(value) is not str and allowed:
                allowed.refuse(f"{prefix}{name}", value)  # says more than its type would
            arguments[name] = _convert(value, hint, f"{prefix}{name}")
    return cls(**arguments)


def _convert(value: Any, hint: Any, key: str) -> Any:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            named = ", ".join(str(choice) for choice in choices if choice != "")
            meant = did_you_mean(value, choices)
            raise ConfigError(f"{key} must be one of {named}, got {value!r}{meant}")
        return value
    if typing.get_origin(hint) is tuple:
        (item, _) = typing.get_args(hint)
        if not isinstance(value, list):
            raise ConfigError(f"{key} must be a list, got {value!r}")
        return tuple(_convert(v, item, key) for v in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{key} must be of type {hint.__name__}, got {value!r}")
    return value


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML's basic strings escape as JSON does
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_toml_value(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
        )
    return repr(value)
