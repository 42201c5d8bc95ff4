"""Does the engine notice what the trainer learns? Code flips and paper Eqs. 13, 14 per version.

Compares every quantized linear weight with what the version before held. The copies live on the
host, one FP32 weight and one code per parameter of this rank's shard.
"""

import torch
from torch import Tensor

from qurl_megatron.config import QuantConfig
from qurl_megatron.observe.metrics import Mean, Metric
from qurl_megatron.quant import QuantizedWeight, code_flips, weight_error, weight_update


class Drift:
    """Collects the shards of one version after another."""

    def __init__(self, config: QuantConfig) -> None:
        self.every = config.diagnostics_every
        self._before: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._totals: dict[str, Tensor] = {}

    def observe(
        self, name: str, weight: Tensor, codes: QuantizedWeight | None, version: int
    ) -> None:
        """Take in one shard; ``codes`` is None where rollouts are not quantized.

        A version is measured against the one just before it, so that a run that was interrupted
        in between measures what an uninterrupted one does.
        """
        if not self.every:
            return
        measured, next_is_measured = version % self.every == 0, (version + 1) % self.every == 0
        before = self._before.pop(name, None)
        if measured and before is not None:
            old_weight, old_codes = before
            self._add("quant/weight_update", weight_update(old_weight, weight.cpu()))
            if codes is not None:
                self._add("quant/code_flip_rate", code_flips(old_codes, codes.values.cpu()))
                self._add("quant/weight_error", weight_error(weight, codes).cpu())
        if next_is_measured:
            self._before[name] = (
                weight.to("cpu", copy=True),
                None if codes is None else codes.values.to("cpu", copy=True),
            )

    def metrics(self) -> dict[str, Metric]:
        """This rank's sums since the last call; merged over ranks they give the model's ratios."""
        totals, self._totals = self._totals, {}
        return {name: Mean(*pair.tolist()) for name, pair in totals.items()}

    def _add(self, name: str, pair: Tensor) -> None:
        self._totals[name] = self._totals.get(name, torch.zeros(2, dtype=torch.float64)) + pair
