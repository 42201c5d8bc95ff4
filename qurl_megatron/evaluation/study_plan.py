"""Read a study file as cells: one ``qurl train`` for each method, scheme, warm start and seed.

Everything is checked before the first run starts, so that no misspelt key shows up hours later.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from qurl_megatron.config import RunConfig, load, to_toml
from qurl_megatron.config.arguments import add_overrides
from qurl_megatron.config.keys import require
from qurl_megatron.config.load import build, read_tables
from qurl_megatron.data.questions import held_out_questions
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.shipped import shipped, shipped_names

NAME = re.compile(r"[\w.+-]+")  # goes into file names


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: its changes to the recipe, and its name in tables and pictures."""

    label: str = ""
    """Its name in tables and pictures; empty: its key."""

    overrides: tuple[str, ...] = ()
    """``section.key=value``, over the overrides of the study."""

    schemes: tuple[str, ...] = ()
    """Its own choice of schemes, e.g. ["none"] for unquantized rollouts; without the key it runs
    under all schemes of the study."""

    seeds: tuple[int, ...] = ()
    """Its own choice of seeds, e.g. more of them for a small difference; without the key it runs
    with all seeds of the study."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of a study file."""

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

    warmstart_seeds: tuple[int, ...] = ()
    """Values of warmstart.seed, each a model of its own beside model.path, which all cells of that
    seed start from: results then hold for more than one model. Empty: one model, the recipe's."""

    final_prompts: int = 0
    """Held-out questions that each trained policy is asked at the end, greedily and unquantized,
    e.g. 2048 where differences are small; 0: train.eval_prompts, as during training."""

    keep_checkpoints: bool = True
    """False deletes the checkpoints of each run once it is done and evaluated, for large models
    of which only the measurements count."""

    methods: dict = field(default_factory=dict)
    """One table [methods.NAME] each, in the order of tables and legends."""

    def __post_init__(self) -> None:
        require(bool(self.recipe), "recipe is missing; name the TOML recipe that the study varies")
        require(bool(self.methods), "a study needs at least one table [methods.NAME]")
        require(
            self.final_prompts >= 0, f"final_prompts must be 0 or more, got {self.final_prompts}"
        )
        for key, least in (("schemes", 1), ("seeds", 1), ("warmstart_seeds", 0)):
            values = getattr(self, key)
            require(
                len(values) >= least and len(set(values)) == len(values),
                f"{key} must be different values, at least {least}, got {list(values)}",
            )


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    method: str
    scheme: str
    warmstart_seed: int | None  # None: the recipe's own model
    seed: int
    overrides: tuple[str, ...]  # all but train.run_dir
    config: RunConfig  # the recipe with these overrides
    final_prompts: int = 0  # as in the study file

    @property
    def name(self) -> str:
        """Also the name of its folder."""
        warm = "" if self.warmstart_seed is None else f"-warm-{self.warmstart_seed}"
        return f"{self.method}-{self.scheme}{warm}-seed-{self.seed}"

    @property
    def steps(self) -> int:
        return self.config.train.steps

    @property
    def final_questions(self) -> int:
        """How many held-out questions the trained policy is asked; 0: it is not evaluated."""
        return self.final_prompts or self.config.train.eval_prompts


def run_dir(out: Path, cell: Cell) -> Path:
    return out / "runs" / cell.name


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
        """Return the recipe that all runs share, by section."""
        return tomllib.loads(to_toml(load(self.recipe, self.settings.overrides)))


def read_study(file: Path | str, overrides: Sequence[str] = ()) -> Study:
    """Read a study file, add ``overrides`` to its own, and check every cell's recipe.

    Raises:
        ConfigError: no such file or recipe, an unknown key, or a cell whose recipe is not valid.
    """
    file = shipped(file, "launch/studies")
    ours = f"these ship: {shipped_names('launch/studies')}"
    settings = build(Settings, read_tables(file, "study", ours))
    settings = replace(settings, overrides=(*settings.overrides, *overrides))
    methods = {name: _method(name, settings) for name in settings.methods}
    places = (file.parent / settings.recipe, Path(settings.recipe))
    recipe = next((Path(os.path.normpath(path)) for path in places if path.is_file()), None)
    if recipe is None:
        raise ConfigError(
            f"recipe {settings.recipe} is neither beside {file} nor here; fix its key recipe"
        )
    shared = load(recipe, settings.overrides)
    require(
        shared.warmstart.steps > 0 or not settings.warmstart_seeds,
        f"{settings.recipe}: warmstart_seeds needs warmstart.steps above 0, which makes the models",
    )
    require(
        shared.reward.right_or_wrong,
        f"{settings.recipe}: a study compares accuracies, and only scores of 0 and 1 have one; set "
        "reward.kind, and reward.failed to 0 or 1",
    )
    cells = tuple(_cells(recipe, settings, methods, shared.model.path))
    if settings.final_prompts:
        _require_final_questions(cells)
    return Study(file, settings.title or file.stem, recipe, settings, methods, cells)


def _require_final_questions(cells: Sequence[Cell]) -> None:
    """Raise ConfigError where a cell's data cannot ask its trained policy anything."""
    for cell in {repr(cell.config.data): cell for cell in cells}.values():
        answers = bool(cell.config.reward.kind)
        try:
            held_out_questions(cell.config.data, cell.final_prompts, answers=answers)
        except ConfigError as error:
            raise ConfigError(f"final_prompts={cell.final_prompts}: {error}") from None


def _method(name: str, settings: Settings) -> Method:
    require(
        NAME.fullmatch(name) is not None,
        f"methods.{name}: a method's name is of letters, digits and _ . + -; give it a label",
    )
    table = settings.methods[name]
    require(isinstance(table, dict), f"methods.{name} must be a table [methods.{name}]")
    every = {"schemes": list(settings.schemes), "seeds": list(settings.seeds)}
    table = {"label": name, **every, **table}
    method = build(Method, table, f"methods.{name}.")
    own = {setting.partition("=")[0] for setting in method.overrides}
    require(
        not settings.warmstart_seeds or not own & {"model.path", "warmstart.seed"},
        f"methods.{name}.overrides: warmstart_seeds sets model.path and warmstart.seed of every "
        "run; leave them out",
    )
    require(
        bool(method.schemes),
        f'methods.{name}.schemes is empty; leave it out for all schemes, or set it to ["none"] for '
        "unquantized rollouts",
    )
    require(
        bool(method.seeds),
        f"methods.{name}.seeds is empty; leave it out for all seeds of the study",
    )
    return method


def _cells(
    recipe: Path, settings: Settings, methods: dict[str, Method], model: str
) -> Iterator[Cell]:
    """Yield the cells seed by seed, so that a study stopped early has every method once."""
    chosen = (seed for method in methods.values() for seed in method.seeds)
    seeds = dict.fromkeys([*settings.seeds, *chosen])
    for seed, warm in product(seeds, settings.warmstart_seeds or (None,)):
        start: tuple[str, ...] = ()
        if warm is not None:
            start = (f"warmstart.seed={warm}", f"model.path={model}-warm-{warm}")
        for name, method in methods.items():
            if seed not in method.seeds:
                continue
            for scheme in method.schemes:
                # The later one wins.
                overrides = (
                    *settings.overrides,
                    f"quant.scheme={scheme}",
                    *method.overrides,
                    *start,
                    f"train.seed={seed}",
                )
                try:
                    config = load(recipe, overrides)
                except ConfigError as error:
                    raise ConfigError(f"methods.{name}: {error}") from None
                require(
                    config.quant.scheme == scheme,
                    f"methods.{name}: its overrides set quant.scheme={config.quant.scheme} where "
                    f'the study sets {scheme}; use the key schemes (["none"] for unquantized '
                    "rollouts)",
                )
                yield Cell(name, scheme, warm, seed, overrides, config, settings.final_prompts)


def add_study_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("study", type=Path, help="TOML study file; some ship in launch/studies")
    add_overrides(command, "of every run, e.g. train.steps=2")
    command.add_argument(
        "--out", type=Path, required=True, help="folder of its runs, tables and pictures"
    )
    command.add_argument("--jobs", type=int, default=1, help="runs at once, sharing the cores")
    command.add_argument(
        "--only", default="*", metavar="PATTERN", help="cells to run or list, e.g. 'acr*-int8-*'"
    )
    command.add_argument("--status", action="store_true", help="only show how far each cell is")


def study(arguments: argparse.Namespace) -> int:
    """Run a grid of methods, schemes and seeds of one recipe, and draw its tables and pictures."""
    from qurl_megatron.evaluation.study import run

    return run(arguments)
