"""A layout's memory and step time, and all layouts of N GPUs by step time.

A step is the sum of its phases if they take turns (colocated, or ``rollout.max_staleness=0``), else
the longer of rollout and training, plus the publication that both wait for.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from qurl_megatron.config import ParallelConfig, RunConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.plan.footprint import GIB, STATIC, Footprint, Stage, footprint
from qurl_megatron.plan.layouts import Choice, applied, choices, own_choice, scaled
from qurl_megatron.plan.seconds import (
    Engine,
    Phase,
    Roofline,
    Workload,
    deal_out,
    publish_time,
    rollout_time,
    training_time,
)
from qurl_megatron.training.shapes import Models


@dataclass(frozen=True)
class Prediction:
    """One layout. Seconds are of a step."""

    choice: Choice
    config: RunConfig
    own: bool  # the recipe's, scaled
    bytes: int  # on the fullest GPU
    rollout: Phase
    train: Phase  # scores included
    publish: float
    reload: float
    tokens: float  # that train in a step

    @property
    def step(self) -> float:
        # From staleness 1 on, the next step's responses are generated while this one trains.
        ahead = self.config.rollout.max_staleness > 0
        longer, shorter = sorted((self.rollout.seconds, self.train.seconds), reverse=True)
        return longer + (0.0 if ahead else shorter) + self.publish + self.reload

    @property
    def speed(self) -> float:
        """Trained tokens, prompts included, per second and GPU."""
        return self.tokens / self.step / self.choice.gpus

    @property
    def limit(self) -> str:
        """The longest phase, and its largest part."""
        phases = {
            f"rollout: {self.rollout.limit}": self.rollout.seconds,
            f"train: {self.train.limit}": self.train.seconds,
            f"publish: {self.config.transport}": self.publish,
            "engines' release and reload": self.reload,
        }
        return max(phases, key=lambda name: phases[name])


@dataclass
class Planner:
    """Predicts layouts of one recipe on one kind of GPU."""

    config: RunConfig
    models: Models
    roof: Roofline
    work: Workload
    nearest: tuple[int, Choice, str] | None = None
    """The layout that came nearest among those that did not fit: its bytes, choice and phase."""
    fits: dict[Choice, tuple[RunConfig, Footprint] | None] = field(default_factory=dict)
    """Recipe and memory of each layout asked for; planners with other roofs share it."""
    stages: dict[tuple[ParallelConfig, bool, str], list[Stage]] = field(default_factory=dict)
    """The trainer's, by its layout, ``model.recompute`` and the transport."""

    def plan(self, gpus: int) -> list[Prediction]:
        """Return every layout of ``gpus`` GPUs that fits, fastest first; raise if none does."""
        train = self.config.train
        rows = 1 if train.max_tokens else train.micro_batch
        shares = self.work.responses // (self.work.minibatches * rows)
        recipe_choice = scaled(own_choice(self.config), gpus)
        predictions = []
        for choice in choices(
            self.models.policy, self.config.parallel, gpus, self.roof.node, shares
        ):
            prediction = self.predict(choice, own=choice == recipe_choice)
            if prediction is not None:
                predictions.append(prediction)
        if not predictions:
            raise self._nothing_fits(gpus)
        return sorted(predictions, key=lambda layout: (layout.step, layout.train.seconds))

    def scaling(self, up_to: int) -> list[Prediction]:
        """Return the fastest layout of one machine's GPUs, twice as many, and so on."""
        best = []
        gpus = self.roof.node
        while gpus <= up_to:
            with suppress(ConfigError):  # nothing fits
                best.append(self.plan(gpus)[0])
            gpus *= 2
        return best

    def predict(self, choice: Choice, *, own: bool) -> Prediction | None:
        """Predict a layout; return None if the batch does not divide or the layout does not fit."""
        if choice not in self.fits:
            self.fits[choice] = self._fitting(choice, own=own)
        fitting = self.fits[choice]
        if fitting is None:
            return None
        config, memory = fitting
        assert memory.engine is not None, "SGLang engines have a footprint"
        train = training_time(
            self.roof,
            [arch for arch in (self.models.policy, self.models.critic) if arch],
            config.parallel,
            self.work,
            deal_out(self.work, config.parallel.data, config.train),
            recompute=config.model.recompute,
            reference=config.algo.kl_coef > 0,
            all_scored=config.scores_first_minibatch,
        )
        return Prediction(
            choice=choice,
            config=config,
            own=own,
            bytes=memory.fullest[2],
            rollout=rollout_time(
                self.roof,
                Engine(self.models.policy, config.quant.scheme, choice.engine_tensor),
                self.work,
                engines=choice.engines,
                room=memory.engine.tokens(config.quant.scheme),
                requests=config.rollout.requests_per_engine,
            ),
            train=train,
            publish=publish_time(self.roof, config, self.models.policy),
            reload=self.roof.constants.reload if choice.colocated else 0.0,
            tokens=self.work.tokens,
        )

    def _fitting(self, choice: Choice, *, own: bool) -> tuple[RunConfig, Footprint] | None:
        """Return the recipe in that layout, with as much memory for its engines as fits."""
        gib = self.roof.gpu.gib
        # The recipe's own may try all of a GPU.
        usable = gib * GIB if own else self._usable
        for static in self._fractions(choice, own=own):
            try:
                config = applied(self.config, choice, node=self.roof.node, static=static)
                trainer = (choice.parallel, choice.recompute, config.transport)
                stages = self.stages.get(trainer)
                memory = footprint(config, self.models, gpu_gib=gib, stages=stages)
                self.stages[trainer] = memory.stages
            except ConfigError:  # it does not divide
                return None
            _, phase, size = memory.fullest
            if size <= usable:
                assert memory.engine is not None, "SGLang engines have a footprint"
                room = memory.engine.tokens(config.quant.scheme)
                return (config, memory) if room >= memory.longest else None
            if self.nearest is None or size < self.nearest[0]:
                self.nearest = (size, choice, phase)
            if not choice.colocated or phase in ("resume", "train"):
                return None  # no engine's memory is in these
        return None

    @property
    def _usable(self) -> float:
        """Bytes of a GPU that a layout may fill."""
        return self.roof.gpu.gib * GIB * (1 - self.roof.constants.spare)

    def _fractions(self, choice: Choice, *, own: bool) -> Iterable[float | None]:
        """Return SGLang's shares of free memory to try; None is the recipe's."""
        if own or choice.colocated == self.config.rollout.colocate is False:
            return [None]
        if not choice.colocated:
            return [STATIC]
        step = self.roof.constants.static_step
        return [round(STATIC - i * step, 2) for i in range(int(STATIC / step))]

    def _nothing_fits(self, gpus: int) -> ConfigError:
        """Return the error of ``plan`` if no layout fits."""
        if self.nearest is None:
            longest = self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens
            return ConfigError(
                f"no layout of {gpus} GPUs divides the model and the batch of "
                f"{self.work.responses} responses in {self.work.minibatches} minibatches, and has "
                f"room for a response of {longest} tokens, prompt included; give another --gpus"
            )
        size, choice, phase = self.nearest
        return ConfigError(
            f"no layout fits on {gpus} GPUs: the nearest, {choice.label()}, needs "
            f"{size / GIB:.0f} GiB in phase {phase}, of {self._usable / GIB:.0f} that may be "
            "filled; give more --gpus"
        )
