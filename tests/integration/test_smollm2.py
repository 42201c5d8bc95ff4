"""Pretrained weights: SmolLM2-135M of its pip package (4 bits, dequantized) is the same model in
Megatron."""

import pytest

from benchmarks.smollm2 import convert
from qurl_megatron.checkpoints.huggingface import HfReader
from qurl_megatron.config import ParallelConfig
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.tensors.arch import read_eos
from qurl_megatron.tensors.table import is_quantized
from tests.support.engine_models import engine_for, finish, sequence
from tests.support.logits import check_converted_logits, check_logits, hf_logits
from tests.support.plain_transformers import Answer, answers
from tests.support.ranks import run_on_ranks
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
    asked = [
        sequence(tokenizer.encode(prompt), 8, temperature=0.0, stop_ids=stop) for prompt in prompts
    ]
    finish(engine_for(smollm2, cache_gb=0.5), *asked)
    here = [Answer(one.prompt, one.output_ids, tokenizer.decode(one.output_ids)) for one in asked]
    assert answers(smollm2, prompts, 8) == here


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


def test_the_tools_take_real_weights_there_and_back(smollm2, tmp_path):
    """Folded, cut for three ranks, loaded by megatron-core in two layouts, unfolded: the same."""
    import torch

    ids = torch.tensor([Tokenizer(smollm2).encode(TEXT)])
    ids = ids[:, : ids.shape[1] // 6 * 6]
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    fold = ("--uaq-scale", 1.5, "--tensor", 3)
    assert tool("convert", "--hf", smollm2, "--out", megatron, *fold) == 0
    for parallel in (ParallelConfig(tensor=3), ParallelConfig(pipeline=2)):
        run_on_ranks(
            check_converted_logits,
            parallel.world_size,
            "gloo",
            tmp_path,
            smollm2,
            megatron,
            parallel,
            ids,
            hf_logits(smollm2, ids),
            timeout_s=300,
        )
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
    for name in filter(is_quantized, weights.names()):
        before, after = plain.whole(name), folded.whole(name)
        ties = weights.whole(name).float() / plain.whole(f"{name}_scale")
        at_a_tie = (ties - ties.floor() - 0.5).abs() < 1e-4
        assert bool(at_a_tie[before != after].all()), name
        moved += int((before != after).sum())
        count += before.numel()
    assert moved / count < 2e-3


# -- what alignment cannot reach ------------------------------------------------------------------


def prefill_log_probs(decoder, ids: list[int], nudge: float = 0.0):
    """Of each token behind the first, computed at once, with each embedding off by about ``nudge``
    of itself."""
    import torch
    from torch.nn import functional as F

    def attend(_layer, q, kv):  # [T, heads, D]
        heads = (x.transpose(0, 1)[None] for x in (q, *kv.chunk(2, dim=1)))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)

    embedding = decoder.embedding
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1))
    decoder.embedding = embedding * (1 + nudge * noise)
    hidden = decoder.forward(torch.tensor(ids), torch.arange(len(ids)), attend)
    decoder.embedding = embedding
    return decoder.logits(hidden).log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]


@pytest.mark.parametrize("scheme", ["int8", "none"])
def test_int8_amplifies_a_change_of_1e_7_and_the_order_of_sums_to_a_kl_of_a_hundredth(
    smollm2, scheme
):
    """So no trainer can have those of the engine. ``-s`` shows the numbers of the page."""
    import torch

    engine, tokenizer = engine_for(smollm2, scheme=scheme, cache_gb=0.5), Tokenizer(smollm2)
    asked = [
        sequence(tokenizer.encode(f"Q: What is {a} + {b}? A:"), 24, seed=seed)
        for seed, (a, b) in enumerate(((3, 4), (8, 9), (2, 7), (6, 5)))
    ]
    finish(engine, *asked)
    of_order, of_nudge = [], []
    for one in asked:
        ids, behind = [*one.prompt, *one.output_ids], len(one.prompt) - 1
        prefilled = prefill_log_probs(engine.decoder, ids)[behind:]
        of_order.append(prefilled - torch.tensor(one.log_probs))
        of_nudge.append(prefilled - prefill_log_probs(engine.decoder, ids, 1e-7)[behind:])
    order, nudge = (
        (log_ratio.exp() - 1 - log_ratio).mean().item()
        for log_ratio in (torch.cat(parts).double() for parts in (of_order, of_nudge))
    )
    print(f"{scheme}: prefill and decoding {order:.2g}, embeddings x (1 + 1e-7) {nudge:.2g}")
    assert min(order, nudge) > 1e-3 if scheme == "int8" else max(order, nudge) < 1e-8
