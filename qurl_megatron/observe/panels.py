"""The pictures of a run as data, after the paper's Figures 2, 3, 4 and 9: which metrics, on which
scale, and how to read them. ``drawing`` draws them.
"""

from dataclasses import dataclass

from qurl_megatron.observe.history import History

COLORS = {  # Okabe and Ito's palette, which colour-blind readers tell apart, darkened for lines
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#00896a",
    "purple": "#a2527f",
    "yellow": "#c08300",
    "ink": "#1d2126",
    "muted": "#646b76",
    "rule": "#e3e5e9",
    "other": "#c6cad1",
    "paper": "#fdfdfc",
}
"""``report.css`` has the same names, with a dark variant each for the page around pictures."""

PHASES = {  # in the order in which a step runs through them
    "rollout": "blue",
    "reward": "purple",
    "score": "green",
    "train": "orange",
    "publish": "yellow",
}


@dataclass(frozen=True)
class Line:
    """One metric in a picture."""

    metric: str
    label: str
    color: str
    rings: bool = False
    """Draw every point as a ring, for a metric that is measured at few steps."""


@dataclass(frozen=True)
class Picture:
    """Metrics that belong into one frame, and how to read them."""

    key: str
    title: str
    lines: tuple[Line, ...]
    caption: str
    paper: str = ""
    """What it corresponds to in the paper, e.g. "Fig. 2 (b)"."""

    log: bool = False
    from_zero: bool = True

    def present(self, history: History) -> list[Line]:
        """The lines that this run has something to show for."""
        return [line for line in self.lines if self._drawable(line, history)]

    def _drawable(self, line: Line, history: History) -> bool:
        if line.metric not in history:
            return False
        return not self.log or bool((history.series(line.metric)[1] > 0).any())


SECTIONS: dict[str, tuple[Picture, ...]] = {
    "Learning": (
        Picture(
            "reward",
            "Reward",
            (
                Line("reward/mean", "rollout reward", "blue"),
                Line("eval/accuracy", "held-out accuracy", "orange", rings=True),
                Line("eval/reward", "held-out reward", "orange", rings=True),
            ),
            "Mean reward of each rollout batch, sampled by the quantized policy. Rings: held-out "
            "prompts; the first one is the model before training. A line ends where other data or "
            "another reward makes a new scale.",
            "Fig. 2 (a)",
        ),
        Picture(
            "clip",
            "Clipped tokens",
            (Line("policy/clip_fraction", "clip fraction", "blue"),),
            "Share of tokens that clipping cuts off from the update. Under Eq. 3 the paper sees it "
            "climb to 1.5 % and then drop to zero as training breaks; low and steady is healthy.",
            "Fig. 2 (b)",
        ),
        Picture(
            "acr",
            "Adaptive clip range",
            (
                Line("acr/active_fraction", "active", "blue"),
                Line("acr/rescued_fraction", "rescued", "orange"),
            ),
            "Active: tokens whose upper bound is widened, since their importance weight is "
            "truncated. Rescued: those that TIS (Eq. 5) would have clipped and ACR lets through.",
            "Eq. 9",
        ),
        Picture(
            "groups",
            "Groups of answers",
            (
                Line("sampling/kept_fraction", "mixed", "blue"),
                Line("sampling/all_right_fraction", "all right", "green"),
                Line("sampling/all_wrong_fraction", "all wrong", "orange"),
            ),
            "Of all groups that were generated. Dynamic sampling trains on the mixed ones alone: "
            "where all answers are right, or all wrong, none is better than another.",
        ),
    ),
    "Critic": (
        Picture(
            "values",
            "Values and returns",
            (
                Line("critic/value_mean", "mean value", "blue"),
                Line("critic/return_mean", "mean return", "orange"),
            ),
            "What the critic expected of the tokens, and what came. It begins at 0.",
            from_zero=False,
        ),
        Picture(
            "explained_variance",
            "Explained variance",
            (Line("critic/explained_variance", "share", "blue"),),
            "Of the returns, by the values before the update: 1 is perfect, 0 no better "
            "than their mean, below 0 worse.",
            from_zero=False,
        ),
        Picture(
            "critic_loss",
            "Critic loss",
            (Line("critic/loss", "mean over updates", "blue"),),
            "Half the squared error of the values, the worse of clipped and unclipped.",
        ),
    ),
    "Quantization gap": (
        Picture(
            "kl",
            "KL of behaviour from proximal policy",
            (Line("rollout/kl_k3", "k3", "blue"),),
            "How far the quantized policy that samples is from the full-precision one that trains, "
            "per token, by the estimator k3 (ρ − 1 − log ρ, which is never negative). In the paper "
            "it grows from 0.002 to 0.025 before training collapses.",
            "Figs. 3 (a), 4 (b)",
        ),
        Picture(
            "rho_max",
            "Largest probability ratio",
            (Line("rollout/rho_max", "max ρ", "blue"),),
            "The most extreme token of each batch: proximal over behaviour probability, log scale. "
            "The paper sees up to 10⁵; the cap C keeps such a token from ruling the gradient.",
            "Fig. 3 (b)",
            log=True,
        ),
        Picture(
            "weights",
            "Importance weights",
            (
                Line("rollout/rho_mean", "mean ρ", "blue"),
                Line("rollout/ess", "effective sample size", "orange"),
            ),
            "Mean ratio, 1 in expectation, and the share of tokens that stay effective under their "
            "weights. Both drift away from 1 as the two policies part.",
            from_zero=False,
        ),
        Picture(
            "truncated_weights",
            "Truncated weights",
            (Line("rollout/truncated_weight_fraction", "share above C", "blue"),),
            "Share of tokens with ρ above C. Their weight is cut to C, which bounds the variance "
            "and costs some bias.",
            "Eq. 5",
        ),
        Picture(
            "dropped",
            "Tokens left out",
            (
                Line("correction/rejected_fraction", "in rejected responses", "blue"),
                Line("correction/banded_fraction", "outside IcePop's band", "orange"),
            ),
            "Tokens that train nothing because behaviour and proximal policy disagree too much, by "
            "the settings of the correction section.",
        ),
        Picture(
            "flips",
            "Code flips",
            (Line("quant/code_flip_rate", "codes changed", "blue"),),
            "Share of quantized weights whose code changed with the step. At zero, the engine "
            "samples from the same policy however much the trainer learns. A small share is not "
            "yet a frozen engine: see how much of the update reaches it.",
            "Fig. 4 (a)",
        ),
        Picture(
            "weight_change",
            "Weight update and quantization error",
            (
                Line("quant/weight_error", "error, Eq. 14", "orange"),
                Line("quant/weight_update", "update, Eq. 13", "blue"),
            ),
            "Both squared and relative to the weights, log scale. The wider the gap, the rarer a "
            "weight reaches its next grid point, and the noisier each update arrives; a larger "
            "learning rate narrows it, and so does a larger UAQ factor s.",
            "Fig. 9",
            log=True,
        ),
        Picture(
            "update_passed",
            "Update that reaches the engine",
            (
                Line("quant/update_passed", "share of the update", "blue"),
                Line("quant/update_cosine", "cosine", "orange"),
            ),
            "⟨ΔQ, ΔW⟩ / ‖ΔW‖² and the cosine, of the update ΔW of a step and the change ΔQ of the "
            "quantized weights. A share near 1 with a small cosine is an update that arrives whole "
            "but noisy; a share near 0 is a frozen engine.",
        ),
    ),
    "Policy and optimizer": (
        Picture(
            "entropy",
            "Entropy",
            (Line("policy/entropy", "per token, in nats", "blue"),),
            "Spread of the next-token distribution. A slow fall is learning; a fall to zero ends "
            "exploration, a steep rise precedes many a collapse.",
        ),
        Picture(
            "length",
            "Response length",
            (Line("response/length", "mean tokens", "blue"),),
            "Mean tokens per response, those cut off by the length limit included.",
        ),
        Picture(
            "truncated",
            "Cut-off responses",
            (Line("response/truncated", "share", "blue"),),
            "Share of responses that the length limit ended. They rarely earn a reward, so this "
            "bounds the reward from above.",
        ),
        Picture(
            "grad_norm",
            "Gradient norm",
            (Line("optimizer/grad_norm", "before clipping", "blue"),),
            "Global norm of the gradient. Spikes that coincide with a large ratio above point to "
            "importance weights, others to the data.",
        ),
        Picture(
            "reference_kl",
            "KL to the reference policy",
            (Line("reference/kl", "by algo.kl_estimator", "blue"),),
            "Distance travelled from the policy that training began with, per token.",
        ),
    ),
    "Time": (
        Picture(
            "phases",
            "Seconds per step",
            tuple(Line(f"time/{name}", name, color) for name, color in PHASES.items()),
            "Where a step spends its time. Publishing is the price of fresh weights, scoring the "
            "price of the correction; both should stay small beside the rollout.",
        ),
        Picture(
            "throughput",
            "Throughput",
            (
                Line("throughput/rollout_tokens_per_s", "rollout tokens/s", "blue"),
                Line("throughput/train_tokens_per_s", "training tokens/s", "orange"),
            ),
            "Tokens generated per second of rollout, and tokens trained on per second of training.",
            "Fig. 8",
        ),
        Picture(
            "padding",
            "Padding",
            (Line("train/padding_fraction", "share of positions", "blue"),),
            "Positions of forward and backward passes that hold no token. train.max_tokens brings "
            "responses of like length together, train.packed lays them end to end.",
        ),
    ),
    "Fleet": (
        Picture(
            "serving",
            "Engines serving",
            (
                Line("fleet/serving", "serving", "green"),
                Line("fleet/restarts", "restarts", "orange"),
            ),
            "Engines that generated, each confirmed on the current version. One that dies or fails "
            "an update gets no traffic until it has been restarted and has taken in a version.",
        ),
        Picture(
            "update",
            "Seconds to update the engines",
            (
                Line("sync/quantize_s", "quantize", "blue"),
                Line("sync/send_s", "write or send", "green"),
                Line("sync/load_s", "load", "orange"),
                Line("sync/paused_s", "engines paused", "yellow"),
            ),
            "A new version on its way from the optimizer into the engines. The first three "
            "overlap; requests wait while the engines are paused.",
        ),
    ),
}

OVERVIEW = ("reward", "clip", "kl", "rho_max", "flips", "phases")
"""The pictures that sum up a run, for a README."""


def pictures(history: History) -> dict[str, list[Picture]]:
    """The pictures that this run can fill, by section; what was not measured is left out."""
    sections = {
        name: [picture for picture in section if picture.present(history)]
        for name, section in SECTIONS.items()
    }
    return {name: section for name, section in sections.items() if section}
