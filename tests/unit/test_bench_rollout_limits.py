"""The least a load can take, by hand."""

import pytest

from qurl_megatron.bench.limits import gpu_named, least_seconds, predicted_seconds
from qurl_megatron.plan.constants import GPUS, Constants
from qurl_megatron.plan.rollout_time import DecodeRank, decode_rank
from qurl_megatron.tensors.arch import read_arch

RANK = DecodeRank(
    weights=1000,
    quantized=1,
    plain=1,
    token=10,
    attention=1,
    layers=1,
    hidden=1,
    tensor=1,
    scheme="int8",
)


def test_a_step_reads_the_weights_once_and_each_responses_keys_and_values():
    # Two responses of 2 and 4 tokens after a prompt of 5. Two steps with both, at 1 token each on
    # average: 2 (1000 + 2 x 6 x 10); two with one, at 3 tokens: 2 (1000 + 8 x 10).
    assert least_seconds(RANK, [2, 4], prompt=5, slots=2, bytes_per_s=100.0) == pytest.approx(
        (2 * 1120 + 2 * 1080) / 100
    )


def test_one_at_a_time_reads_the_weights_for_every_token():
    assert least_seconds(RANK, [2, 4], prompt=0, slots=1, bytes_per_s=1.0) == pytest.approx(
        6 * 1000 + 10 * (2 * 1 + 4 * 2)
    )


def test_int8_has_a_smaller_limit_than_bf16():
    from qurl_megatron.bench.random_model import config_of

    arch = read_arch(config_of("1.5B"))
    int8, bf16 = (
        least_seconds(decode_rank(arch, scheme, 1), [100] * 8, prompt=10, slots=8, bytes_per_s=2e12)
        for scheme in ("int8", "none")
    )
    assert 1.3 < bf16 / int8 < 2


def test_a_prediction_is_slower_than_the_limit():
    from qurl_megatron.bench.random_model import config_of

    gpu, rank = GPUS["h100"], decode_rank(read_arch(config_of("1.5B")), "int8", 1)
    lengths = [100, 300, 200]
    least = least_seconds(rank, lengths, prompt=10, slots=3, bytes_per_s=gpu.hbm)
    told = predicted_seconds(
        rank, lengths, prompt=10, prompts=1, slots=3, gpu=gpu, constants=Constants()
    )
    assert told > least


def test_gpus_are_known_by_what_their_driver_calls_them():
    assert gpu_named("NVIDIA H100 80GB HBM3", "fp8") is GPUS["h100"]
    assert gpu_named("NVIDIA A100-SXM4-80GB", "int8") is GPUS["a100-80"]
    assert gpu_named("NVIDIA A100-SXM4-80GB", "fp8") is None  # no kernels
    assert gpu_named("NVIDIA T4", "int8") is None
