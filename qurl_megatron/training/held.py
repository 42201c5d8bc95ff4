"""Memory of a built model and its optimizer: counted, not calculated from shapes."""

from collections.abc import Iterable
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from qurl_megatron.training.memory import Held


def held(model: DistributedDataParallel, optimizer: Any) -> Held:
    """Add up the storages of a wrapped model and its optimizer, with their buffers' padding."""
    parameters = list(model.module.parameters())
    weights = _storages(p.data for p in parameters)
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    gradients = _storages(buffer.grad_data for buffer in buffers)
    adams = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    updated = [p for adam in adams for group in adam.param_groups for p in group["params"]]
    moments = _storages(
        adam.state[p][moment]
        for adam in adams
        for group in adam.param_groups
        for p in group["params"]
        for moment in ("exp_avg", "exp_avg_sq")
    )
    # Models in FP32 are updated in place: their masters are the weights.
    masters = {key: size for key, size in _storages(updated).items() if key not in weights}
    return Held(
        parameters=sum(p.numel() for p in parameters),
        largest=max(p.numel() for p in parameters),
        weights=sum(weights.values()),
        gradients=sum(gradients.values()),
        masters=sum(masters.values()),
        moments=sum(moments.values()),
    )


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by storage: views of one buffer count once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}
