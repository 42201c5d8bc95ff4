"""A study file becomes cells: one whole ``qurl train`` for each method, scheme and seed.

Everything is checked here, before the first run starts: a misspelt key of the last method must not
come to light after hours.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qurl_megatron.config import load, to_toml
from qurl_megatron.config.keys import require
from qurl_megatron.config.load import build, read_tables
from qurl_megatron.kit.errors import ConfigError

METHODS, SCALE, MISMATCH = TABLES = ("methods", "scale", "mismatch")
NAME = re.compile(r"[\w.+-]+")  # goes into file names


@dataclass(frozen=True, kw_only=True)
class Method:
    """What one method changes in the recipe."""

    label: str = ""
    """How tables and pictures call it; empty: its key."""

    overrides: tuple[str, ...] = ()
    """``section.key=value``, over those of the study."""

    schemes: tuple[str, ...] = ()
    """Its own choice of schemes; ``false`` in the file stands for ["none"], unquantized rollouts;
    left out, it runs under all schemes of the study."""

    tables: tuple[str, ...] = (METHODS,)
    """Where it appears: "methods" compares objectives (the paper's Table 1, Figures 2 and 3),
    "scale" UAQ factors and learning rates (Table 4, Figure 9), "mismatch" what is done about the
    difference between rollout and trainer (docs/mismatch.md)."""

    family: str = ""
    """Of a method of the table "mismatch": the heading under which docs/mismatch.md has it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of a study file, beside its methods."""

    recipe: str = ""
    """Recipe of all runs; relative to the study file, or to where ``qurl`` is called."""

    title: str = ""
    """Heading of study.md; empty: the name of the study file."""

    overrides: tuple[str, ...] = ()
    """``section.key=value`` for every run."""

    schemes: tuple[str, ...] = ("int8",)
    """Values of quant.scheme."""

    seeds: tuple[int, ...] = (0,)
    """Values of train.seed."""

    trained_by_embedded: bool = False
    """Let one embedded engine, on CPUs, evaluate the trained policy where other engines generated.
    They cannot load it before it is converted."""

    keep_checkpoints: bool = True
    """False: those of a run that is done and evaluated are emptied, for large models of which only
    the measurements count. Such a run cannot be made longer."""

    methods: dict = field(default_factory=dict)
    """One table [methods.NAME] each, in the order of tables and legends."""

    def __post_init__(self) -> None:
        require(bool(self.recipe), "recipe is missing; name the TOML recipe that the study varies")
        require(
            bool(self.methods),
            "a study needs at least one table [methods.NAME]",
        )
        for key in ("schemes", "seeds"):
            values = getattr(self, key)
            require(
                bool(values) and len(set(values)) == len(values),
                f"{key} must be different values, at least one, got {list(values)}",
            )


@dataclass(frozen=True)
class Cell:
    """One run of the grid, with what the study must know of its recipe."""

    method: str
    scheme: str
    seed: int
    overrides: tuple[str, ...]  # all but train.run_dir
    steps: int
    evaluated: bool
    loads_runs: bool  # its engines load a checkpoint of a run as it is
    model_path: Path
    warmstarted: bool  # the run makes its model where there is none
    ranks: int
    engines: int
    engine_threads: int
    dtype: str
    uaq_scale: float
    lr: float

    @property
    def name(self) -> str:
        """Of its folder, too, so without what a shell or a recipe's value would read."""
        return f"{self.method}-{self.scheme}-seed-{self.seed}"

    @property
    def old_name(self) -> str:
        """Of the folders of older studies."""
        return f"{self.method},{self.scheme},seed={self.seed}"


@dataclass(frozen=True)
class Study:
    """A study file, read and checked."""

    file: Path
    title: str
    recipe: Path
    settings: Settings
    methods: dict[str, Method]
    cells: tuple[Cell, ...]

    def resolved(self) -> dict[str, Any]:
        """The recipe that all runs share, by section."""
        return tomllib.loads(to_toml(load(self.recipe, self.settings.overrides)))


def read_study(file: Path | str, overrides: Sequence[str] = ()) -> Study:
    """
    Args:
        overrides: ``section.key=value`` for every run, behind those of the file.

    Raises:
        ConfigError: no such file or recipe, unknown key, or a cell whose recipe is not valid.
    """
    file = Path(file)
    values = read_tables(file, "study", "some ship in launch/studies")
    settings = build(Settings, values)
    settings = replace(settings, overrides=(*settings.overrides, *overrides))
    methods = {
        name: _method(name, table, settings.schemes) for name, table in settings.methods.items()
    }
    recipe = _found(settings.recipe, file)
    require(
        load(recipe, settings.overrides).reward.right_or_wrong,
        f"{settings.recipe}: a study compares accuracies, and only scores of 0 and 1 have one; set "
        "reward.kind, and reward.failed to 0 or 1",
    )
    return Study(
        file=file,
        title=settings.title or file.stem,
        recipe=recipe,
        settings=settings,
        methods=methods,
        cells=tuple(_cells(recipe, settings, methods)),
    )


def _method(name: str, table: Any, schemes: tuple[str, ...]) -> Method:
    require(
        NAME.fullmatch(name) is not None,
        f"methods.{name}: a method's name is of letters, digits and _ . + -; give it a label",
    )
    require(isinstance(table, dict), f"methods.{name} must be a table [methods.{name}]")
    listed_schemes = table.get("schemes", list(schemes))
    table = {
        "label": name,
        **table,
        "schemes": ["none"] if listed_schemes is False else listed_schemes,
    }
    method = build(Method, table, f"methods.{name}.")
    require(
        bool(method.schemes),
        f"methods.{name}.schemes is empty; leave it out for all schemes, or set it to false for "
        "unquantized rollouts",
    )
    unknown = [table for table in method.tables if table not in TABLES]
    require(
        not unknown,
        f"methods.{name}.tables must be among {', '.join(TABLES)}, got {list(method.tables)}",
    )
    return method


def _found(recipe: str, study: Path) -> Path:
    for path in (study.parent / recipe, Path(recipe)):
        if path.is_file():
            return Path(os.path.normpath(path))
    raise ConfigError(f"recipe {recipe} is neither beside {study} nor here; fix its key recipe")


def _cells(recipe: Path, settings: Settings, methods: dict[str, Method]) -> Iterator[Cell]:
    """Seed by seed, so that a study stopped early has every method once."""
    for seed in settings.seeds:
        for name, method in methods.items():
            for scheme in method.schemes:
                overrides = (
                    *settings.overrides,
                    f"quant.scheme={scheme}",
                    *method.overrides,
                    f"train.seed={seed}",
                )
                try:
                    yield _cell(recipe, name, scheme, seed, overrides)
                except ConfigError as error:
                    raise ConfigError(f"methods.{name}: {error}") from None


def _cell(recipe: Path, method: str, scheme: str, seed: int, overrides: tuple[str, ...]) -> Cell:
    config = load(recipe, overrides)
    require(
        config.quant.scheme == scheme,
        f"its overrides set quant.scheme={config.quant.scheme} where the study sets {scheme}; "
        "use the key schemes (false for unquantized rollouts)",
    )
    return Cell(
        method=method,
        scheme=scheme,
        seed=seed,
        overrides=overrides,
        steps=config.train.steps,
        evaluated=config.train.eval_prompts > 0,
        loads_runs=config.rollout.kind.quantizes,
        model_path=Path(config.model.path),
        warmstarted=config.warmstart.steps > 0,
        ranks=config.parallel.world_size,
        engines=config.rollout.engines,
        engine_threads=config.rollout.engine_threads,
        dtype=config.model.dtype,
        uaq_scale=config.quant.uaq_scale,
        lr=config.optimizer.lr,
    )
