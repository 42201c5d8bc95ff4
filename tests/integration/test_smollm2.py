"""Pretrained weights: SmolLM2-135M of its pip package (4 bits, dequantized) is the same model in
Megatron."""

import pytest
import torch

from benchmarks.smollm2 import convert
from qurl_megatron.checkpoints.huggingface import HfReader
from qurl_megatron.data.rows import Question
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.tensors.arch import read_eos
from qurl_megatron.tensors.table import is_quantized
from tests.support.engine_models import engine_for, finish, sequence
from tests.support.logits import assert_logits, hf_logits
from tests.support.plain_transformers import Answer, answers
from tests.support.tools import tool

TEXT = (
    "Reinforcement learning with verifiable rewards asks a model to solve problems whose answers "
    "can be checked, and rewards it when they are right. 17 + 25 = 42, and 9 * 8 = 72."
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert(folder)
    return folder


def test_plain_transformers_answer_as_the_engine_does(smollm2):
    prompts = [TEXT, "Q: What is 17 + 25?\nA:", "  Stra\u00dfe \u4e2d\u6587 \U0001f642 I'LL"]
    tokenizer, stop = Tokenizer(smollm2), frozenset(read_eos(smollm2))
    read = tokenizer.read([Question(prompt, "") for prompt in prompts], chat=False)
    asked = [sequence(ids, 8, temperature=0.0, stop_ids=stop) for ids in read]
    finish(engine_for(smollm2, cache_gb=0.5), *asked)
    here = [Answer(one.prompt, one.output_ids, tokenizer.decode(one.output_ids)) for one in asked]
    assert answers(smollm2, prompts, 8) == here


def ids_of_text(folder) -> torch.Tensor:
    ids = torch.tensor([*Tokenizer(folder).read([Question(TEXT, "")], chat=False)])
    return ids[:, : ids.shape[1] // 6 * 6]  # a length that sequence parallelism can split


# Its 9 heads are 3 groups, so tensor parallelism can be 1 or 3, and never 2.
@pytest.mark.parametrize("layout", [dict(tensor=3), dict(pipeline=2)], ids=str)
def test_logits_on_real_text_equal_hugging_face(smollm2, layout, tmp_path):
    how = dict(uaq_scale=1.5, timeout_s=300)
    assert_logits(smollm2, layout, "gloo", tmp_path, ids=ids_of_text(smollm2), **how)


def test_the_tools_take_real_weights_there_and_back(smollm2, tmp_path):
    """Folded, cut for three ranks, loaded by megatron-core in two layouts, unfolded: the same."""
    ids = ids_of_text(smollm2)
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    fold = ("--uaq-scale", 1.5, "--tensor", 3)
    assert tool("convert", "--hf", smollm2, "--out", megatron, *fold) == 0
    for layout in (dict(tensor=3), dict(pipeline=2)):
        how = dict(converted=megatron, ids=ids, timeout_s=300)
        assert_logits(smollm2, layout, "gloo", tmp_path, **how)
    assert tool("export", "--ckpt", megatron, "--out", back, "--unfold-uaq") == 0
    assert tool("diff", smollm2, back) == 0
    assert torch.equal(hf_logits(back, ids), hf_logits(smollm2, ids))
    for name, source in (("plain", smollm2), ("folded", megatron)):
        out = tmp_path / name
        assert tool("quantize", "--model", source, "--scheme", "int8", "--out", out) == 0
    check_codes(HfReader(smollm2), HfReader(tmp_path / "plain"), HfReader(tmp_path / "folded"))


def check_codes(weights: HfReader, plain: HfReader, folded: HfReader) -> None:
    """Folding moves no INT8 code but at ties, which these weights are full of: 0.1 % of them."""
    moved = count = 0
    for name in filter(is_quantized, weights.stored):
        before, after = plain.whole(name), folded.whole(name)
        ties = weights.whole(name).float() / plain.whole(f"{name}_scale")
        at_a_tie = (ties - ties.floor() - 0.5).abs() < 1e-4
        assert bool(at_a_tie[before != after].all()), name
        moved += int((before != after).sum())
        count += before.numel()
    assert moved / count < 2e-3
