"""Seconds of publishing one version, from bytes and bandwidths.

A training rank quantizes its share of the weights and puts the codes; an engine rank checks and
copies its own. Both go bucket by bucket, one behind the other:

    seconds = first bucket made + the longer of making and loading the rest + last bucket loaded

An estimate: ``python -m benchmarks.publish`` measures it.
"""

import math
from functools import cache

from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.config import RunConfig
from qurl_megatron.plan import memory
from qurl_megatron.plan.constants import Constants, Gpu
from qurl_megatron.tensors.arch import Arch

MIB = 1 << 20

# Bytes of memory that plain torch operators read and write on a GPU.
QUANTIZE_TRAFFIC = 29  # per FP32 weight: read twice for amax; then divide, round, cast
HASH_TRAFFIC = 31  # per byte that is summed: fourteen operators on words of 8 bytes
COPY_TRAFFIC = 2  # per byte


_parameters = cache(parameter_count)


def publish_time(config: RunConfig, arch: Arch, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of one publication by the recipe's transport.

    Files go through the disk that all machines share; memory goes over NVLink, a group over the
    network.
    """
    parallel, rollout = config.parallel, config.rollout
    version = memory.engine_weights(arch, config.quant.scheme, 1, config.model.itemsize)
    put = version / (parallel.tensor * parallel.pipeline)
    received = version / rollout.engine_tensor
    # Data-parallel replicas take turns, bucket by bucket.
    quantized = put / parallel.data
    weights = _parameters(arch) / (parallel.tensor * parallel.pipeline * parallel.data)

    hbm = gpu.hbm * constants.decode_hbm
    making = (weights * QUANTIZE_TRAFFIC + quantized * (HASH_TRAFFIC + COPY_TRAFFIC)) / hbm
    loading = received * (HASH_TRAFFIC + COPY_TRAFFIC) / hbm
    match config.sync.on_one_machine:
        case "files":
            making = max(making, version / constants.disk)
            loading = max(loading, rollout.engines * version / constants.disk)
        case "memory":
            loading += received / (gpu.nvlink * constants.collective)
        case _:
            sent = max(rollout.engines * quantized, received)
            loading += sent / (gpu.network * constants.collective)

    buckets = max(1, math.ceil(put / (config.sync.bucket_mb * MIB)))
    behind = max(making, loading) * (buckets - 1) / buckets
    calls = (buckets + 12) * constants.publish_call
    return constants.publish_over * ((making + loading) / buckets + behind + calls)
