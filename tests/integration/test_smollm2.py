"""Real pretrained weights: SmolLM2-135M, out of its pip package, is the same model in Megatron."""

import pytest

from qurl_megatron.config import ParallelConfig
from qurl_megatron.data.smollm2 import convert
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.testing.ranks import run_on_ranks
from tests.distributed.test_model import check_logits, hf_logits

TEXT = (
    "Reinforcement learning with verifiable rewards asks a model to solve problems whose answers "
    "can be checked, and rewards it when they are right. 17 + 25 = 42, and 9 * 8 = 72."
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert(folder)
    return folder


# Its 9 heads are 3 groups, so tensor parallelism can be 1 or 3, and never 2.
@pytest.mark.parametrize("tensor, pipeline, uaq_scale", [(1, 1, 1.0), (3, 1, 1.5), (1, 2, 1.5)])
def test_logits_on_real_text_equal_hugging_face(smollm2, tensor, pipeline, uaq_scale, tmp_path):
    import torch

    ids = torch.tensor([Tokenizer(smollm2).encode(TEXT)])
    ids = ids[:, : ids.shape[1] // 6 * 6]  # a length that sequence parallelism can split
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    expected = hf_logits(smollm2, ids)
    run_on_ranks(
        check_logits,
        parallel.world_size,
        "gloo",
        tmp_path,
        smollm2,
        parallel,
        uaq_scale,
        ids,
        expected,
        timeout_s=300,
    )
