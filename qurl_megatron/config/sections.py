"""One frozen dataclass per section of a recipe; a component receives its own section alone.

Each key states its default, its range and whether it may change on resume (``config.keys``).
Checks of several sections are in ``RunConfig``, checks against the model in ``tensors.arch``.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from qurl_megatron.config.algorithms import ALGORITHMS
from qurl_megatron.config.keys import (
    Allowed,
    Section,
    at_least,
    at_most_in_size,
    in_interval,
    key,
    names_a_user,
    one_of,
    positive,
    require,
)
from qurl_megatron.engines.kinds import ENGINE_KINDS, EngineKind
from qurl_megatron.schemes import ROLLOUT


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, name="model", on_resume="fork"):
    """Which policy is trained."""

    path: str = ""
    """Hugging Face folder (config.json, *.safetensors, tokenizer), or a Megatron checkpoint that
    `qurl convert` or a run wrote."""

    dtype: Literal["bfloat16", "float32"] = key("bfloat16", on_resume="never")
    """Format of trained weights; bfloat16 keeps FP32 masters, float32 is for exactness tests."""

    recompute: bool = key(False, on_resume="free")
    """Recompute activations by layer in the backward pass: less memory, one forward pass more."""

    fp32_output: bool = False
    """Leave logits in FP32, of the BF16 output layer: BF16 rounds a logit of 20 by up to 0.06.
    SGLang engines want --enable-fp32-lm-head among rollout.engine_args then, and only then."""

    routing_replay: Literal["off", "rollout", "proximal"] = "off"
    """Who chooses the experts that tokens go to in training. off: the router, in every pass.
    rollout: the engine that wrote the response. proximal: the policy before the step's first
    update. Probabilities are computed anew at the chosen experts."""

    router_aux_loss: Literal["off", "model"] = "off"
    """Loss that makes the router use its experts evenly, added to the policy's. model: with the
    coefficient that config.json names, router_aux_loss_coef. off: none."""

    @property
    def itemsize(self) -> int:
        """Bytes of a trained weight."""
        return {"bfloat16": 2, "float32": 4}[self.dtype]

    def check(self) -> None:
        require(
            bool(self.path),
            "model.path is missing; set it to a Hugging Face or Megatron checkpoint",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section, name="parallel", on_resume="free"):
    """How many ranks share one copy of the model; the rest of the ranks are data-parallel."""

    tensor: int = key(1, at_least(1))
    """Tensor-parallel size: every weight matrix is split over this many ranks, norms and residuals
    by their positions (sequence parallelism)."""

    pipeline: int = key(1, at_least(1))
    """Pipeline-parallel size: the layers are split into this many stages."""

    context: int = key(1, at_least(1))
    """Context-parallel size: every sequence is split over this many ranks."""

    data: int = key(1, at_least(1))
    """Data-parallel size: copies of the model, each working on its share of the samples."""

    expert: int = key(1, at_least(1))
    """Expert-parallel size: the experts of a layer are dealt to this many of a stage's ranks, whole
    ones, and tokens travel to them. 1: every rank has its tensor-parallel part of all experts."""

    expert_dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    """How tokens travel to dealt experts: by torch's all-to-all, or by kernels of the library
    deep_ep, which needs GPUs."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_tensor(self) -> int:
        """Ranks that an expert's matrices are split over."""
        return self.tensor if self.expert == 1 else 1

    @property
    def expert_copies(self) -> int:
        """Ranks with the same part of the same experts, which share their optimizer's state."""
        return self.world_size // (self.pipeline * self.expert * self.expert_tensor)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, name="optimizer", on_resume="change"):
    """AdamW on the FP32 master weights; each data-parallel rank has its share of them."""

    lr: float = key(1e-6, at_least(0))
    """Learning rate after warm-up."""

    warmup_steps: int = key(0, at_least(0))
    """Optimizer updates over which the learning rate rises linearly from 0."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up: it stays, or falls in a line or half a cosine. The
    critic's follows the same course with critic.lr and critic.warmup_steps."""

    decay_steps: int = key(0, at_least(0))
    """Optimizer updates, warm-up included, at whose end the learning rate has fallen; 0: the
    updates of all train.steps, so that more steps make another schedule."""

    decay_to: float = key(0.0, in_interval("[0, 1]"))
    """Share of the learning rate that it falls to, and stays at."""

    weight_decay: float = key(0.0, at_least(0))
    """Decoupled weight decay; norms and biases are exempt."""

    beta1: float = key(0.9, in_interval("[0, 1)"))
    beta2: float = key(0.95, in_interval("[0, 1)"))
    eps: float = key(1e-8, positive())

    clip_grad: float = key(1.0, positive())
    """Largest global gradient norm; larger gradients are scaled down to it."""

    overlap_grad_reduce: bool = key(True, on_resume="free")
    """Add gradients up over data-parallel ranks while the backward pass goes on."""


@dataclass(frozen=True, kw_only=True)
class QuantConfig(Section, name="quant", on_resume="fork"):
    """How rollout weights are quantized before they are sent to the fleet."""

    scheme: str = key("int8", one_of(*ROLLOUT))
    """Number format of rollout weights and activations; the trained weights keep model.dtype.
    fp8_block has a scale per 128 x 128 weights, and per token and 128 of its features: DeepSeek's
    format, by SGLang on GPUs and the embedded engine. int6, int5 and int4 are simulated by the
    embedded engine, for studies of quantization noise."""

    rounding: Literal["nearest", "stochastic", "dithered"] = "nearest"
    """How a weight between two codes becomes one of them. stochastic: the upper one with the
    probability of the fraction, drawn again for each version; dithered: drawn once for each weight
    of the run, so that a weight that has not moved keeps its code."""

    uaq_scale: float = key(1.5, at_least(1.0), on_resume="never")
    """Update-aware factor s folded once into each norm/linear pair; 1.0 turns the folding off. By
    default the paper's; where it was measured it acted as a larger learning rate, no more."""

    diagnostics_every: int = key(1, at_least(0), on_resume="change")
    """Steps between measurements of code flips, of Eqs. 13 and 14 and of the share of an update
    that reaches the codes; 0 turns them off. They keep one host copy of the previous weights and
    codes (5 bytes a parameter, and 4 for each row's scale)."""


def code_named(name: str) -> Allowed:
    """Allow a reference to Python code, "package.module:name" or "file.py:name", or nothing."""

    def has(code: str) -> bool:
        target, _, last = code.rpartition(":")
        return not code or bool(target) and last.isidentifier()

    return Allowed(has, f"look like package.module:{name} or file.py:{name}")


@dataclass(frozen=True, kw_only=True)
class AlgoConfig(Section, name="algo", on_resume="fork"):
    """The objective: the ratio that is clipped, its bounds, and the average over tokens.

    ``name`` fills in the settings of its paper; every key that the recipe sets itself wins.
    """

    name: str = key("grpo", one_of(*ALGORITHMS))
    """A preset of config.algorithms: other defaults for the keys below."""

    objective: Literal["naive", "proximal", "decoupled", "tis", "acr", "icepop"] = "acr"
    """Correction for the quantized behaviour policy. In order: paper Eq. 3, Eq. 1 on quantized
    rollouts, Eq. 4, Eq. 5, Eq. 9; icepop gives weight rho within the correction band and 0
    outside."""

    function: str = key("", code_named("name"))
    """A loss of your own in place of ``objective``: "package.module:name", or "file.py:name" with
    the file relative to the recipe's folder. docs/algorithms.md says how it is called."""

    surrogate: Literal["clip", "cispo"] = "clip"
    """clip: PPO's clipped surrogate; cispo: the clipped ratio as a constant weight of log pi."""

    ratio: Literal["token", "sequence"] = "token"
    """Clip each token's ratio, or the geometric mean over its response (GSPO)."""

    clip_low: float = key(0.2, in_interval("[0, 1]"))
    clip_high: float = key(0.2, at_least(0))

    dual_clip: float = 0.0
    """Where the advantage is negative, the objective stays above this times it; 0 is off."""

    cap: float = key(2.0, at_least(1))
    """C: largest importance weight proximal/behaviour that is not truncated (tis, acr)."""

    advantage: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"
    ] = "grpo"
    """grpo: (reward - group mean) / (group std + 1e-6); dr_grpo: without the division; rloo: minus
    the mean of the others; reinforce_pp: over the whole batch, reinforce_pp_baseline: after the
    group mean; gae: generalised advantage estimation with a critic."""

    gamma: float = key(1.0, in_interval("[0, 1]"))
    """Discount per token (reinforce_pp, gae)."""

    gae_lambda: float = key(1.0, in_interval("[0, 1]"))

    aggregation: Literal["response_mean", "token_mean", "response_sum", "constant"] = (
        "response_mean"
    )
    """response_mean: each response, then their mean (GRPO); token_mean: all tokens alike (DAPO);
    response_sum: sums of responses, then their mean (RLOO); constant: those sums divided by
    rollout.max_new_tokens (Dr.GRPO)."""

    mask_truncated: bool = False
    """Leave responses that the length limit cut off out of the loss."""

    kl_coef: float = key(0.0, at_least(0))
    """Weight of the KL penalty to the reference policy; 0 keeps no reference weights."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"

    kl_in: Literal["loss", "reward"] = "loss"
    """A differentiated term of the loss, or taken off each token's reward."""

    kl_max: float = key(10.0, at_least(0))
    """Largest k3 estimate of a token; beyond it the penalty does not grow, and in the loss has no
    gradient. 10 as in verl, slime and NeMo-RL; 0 is off."""

    reference: str = ""
    """Checkpoint of the reference policy, of the actor's shape; empty: the actor as it began."""

    reference_memory: Literal["device", "host"] = key("device", on_resume="free")
    """Where the reference weights wait until they are swapped in."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    dynamic_sampling: bool = False
    """Drop groups whose answers are all right or all wrong, and draw further prompts for them."""

    max_refills: int = key(10, at_least(0))
    """Rounds of further prompts per step; groups still missing then are filled with dropped ones,
    which train nothing."""

    minibatches: int = key(2, at_least(1))
    """Optimizer updates per rollout batch; with 1, ACR equals TIS."""

    deal: Literal["responses", "groups"] = "responses"
    """Deal single responses to minibatches, so that each minibatch sees most prompts, or whole
    groups, so that each sees a few prompts (verl)."""

    epochs: int = key(1, at_least(1))
    """Passes over each rollout batch."""

    def check(self) -> None:
        require(
            self.dual_clip == 0 or self.dual_clip > 1,
            f"algo.dual_clip must be greater than 1, or 0 to turn it off, got {self.dual_clip}",
        )


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig(Section, name="correction", on_resume="fork"):
    """Off-policy correction beside algo.objective: how rho is formed, and which responses are
    dropped."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """rho = proximal/behaviour of each token, the product over its response, or its geometric mean;
    independent of algo.ratio."""

    band_low: float = 0.5
    band_high: float = 5.0
    """icepop: tokens whose rho lies outside this band do not train."""

    reject_low: float = 0.0
    reject_high: float = 0.0
    """Responses whose geometric mean of rho lies outside are dropped from the loss; 0 is off."""

    veto: float = key(0.0, in_interval("[0, 1)"))
    """Responses with a token whose rho is below this are dropped from the loss, e.g. 1e-4; 0 is
    off."""

    def check(self) -> None:
        require(
            0 <= self.band_low <= 1 <= self.band_high,
            f"correction.band_low={self.band_low} and band_high={self.band_high} must enclose 1",
        )
        require(
            self.reject_low <= 1 and (self.reject_high == 0 or self.reject_high >= 1),
            f"correction.reject_low={self.reject_low} and reject_high={self.reject_high} must "
            "enclose 1, or be 0",
        )

    @property
    def rejects(self) -> bool:
        """True where responses may be dropped."""
        return bool(self.reject_low or self.reject_high or self.veto)


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Section, name="critic", on_resume="fork"):
    """The value model of algo.advantage=gae: model.path's body, a new head with one output, its own
    optimizer."""

    lr: float = key(1e-5, at_least(0), on_resume="change")
    warmup_steps: int = key(0, at_least(0), on_resume="change")
    """Critic updates over which its learning rate rises linearly from 0."""

    ahead_steps: int = key(0, at_least(0))
    """Steps at the beginning in which only the critic learns."""

    clip: float = key(0.2, at_least(0))
    """Largest move of a value from its estimate before the update; 0 does not clip."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Section, name="guard", on_resume="free"):
    """Thresholds that count as a collapse, and the reaction. A threshold of 0 is not watched."""

    kl_above: float = key(0.0, at_least(0))
    """KL(behaviour||proximal), k3, mean over tokens."""

    rho_above: float = key(0.0, at_least(0))
    """Largest proximal/behaviour of a token."""

    reward_below: float = 0.0
    entropy_below: float = key(0.0, at_least(0))
    entropy_above: float = key(0.0, at_least(0))

    patience: int = key(3, at_least(1))
    """Steps in a row that a threshold must be crossed."""

    action: Literal["warn", "halt"] = "warn"
    """warn: say so; halt: save a checkpoint and stop."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section, name="rollout", on_resume="free"):
    """How responses are generated, and by which engines."""

    backend: Literal["embedded", "sglang"] = key("embedded", on_resume="fork")
    """Kind of the engines started here: this package's own, or SGLang servers."""

    engines: int = key(1, at_least(1))
    """Engines to start on this machine, each a process of its own; with rollout.rendezvous, how
    many to wait for before the run begins."""

    engine_host: str = "127.0.0.1"
    """Address that engines started here listen on."""

    engine_threads: int = key(0, at_least(0))
    """CPU threads per engine; 0 shares the machine's cores evenly."""

    engine_memory_gb: float = key(2.0, positive())
    """Key/value cache per embedded engine, in GiB."""

    engine_tensor: int = key(1, at_least(1))
    """Tensor-parallel size of an SGLang engine."""

    engine_first_gpu: int = key(0, at_least(0))
    """GPU of the first SGLang engine; the following ones take the GPUs behind it."""

    engine_args: tuple[str, ...] = ()
    """Further command-line arguments of the SGLang server, e.g. ["--mem-fraction-static=0.8"]."""

    sglang_python: str = ""
    """Python of the environment with SGLang; empty: .venv-sglang/bin/python where it exists, else
    this one."""

    urls: tuple[str, ...] = ()
    """Engines that already run (SGLang's HTTP protocol); none are started then. Their API key, if
    they want one, is taken from the environment variable QURL_API_KEY."""

    rendezvous: str = ""
    """Folder with one JSON file per engine, {"url": ...} with an optional "api_key_file"; a batch
    system writes them, and engines may come and go during a run. auto: "engines" in train.run_dir.
    """

    each_node: bool = False
    """Each of the trainer's machines starts its share of rollout.engines, by its first rank. They
    meet in rollout.rendezvous, which is auto unless it is set."""

    take_over: bool = False
    """Adopt engines even from a run that is at work; it loses them."""

    colocate: bool = False
    """Engines share the trainer's GPUs and give their memory back while it trains."""

    samples_per_prompt: int = key(8, at_least(1), on_resume="fork")
    """Group size G: responses per prompt."""

    max_new_tokens: int = key(64, at_least(1), on_resume="fork")
    """Tokens of a response; with an environment, of all turns and of its replies between them."""

    temperature: float = key(
        1.0,
        at_least(1e-3, "engines that are colder decode greedily, which is for evaluation only"),
        on_resume="fork",
    )
    """Sampling temperature; the trainer divides its logits by the same number."""

    max_staleness: int = key(0, at_least(0), on_resume="fork")
    """Weight versions that the tokens of a batch may be behind the policy trained on them. 0
    generates and trains in turn; 1 generates one step off; more let several batches be in flight.
    Beyond 0 a run no longer repeats bit for bit, as it does with embedded engines alone."""

    requests_per_engine: int = key(256, at_least(1))
    """Responses in flight per SGLang engine; the others wait here, to go where there is room.
    Embedded engines get all of their work at once, so that a run repeats bit for bit; SGLang's
    sums depend on who shares a batch."""

    timeout_s: float = key(3600.0, positive())
    """Seconds after which an engine that has not answered a request has failed, pauses included:
    more than the longest response takes. Engines that hang are found by their health checks."""

    start_timeout_s: float = key(0.0, at_least(0))
    """Seconds without a new line in its log after which a starting engine has failed; a start may
    take four times as long in all; for adopted engines, seconds to wait for them. 0: 300, or 900
    with backend=sglang, which may compile kernels and capture graphs first."""

    update_timeout_s: float = key(300.0, positive())
    """Seconds an engine may take for a weight update before it has failed."""

    health_every_s: float = key(5.0, positive())
    """Seconds between two health checks of an engine."""

    health_timeout_s: float = key(0.0, at_least(0))
    """An engine that answers no health check for so long, and writes nothing to its log either, is
    dead or hung; without an answer for four times as long it is, whatever it writes. 0: 60,
    or 300 for SGLang, which answers none while it compiles a kernel."""

    max_restarts: int = key(3, at_least(0))
    """How often an engine that died, hung or gave an impossible answer is started again; each time
    after twice the wait. The count starts again once it has served three versions in a row without
    a fault, which in ``qurl eval``, where nothing is published, it never has."""

    environment: str = key("", code_named("Class"), on_resume="fork")
    """Class that answers the policy, as a tool or a user would: "package.module:Class", or
    "file.py:Class" with the file relative to the recipe's folder. docs/environments.md has more."""

    environment_workers: int = key(2, at_least(1))
    """Processes that answer for the environment, each one response at a time."""

    environment_memory_gb: float = key(4.0, positive())
    """Address space of one of them, GiB."""

    max_turns: int = key(8, at_least(1), on_resume="fork")
    """Turns of the policy in a conversation with the environment; the last one ends it."""

    turn_timeout_s: float = key(30.0, positive(), on_resume="change")
    """Seconds that the environment has for one answer; a response that gets none by then has
    failed."""

    def check(self) -> None:
        for url in self.urls:
            _check_url("rollout.urls", url, like="http://host:30000", key_in="QURL_API_KEY")
        require(
            not (self.urls and self.rendezvous),
            "rollout.urls and rollout.rendezvous both name engines; leave one of them out",
        )
        require(
            not (self.urls and self.each_node),
            "rollout.urls names engines, and rollout.each_node starts some; leave one of them out",
        )
        require(
            self.kind.takes_gpus
            or not (self.engine_tensor > 1 or self.engine_args or self.colocate),
            "rollout.engine_tensor, rollout.engine_args and rollout.colocate are for SGLang "
            "engines; set rollout.backend=sglang",
        )
        require(
            not (self.colocate and self.max_staleness),
            "rollout.colocate takes the engines' memory away while the policy trains; it needs "
            "rollout.max_staleness=0",
        )

    def engines_on_each(self, nodes: int) -> int:
        """Return the engines of each node; raise ``ConfigError`` if they do not divide."""
        require(
            self.engines % nodes == 0,
            f"rollout.engines={self.engines} do not divide over the trainer's {nodes} nodes "
            f"(rollout.each_node); make them a multiple of {nodes}",
        )
        return self.engines // nodes

    @property
    def deals_experts(self) -> bool:
        """Whether engines started here deal experts to their GPUs, whole ones."""
        names = {argument.partition("=")[0] for argument in self.engine_args}
        return not names.isdisjoint({"--ep-size", "--ep", "--expert-parallel-size"})

    @property
    def adopts(self) -> bool:
        """Whether all engines are started by others."""
        return bool(self.urls) or (self.rendezvous != "" and not self.each_node)

    @property
    def start_limit_s(self) -> float:
        return self.start_timeout_s or self.kind.start_timeout_s

    @property
    def kind(self) -> EngineKind:
        """Facts about the engines started here."""
        return ENGINE_KINDS[self.backend]


ONE_FILE = (
    "one file is read: join several first, JSONL with cat A.jsonl B.jsonl > ALL.jsonl, parquet as "
    "docs/data.md says"
)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, name="data", on_resume="fork"):
    """Where prompts come from: a file (``path``) or a procedural task (``task``), exactly one."""

    path: str = key("", Allowed(lambda _: True, "be one path", ONE_FILE))
    """JSONL or parquet file of prompts and answers; docs/data.md says which layouts are read."""

    eval_path: str = key("", Allowed(lambda _: True, "be one path", ONE_FILE))
    """The same for held-out prompts."""

    prompt_key: str = ""
    """Where a row of these files has its prompt, a dotted path; empty: found by the usual names."""

    answer_key: str = ""
    """Where it has its answer, e.g. reward_model.ground_truth; empty: found by the usual names."""

    task: str = ""
    """Name of a reasoning-gym task, e.g. chain_sum; train and held-out seeds differ."""

    task_args: dict = key({})
    """Arguments of that task, e.g. {min_terms = 2, max_terms = 2}."""

    task_size: int = key(10_000, at_least(1))
    """How many training prompts the task generates before they repeat (reshuffled each epoch)."""

    chat: bool = False
    """Make each prompt that is text one user turn of the tokenizer's chat template; prompts that
    are lists of turns go through the template anyway."""

    prompts_per_step: int = key(32, at_least(1))

    max_prompt_tokens: int = 512
    """Longer prompts are left out, counted and reported."""

    shuffle: bool = True

    def check(self) -> None:
        require(
            bool(self.path) != bool(self.task),
            "data needs exactly one of data.path (a JSONL or parquet file) and data.task "
            "(a reasoning-gym task)",
        )
        keys = [key for key in ("prompt_key", "answer_key") if getattr(self, key)]
        require(
            not (self.task and keys),
            f"data.{' and data.'.join(keys)} is for files, and data.task={self.task} has none; "
            "leave it out",
        )


LARGEST_SCORE = 1e6
"""In size, of a score and of a weight: squares of their products are finite in FP32."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section, name="reward", on_resume="change"):
    """How a response is scored: by a function or a server of your own, else by a kind of ours."""

    kind: Literal["", "math", "last_number", "exact"] = key("", on_resume="fork")
    """math: math-verify on the boxed or last expression; last_number: the last number in the text
    equals the answer; exact: the whole text, stripped, equals the answer. Each gives 1.0 or 0.0.
    Empty: math, unless there is a function or a url, beside which no kind may stand."""

    function: str = key("", code_named("name"), on_resume="fork")
    """Your own in place of kind: "package.module:name", or "file.py:name" with the file relative to
    the recipe's folder. docs/rewards.md says how it is called."""

    url: str = key("", on_resume="fork")
    """A server in place of kind: it gets responses by POST, and answers with their scores."""

    key_env: str = key("", on_resume="free")
    """Environment variable that holds the server's key, which is sent as a bearer token."""

    failed: float = key(0.0, at_most_in_size(LARGEST_SCORE))
    """The score of a response that could not be scored: the function raised, took too long, ended
    its worker or returned no finite number, or the server did not answer."""

    on_failure: Literal["score", "stop"] = key("score", on_resume="free")
    """Reaction to such a response: "score" gives it reward.failed, "stop" ends the run."""

    overlong_fraction: float = key(0.0, in_interval("[0, 1]"))
    """Share of rollout.max_new_tokens, at its end, over which a response's reward falls linearly
    (DAPO's soft overlong punishment); 0 is off."""

    overlong_penalty: float = key(0.5, at_least(0))
    """Fall of the reward at the limit, as a share of the difference between right and wrong: DAPO's
    penalty of 1 with its rewards of 1 and -1 is 0.5."""

    workers: int = key(1, at_least(1), on_resume="free")
    """Processes that score; of a server, requests under way at once."""

    timeout_s: float = key(10.0, positive())
    """Seconds after which one check or call has failed, and its worker is replaced; of a server,
    seconds for one request, from the connection to the last byte."""

    memory_gb: float = key(4.0, positive(), on_resume="free")
    """Address space of one worker, GiB."""

    batch: int = key(64, at_least(1))
    """Responses of one request to a server."""

    url_retries: int = key(3, at_least(0))
    """Times that a request is sent again, after 1, 2, 4, ... seconds."""

    url_deadline_s: float = key(300.0, positive())
    """Seconds for all requests of a batch, retries included; responses not scored by then have
    failed."""

    @property
    def right_or_wrong(self) -> bool:
        """True where each score is known to be 1 or 0, so that their mean is an accuracy."""
        return bool(self.kind) and self.failed in (0.0, 1.0)

    @property
    def setting(self) -> str:
        """The setting that chooses the scorer, as key=value."""
        sources = [key for key in ("function", "url") if getattr(self, key)] or ["kind"]
        return f"reward.{sources[0]}={getattr(self, sources[0])}"

    @property
    def described(self) -> str:
        """Name of the scorer, for messages."""
        return self.function or self.url or self.kind

    def check(self) -> None:
        require(not (self.function and self.url), "reward needs one of function and url, not both")
        source = "function" if self.function else "url"
        require(
            not (self.kind and (self.function or self.url)),
            f"reward.kind={self.kind} would not be used beside reward.{source}; leave one of them "
            "out (reward.kind= on the command line empties the recipe's)",
        )
        require(
            not self.key_env or bool(self.url),
            "reward.key_env is for reward.url; set that, or leave it out",
        )
        if self.url:
            _check_url(
                "reward.url",
                self.url,
                like="https://host:port/path",
                key_in="an environment variable, and name that in reward.key_env",
            )
        if not (self.kind or self.function or self.url):
            object.__setattr__(self, "kind", "math")


def file_of(code: str) -> str:
    """Return the file of "file.py:name"; empty for a module."""
    target = code.rpartition(":")[0]
    return target if target.endswith(".py") else ""


def named_beside(folder: Path, code: str) -> str:
    """Return the same code, with a file's path no longer relative to ``folder``."""
    if not (file := file_of(code)):
        return code
    return f"{os.path.abspath(folder / file)}:{code.rpartition(':')[2]}"


def _check_url(key: str, url: str, *, like: str, key_in: str) -> None:
    """Raise ``ConfigError`` unless a URL is ``like`` the example; secrets belong in ``key_in``."""
    secret = ""
    if names_a_user(url):
        secret = "a user name or a password"
    elif url.partition("#")[0].partition("?")[2]:
        secret = "a query"
    require(
        not secret,
        f"{key} has {secret}, which recipes and logs would show; put the key into {key_in}",
    )
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where it is no port
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    require(usable, f"{key} must be like {like}, got {url!r}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section, name="train", on_resume="free"):
    """Length and shape of the run."""

    run_dir: str = key(
        "",
        Allowed(lambda folder: not folder.startswith("-"), "not begin with -, as an option does"),
    )
    """Folder of the run's checkpoints, metrics and report. Empty: runs/ and the recipe's name,
    followed by overrides that change its numbers or layout, e.g.
    runs/quickstart--quant.scheme-fp8."""

    steps: int = key(100, at_least(0))
    """Rollout batches to train on."""

    micro_batch: int = key(8, at_least(1))
    """Responses per forward/backward pass on one data-parallel rank; unused with max_tokens."""

    max_tokens: int = key(0, at_least(0))
    """Tokens per forward/backward pass on one data-parallel rank, padding included: responses of
    like length share one, and their number varies; a longer one gets a pass of its own. 0 takes
    micro_batch responses instead."""

    packed: bool = False
    """Lay the sequences of a pass end to end (THD) instead of padding them to the longest."""

    align: Literal["none", "weights", "full"] = key("none", on_resume="fork")
    """Numbers that the policy's linear layers compute with: "none", its own weights; "weights", the
    engines' codes and scales; "full", tokens quantized as in the engines, too. Gradients go
    straight through to the weights."""

    seed: int = key(0, on_resume="fork")

    eval_every: int = key(0, at_least(0))
    """Steps between held-out evaluations; 0 evaluates only before the first and after the last."""

    eval_prompts: int = key(0, at_least(0), on_resume="change")
    """Held-out prompts per evaluation; 0 turns evaluation off."""

    save_rollouts: bool = False
    """Keep every sample that trains in run_dir/rollouts/step_000012.jsonl: tokens, behaviour and
    proximal log-probs, the version of each token, text and reward."""

    eval_samples: int = key(1, at_least(1), on_resume="change")
    """Responses per held-out prompt: 1 decodes greedily (Avg@1), more are sampled at
    rollout.temperature and averaged (Avg@k)."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, name="checkpoint", on_resume="free"):
    """When the training state is saved; a run always resumes from the newest whole checkpoint.

    Whole is one whose files have the checksums they were written with. A damaged newer one is set
    aside under another name, which no run and no tool touches again.
    """

    every: int = key(0, at_least(0))
    """Steps between checkpoints; 0 saves only at the end and on Ctrl-C, SIGTERM or SIGHUP."""

    keep: int = key(2, at_least(1))
    """Newest checkpoints that are kept; older ones are deleted."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig(Section, name="sync", on_resume="free"):
    """How a new weight version reaches the engines."""

    transport: Literal["auto", "files", "memory", "group", "relay"] = "auto"
    """Path of the bytes: files in a folder that all machines share; memory of one machine that
    trainer and engines map; group, point to point over NCCL or gloo, from engine to engine where
    they are many; relay, between training ranks over NCCL or gloo, and memory on each of their
    machines. auto: memory where trainer and engines are on one machine, relay with
    rollout.each_node, if two buckets per rank fit into memory and sync.dir names no folder; else
    files."""

    bucket_mb: float = key(256.0, positive())
    """Largest bucket of one training rank, in MiB of quantized bytes; with relay, of one rank on
    each machine together, and at least one matrix of each. Two of them are in memory at a time."""

    pause: Literal["retract", "in_place"] = "retract"
    """Treatment of requests that an update interrupts. retract: recompute them with the new weights
    up to their last token; in_place: keep the old key/value cache. Either way each token carries
    its version."""

    host: str = ""
    """Address of the leading rank at which the transports group and relay meet engines; it must be
    reachable from them, and from nowhere else. Empty: of group, 127.0.0.1 on one machine, else
    MASTER_ADDR; of relay, the address at which that rank's own engines are reached."""

    dir: str = ""
    """Folder that trainer and engines share; versions go to a folder of the run's own in it. Empty:
    train.run_dir/versions. On one machine, a folder in /dev/shm is faster."""

    def chosen(self, *, each_node: bool) -> str:
        """Return the transport where engines are on the trainer's machines, whose memory has room:
        on all of them with ``rollout.each_node``, else on one."""
        if self.transport != "auto":
            return self.transport
        if self.dir:
            return "files"
        return "relay" if each_node else "memory"


@dataclass(frozen=True, kw_only=True)
class ObserveConfig(Section, name="observe", on_resume="free"):
    """Samples and views of a run beside its metrics."""

    samples: int = key(8, at_least(0))
    """Responses kept of every step and of every evaluation in run_dir/samples.jsonl, half of them
    with the lowest and half with the highest rewards; the report, TensorBoard and `qurl samples`
    show them. Of each prompt and response 2000 characters are kept; 0 keeps none."""

    show: int = key(1, at_least(0))
    """Held-out prompts that every evaluation prints with their responses, always the same ones;
    0 prints none."""

    wandb_project: str = ""
    """Log to this project of Weights & Biases, too; needs the package wandb. Empty: do not."""


@dataclass(frozen=True, kw_only=True)
class WarmstartConfig(Section, name="warmstart", on_resume="free"):
    """A small model made on the spot, for machines that have no checkpoint at hand.

    When ``steps`` is positive and model.path does not exist, ``qurl train`` first makes a random
    Qwen2-shaped model of these sizes there and fits it, supervised, to the task's own answers.
    """

    steps: int = key(0, at_least(0))
    """Largest number of supervised steps; the learning rate is shaped over them."""

    target: float = key(0.6, in_interval("(0, 1]"))
    """Stop as soon as this share of training questions gets the right number: the rest is for
    reinforcement learning."""

    hidden: int = key(128, at_least(1))
    layers: int = key(4, at_least(1))
    heads: int = key(4, at_least(1))
    kv_heads: int = key(2, at_least(1))
    intermediate: int = key(384, at_least(1))
    experts: int = key(0, at_least(0))
    """MLPs of a layer, of ``intermediate`` each, two of which take a token, and then the model is
    Qwen3-MoE-shaped; 0: it has one, and no router."""

    batch: int = key(64, at_least(1))
    lr: float = key(2e-3, at_least(0))
    seed: int = 0

    def check(self) -> None:
        require(
            self.hidden % (2 * self.heads) == 0 and self.heads % self.kv_heads == 0,
            f"warmstart.hidden={self.hidden} must be a multiple of "
            f"2 * warmstart.heads={self.heads}, and that of warmstart.kv_heads={self.kv_heads}",
        )
        require(self.experts != 1, "warmstart.experts=1 leaves nothing to choose; take 0, or more")
