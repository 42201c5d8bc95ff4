"""A layout's memory and step time, and all layouts of N GPUs by step time.

In turn (colocated, or ``rollout.max_staleness=0``) a step is the sum of its phases; one step off it
is the longer of rollout and training, and the publication that both wait for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from qurl_megatron.config import RunConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.plan.constants import Constants, Gpu
from qurl_megatron.plan.footprint import GIB, STATIC, Footprint, footprint
from qurl_megatron.plan.layouts import Choice, applied, choices, own_choice, scaled
from qurl_megatron.plan.publish_time import publish_time
from qurl_megatron.plan.rollout_time import RolloutTime, decode_rank, rollout_time
from qurl_megatron.plan.training_time import Trainer, TrainingTime, deal_out, training_time
from qurl_megatron.plan.workload import Workload
from qurl_megatron.training.shapes import Models


@dataclass(frozen=True)
class Prediction:
    """One layout. Seconds are of a step."""

    choice: Choice
    config: RunConfig
    own: bool  # the recipe's, scaled
    bytes: int  # on the fullest GPU
    phase: str  # in which it is
    rollout: RolloutTime
    training: TrainingTime
    publish: float
    reload: float
    tokens: float  # that train in a step

    @property
    def ahead(self) -> bool:
        """The next step's responses are generated while this one trains."""
        return self.config.rollout.max_staleness > 0

    @cached_property
    def step(self) -> float:
        phases = (self.rollout.seconds, self.training.seconds)
        both = max(phases) if self.ahead else sum(phases)
        return both + self.publish + self.reload

    @property
    def speed(self) -> float:
        """Trained tokens, prompts included, per second and GPU."""
        return self.tokens / self.step / self.choice.gpus

    @property
    def logged(self) -> dict[str, float]:
        """Seconds by the names of a run's metrics; of a rollout ahead, the trainer's wait alone."""
        exposed = self.step - self.publish - self.reload - self.training.seconds
        return {
            "time/rollout": max(0.0, exposed) if self.ahead else self.rollout.seconds,
            "time/score": self.training.score,
            "time/train": self.training.train,
            "time/publish": self.publish,
            "time/step": self.step,
        }

    @property
    def limit(self) -> str:
        """The longest phase, and its largest part."""
        phases = {
            f"rollout: {self.rollout.limit}": self.rollout.seconds,
            f"train: {self.training.limit}": self.training.seconds,
            f"publish: {self.config.sync.on_one_machine}": self.publish,
            "engines' release and reload": self.reload,
        }
        return max(phases, key=lambda name: phases[name])


class Planner:
    """Predicts layouts of one recipe on one kind of GPU."""

    def __init__(
        self,
        config: RunConfig,
        models: Models,
        gpu: Gpu,
        constants: Constants,
        work: Workload,
        *,
        node: int,
    ) -> None:
        """
        Args:
            node: GPUs of a machine.
        """
        self.config, self.models, self.gpu = config, models, gpu
        self.constants, self.work, self.node = constants, work, node
        self.nearest: tuple[int, Choice, str] | None = None
        """Of the layouts that did not fit, the one that came nearest: bytes, which, phase."""

    def plan(self, gpus: int) -> list[Prediction]:
        """Every layout of ``gpus`` GPUs that fits, fastest first."""
        recipe_choice = scaled(own_choice(self.config), gpus)
        predictions = []
        for choice in choices(self.models.policy, gpus, self.node, self._shares):
            prediction = self.predict(choice, own=choice == recipe_choice)
            if prediction is not None:
                predictions.append(prediction)
        return sorted(predictions, key=lambda layout: (layout.step, layout.training.seconds))

    def scaling(self, up_to: int) -> list[Prediction]:
        """Return the fastest layout of one machine's GPUs, twice as many, and so on."""
        best = []
        gpus = self.node
        while gpus <= up_to:
            best += self.plan(gpus)[:1]
            gpus *= 2
        return best

    def predict(self, choice: Choice, *, own: bool = False) -> Prediction | None:
        """None where the batch does not divide or the layout does not fit."""
        fitting = self._fitting(choice, own=own)
        if fitting is None:
            return None
        config, memory = fitting
        _, phase, size = memory.fullest
        return Prediction(
            choice=choice,
            config=config,
            own=own,
            bytes=size,
            phase=phase,
            rollout=self._rollout(config, memory),
            training=self._training(config, memory),
            publish=publish_time(config, self.models.policy, self.gpu, self.constants),
            reload=self.constants.reload if choice.colocated else 0.0,
            tokens=self.work.tokens,
        )

    def _fitting(self, choice: Choice, *, own: bool) -> tuple[RunConfig, Footprint] | None:
        """The recipe in that layout with as much memory for its engines as fits."""
        for static in self._fractions(choice, own=own):
            try:
                config = applied(self.config, choice, node=self.node, static=static)
                memory = footprint(config, self.models, gpu_gib=self.gpu.gib)
            except ConfigError:  # it does not divide
                return None
            _, phase, size = memory.fullest
            if size <= self._usable(own=own):
                assert memory.engine is not None, "SGLang engines have a footprint"
                room = memory.engine.tokens(config.quant.scheme)
                return (config, memory) if room >= self._longest else None
            if self.nearest is None or size < self.nearest[0]:
                self.nearest = (size, choice, phase)
            if not choice.colocated or phase in ("resume", "train"):
                return None  # no engine's memory is in these
        return None

    def _usable(self, *, own: bool = False) -> float:
        """Return the bytes of a GPU that a layout may fill; the recipe's own may try them all."""
        return self.gpu.gib * GIB * (1 if own else 1 - self.constants.spare)

    def _fractions(self, choice: Choice, *, own: bool) -> Iterable[float | None]:
        """SGLang's shares of the free memory to try; None is the recipe's."""
        if own or choice.colocated == self.config.rollout.colocate is False:
            return [None]
        if not choice.colocated:
            return [STATIC]
        step = self.constants.static_step
        return [round(STATIC - i * step, 2) for i in range(int(STATIC / step))]

    @property
    def _shares(self) -> int:
        train = self.config.train
        rows = 1 if train.max_tokens else train.micro_batch
        return self.work.responses // (self.work.minibatches * rows)

    @property
    def _longest(self) -> int:
        return self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens

    def _rollout(self, config: RunConfig, held: Footprint) -> RolloutTime:
        assert held.engine is not None, "SGLang engines have a footprint"
        rollout, scheme = config.rollout, config.quant.scheme
        arch, itemsize = self.models.policy, config.model.itemsize
        return rollout_time(
            decode_rank(arch, scheme, rollout.engine_tensor, itemsize),
            self.gpu,
            self.constants,
            self.work,
            engines=rollout.engines,
            room=held.engine.tokens(scheme),
            requests=rollout.requests_per_engine,
        )

    def _training(self, config: RunConfig, held: Footprint) -> TrainingTime:
        train, data = config.train, config.parallel.data
        hand = deal_out(self.work, data, train.max_tokens, train.micro_batch, train.packed)
        policy = Trainer(
            arch=self.models.policy,
            parallel=config.parallel,
            node=self.node,
            recompute=config.model.recompute,
            distributed=config.optimizer.distributed,
            overlap=config.optimizer.overlap_grad_reduce,
            parameters=max(stage.policy.parameters for stage in held.stages),
            itemsize=config.model.itemsize,
        )
        critic = None
        if self.models.critic:
            parameters = max(stage.critic.parameters for stage in held.stages if stage.critic)
            critic = replace(policy, arch=self.models.critic, head=False, parameters=parameters)
        return training_time(
            policy,
            critic,
            self.gpu,
            self.constants,
            self.work,
            hand,
            reference=config.algo.kl_coef > 0,
        )

    def nothing_fits(self, gpus: int, kind: str) -> ConfigError:
        """Why ``plan`` found nothing."""
        if self.nearest is None:
            return ConfigError(
                f"no layout of {gpus} GPUs divides the model and the batch of "
                f"{self.work.responses} responses in {self.work.minibatches} minibatches, and has "
                f"room for a response of {self._longest} tokens, prompt included; give another "
                "--gpus"
            )
        size, choice, phase = self.nearest
        usable = self._usable()
        return ConfigError(
            f"no layout fits on {gpus} {kind}: the nearest, {choice.label()}, needs "
            f"{size / GIB:.0f} GiB in phase {phase}, of {usable / GIB:.0f} that may be "
            "filled; give more --gpus"
        )
