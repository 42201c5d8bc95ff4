"""How far a version differs from the previous one: does the engine notice what the trainer learns?

Measures code flips, paper Eqs. 13 and 14, and the share of the update that reaches the quantized
weights, for every quantized linear weight. The previous version is kept on the host: an FP32 weight
and a code per parameter of this rank's shard, and the scales of the codes.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from qurl_megatron.config import QuantConfig
from qurl_megatron.observe.metrics import Cosine, Mean, Metric
from qurl_megatron.quant import (
    QuantizedWeight,
    code_flips,
    update_passed,
    weight_error,
    weight_update,
)


class Drift:
    """Measures each version's shards against those of the previous version."""

    def __init__(self, config: QuantConfig) -> None:
        self.every = config.diagnostics_every
        self._before: dict[str, tuple[int, Tensor, QuantizedWeight | None]] = {}
        self._version: int | None = None  # that is being measured
        self._totals: dict[str, Tensor] = {}
        self._passed = torch.zeros(3, dtype=torch.float64)

    def observe(
        self, name: str, weight: Tensor, codes: QuantizedWeight | None, version: int
    ) -> None:
        """Take in one shard; ``codes`` is None if rollouts are not quantized.

        A version is compared only with the one just before it, so that an interrupted run reports
        the same numbers as an uninterrupted one. A version that is sent again counts once.
        """
        if not self.every:
            return
        if version != self._version:
            self._version = version
            self._totals.clear()
            self._passed.zero_()
        if name in self._before and self._before[name][0] == version:
            return
        measured, next_is_measured = version % self.every == 0, (version + 1) % self.every == 0
        before = self._before.pop(name, None)
        if measured and before is not None and before[0] == version - 1:
            _, old_weight, old_codes = before
            new_weight = weight.cpu()
            self._add("quant/weight_update", weight_update(old_weight, new_weight))
            if codes is not None and old_codes is not None:
                new_codes = replace(codes, values=codes.values.cpu(), scale=codes.scale.cpu())
                self._add("quant/code_flip_rate", code_flips(old_codes.values, new_codes.values))
                self._add("quant/weight_error", weight_error(weight, codes).cpu())
                self._passed += update_passed(old_weight, new_weight, old_codes, new_codes)
        if next_is_measured:
            self._before[name] = version, weight.to("cpu", copy=True), _host_copy(codes)

    def metrics(self) -> dict[str, Metric]:
        """Return this rank's sums since the last call; merged over ranks they give the ratios.

        The shares of an update are missing if this rank had none.
        """
        totals, self._totals = self._totals, {}
        metrics: dict[str, Metric] = {name: Mean(*pair.tolist()) for name, pair in totals.items()}
        together, update, moved = self._passed.tolist()
        self._passed.zero_()
        # A shard without an update may still have moved: its rows share scales with other ranks.
        if update or moved:
            metrics["quant/update_passed"] = Mean(together, update)
            metrics["quant/update_cosine"] = Cosine(together, update, moved)
        return metrics

    def _add(self, name: str, pair: Tensor) -> None:
        self._totals[name] = self._totals.get(name, torch.zeros(2, dtype=torch.float64)) + pair


def of_an_update(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return metrics merged over ranks, without the shares of an update if there was none.

    Randomly rounded codes change even without an update.
    """
    passed = metrics.get("quant/update_passed")
    if not isinstance(passed, Mean) or passed.weight:
        return dict(metrics)
    return {name: m for name, m in metrics.items() if not name.startswith("quant/update_")}


def _host_copy(codes: QuantizedWeight | None) -> QuantizedWeight | None:
    if codes is None:
        return None
    return replace(
        codes, values=codes.values.to("cpu", copy=True), scale=codes.scale.to("cpu", copy=True)
    )
