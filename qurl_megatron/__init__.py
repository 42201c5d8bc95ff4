"""QuRL on Megatron-Core: reinforcement learning of LLMs with quantized rollouts.

    import qurl_megatron as qurl

    config = qurl.load("launch/recipes/quickstart.toml", ["train.steps=10"])
    run = qurl.train(config)             # or qurl.Run("runs/quickstart"), for an existing run
    run.metrics["reward/mean"]

The names below are imported when they are first used: torch takes seconds.

    load, train, Run             recipes and runs
    objective, token_log_probs   the loss of the paper, per token
    quantize, dequantize         INT8, FP8 and block FP8 weights, whole or sharded
    fold_uaq, unfold_uaq         the invariant scale of norm/linear pairs
    LossInputs                   inputs of a loss of your own (algo.function)
    ConfigError                  a mistake in the input, in one sentence

docs/python.md has an example of each.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qurl_megatron.algo import LossInputs as LossInputs
    from qurl_megatron.algo import objective as objective
    from qurl_megatron.algo import token_log_probs as token_log_probs
    from qurl_megatron.checkpoints.uaq import fold_uaq as fold_uaq
    from qurl_megatron.checkpoints.uaq import unfold_uaq as unfold_uaq
    from qurl_megatron.config import load as load
    from qurl_megatron.kit.errors import ConfigError as ConfigError
    from qurl_megatron.quant import dequantize as dequantize
    from qurl_megatron.quant import quantize as quantize
    from qurl_megatron.run import Run as Run
    from qurl_megatron.run import train as train

__version__ = "0.1.0"

_MODULES = {
    "load": "config",
    "train": "run",
    "Run": "run",
    "objective": "algo",
    "token_log_probs": "algo",
    "LossInputs": "algo",
    "quantize": "quant",
    "dequantize": "quant",
    "fold_uaq": "checkpoints.uaq",
    "unfold_uaq": "checkpoints.uaq",
    "ConfigError": "kit.errors",
}

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604 - all of them are strings


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
