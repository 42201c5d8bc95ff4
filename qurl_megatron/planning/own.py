"""A recipe's own layout, predicted before it runs, and again from what other layouts took."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from qurl_megatron.config import RunConfig, load
from qurl_megatron.errors import ConfigError
from qurl_megatron.planning.command import workload
from qurl_megatron.planning.constants import Constants, Gpu, constants_of
from qurl_megatron.planning.layouts import check_backend, own_choice
from qurl_megatron.planning.machine import CPU
from qurl_megatron.planning.measured import Measured, fitted
from qurl_megatron.planning.predict import Planner, Prediction
from qurl_megatron.training.footprint import find_models


@dataclass(frozen=True)
class Own:
    """One recipe as it is, on one machine."""

    recipe: Path
    overrides: tuple[str, ...]
    gpu: Gpu
    node: int  # GPUs of the machine; on a CPU any number
    prompt: float | None = None  # mean length, in tokens; None: the constants' share of the limit
    mean: float | None = None  # of a response

    @cached_property
    def config(self) -> RunConfig:
        return load(self.recipe, self.overrides)

    @property
    def busy(self) -> float:
        """GPUs, or cores of a CPU, that the layout keeps for itself."""
        choice, cores = own_choice(self.config), self.gpu.cores
        if cores is None:
            return choice.gpus
        sides = [
            self.gpu.busy(choice.engines * choice.engine_tensor),
            self.gpu.busy(choice.trainer),
        ]
        return cores * (min(1.0, sum(sides)) if self.config.rollout.max_staleness else max(sides))

    def predict(self, constants: Constants | None = None, mean: float | None = None) -> Prediction:
        """
        Args:
            constants: None: the machine's, before anything has been measured.
            mean: tokens of a response, where a run has told.

        Raises:
            ConfigError: the machine or the model is not known, or it does not fit.
        """
        config = self.config
        if not self.gpu.flops:
            raise ConfigError(f"qurl plan has no data sheet of {self.gpu.source}")
        check_backend(config.rollout, CPU if self.gpu.cores else "")
        constants = constants or constants_of(self.gpu, config.quant.scheme)
        work = workload(config, constants, mean or self.mean, self.prompt)
        planner = Planner(config, find_models(config), self.gpu, constants, work, node=self.node)
        choice = own_choice(config)
        found = planner.predict(choice, own=True)
        if found is None:
            raise ConfigError(f"{choice.label()} does not fit, or does not divide the model")
        return found


def extrapolated(target: Own, points: Sequence[tuple[Own, Measured]]) -> Prediction:
    """``target`` with the constants that measured runs imply.

    Raises:
        ConfigError: the target cannot be predicted.
    """
    length = median(run.length for _, run in points)
    constants = constants_of(target.gpu, target.config.quant.scheme)
    pairs = [(own.predict(constants, length), run) for own, run in points]
    return target.predict(fitted(constants, pairs), length)
