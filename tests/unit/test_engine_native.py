"""The decode step in C++ beside torch's. Tests of what it computes need a processor that has it."""

import shutil

import pytest
import torch

from qurl_megatron.engines.embedded import native
from qurl_megatron.engines.embedded.decoder import Matrix
from qurl_megatron.engines.embedded.endpoints import load_engine
from qurl_megatron.schemes import SCHEMES
from qurl_megatron.tensors.arch import FAMILIES
from tests.support.engine_models import (
    EXPERTS,
    advance,
    copies,
    decoding_by,
    engine_for,
    sequence,
    write_model,
)

needs_native = pytest.mark.skipif(
    not native.available(), reason=f"no native step: {native.library()}"
)
BUILT_BY = (
    "with a C++ compiler, `python setup.py build_ext --inplace --force` in the checkout builds it"
)
load = native.library.__wrapped__
MODELS = {
    name: {"model_type": name, "sliding_window": None}
    for name, family in FAMILIES.items()
    if not family.routed
}
MODELS |= {
    "qwen3, heads wider than hidden": {"model_type": "qwen3", "head_dim": 24},
    "one key head for many": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 80},
}


def both_hidden_states(engine):
    """Of the next step, by torch and then natively, from the same cache."""
    batch, cache, count = engine._batch, engine.cache, len(engine.running)
    position = batch.length[:count] - 1
    ids, longest = cache.tokens[batch.row[:count], position], int(position.max()) + 1
    cache.reach(count, 0, longest)
    plain = engine.decoder.forward(ids, position, cache.attend_decode(position, longest))
    return plain, engine._step(engine.decoder.embedding[ids], position)


@needs_native
@pytest.mark.parametrize("tokens,inputs,outputs", [(1, 8, 8), (7, 130, 65), (33, 2816, 64)])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_native_product_has_the_bits_of_the_torch_one(tokens, inputs, outputs, scheme, dtype):
    torch.manual_seed(0)
    largest = SCHEMES[scheme].largest
    x = (torch.randn(tokens, inputs) * torch.logspace(-3, 3, tokens)[:, None]).to(dtype)
    x[0] = x[0].abs().max() * x[0].sign()  # codes of +-largest alone
    x[-1, 0] = 0.5 * x[-1].abs().max() / largest  # half a code
    if tokens > 1:
        x[1] = 0
    w = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    w[0] = 127
    scale = torch.rand(outputs) + 0.1
    blocks = native.Blocks(w, scale)
    for addend in (None, torch.randn(outputs).to(dtype), torch.randn(tokens, outputs).to(dtype)):
        plain, actual = (Matrix(scheme, w, scale, way)(x, addend) for way in (None, blocks))
        assert torch.equal(actual, plain)


@needs_native
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_in_its_own_row(value):
    x = torch.ones(3, 40)
    x[1, 17] = value
    blocks = native.Blocks(torch.ones(8, 40, dtype=torch.int8), torch.ones(8))
    finite = blocks.linear(x, None, 127.0).isfinite()
    assert finite.all(dim=1).tolist() == [True, False, True]
    assert not finite[1].any()


@needs_native
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@torch.inference_mode()
def test_a_native_step_equals_the_torch_one(changes, scheme, tmp_path):
    engine = engine_for(write_model(tmp_path, **changes), scheme=scheme)
    # One on either side of a block of 64 positions, and a step that enters the next block.
    engine.add([sequence(range(2, 2 + n), 99, seed=n) for n in (3, 60, 61, 80)])
    advance(engine, 4)
    plain, actual = both_hidden_states(engine)
    # Other orders of summation may move single codes by one; wrong arithmetic moves everything.
    torch.testing.assert_close(actual.median(), plain.median(), rtol=1e-4, atol=1e-4)
    assert (actual - plain).abs().mean() < 0.01 * plain.abs().mean()


@needs_native
def test_a_native_step_gives_a_row_the_same_bits_in_any_batch_and_by_any_number_of_threads(
    tmp_path, monkeypatch
):
    folder = write_model(tmp_path, num_key_value_heads=2)
    work = [sequence(range(2, 9 + 17 * i), 40, seed=i) for i in range(5)]

    def hidden_of(rows, threads):
        monkeypatch.setattr(native, "THREAD_PAYS_FROM", 1)
        engine = engine_for(folder, scheme="int8")
        for one in copies([work[row] for row in rows]):
            engine.add([one])
            engine.step()
        torch.set_num_threads(threads)
        batch, count = engine._batch, len(engine.running)
        with torch.inference_mode():
            # The same last token for all, whatever was sampled.
            x = engine.decoder.embedding[torch.full((count,), 7)]
            engine.cache.reach(count, 0, int(batch.length.max()))
            return engine._step(x, batch.length[:count] - 1)

    before = torch.get_num_threads()
    try:
        together = hidden_of(range(5), 1)
        assert torch.equal(hidden_of(range(5), 3), together)
        for row in range(5):
            assert torch.equal(hidden_of([row], 2)[0], together[row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(bool(native.INSTRUCTIONS - native.instructions()), reason="another processor")
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler")
def test_where_it_can_be_built_and_run_it_is_there(monkeypatch):
    """All others are skipped where it is not; a build that fails is no error to setup.py."""
    monkeypatch.delenv("QURL_NATIVE", raising=False)
    assert not isinstance(load(), str)


@pytest.mark.parametrize(
    "path,changes,scheme,dtype,step,logged",
    [
        ("native", {}, "int8", "float32", "native", None),
        ("native", {}, "int8", "bfloat16", "native steps need float32 act", "--dtype float32"),
        ("native", EXPERTS, "int8", "float32", "qwen3_moe models have experts", "experts"),
        ("torch", {}, "int8", "bfloat16", "QURL_NATIVE=0", "QURL_NATIVE=0"),
        ("torch", {}, "none", "bfloat16", "scheme none on cpu has no native step", None),
    ],
)
def test_an_engine_says_by_what_it_decodes_and_warns_of_a_slow_path_that_could_be_a_fast_one(
    path, changes, scheme, dtype, step, logged, tmp_path, caplog
):
    with decoding_by(path):
        model = write_model(tmp_path, **changes)
        engine = load_engine(model, scheme=scheme, dtype=dtype, cache_gb=0.01, device="cpu")
        assert engine.decode_step.startswith(step)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == bool(logged) and all(logged in line for line in lines)
    assert path == "native" or not any("--dtype" in line for line in lines)  # it would not help


def test_a_library_that_does_not_fit_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("QURL_NATIVE", "1")
    instructions = {"sse", "fma"} | native.INSTRUCTIONS
    monkeypatch.setattr(native, "instructions", lambda: instructions - {"avx512_vnni"})
    assert load() == "the processor has no avx512_vnni"
    monkeypatch.setattr(native, "instructions", lambda: instructions)
    monkeypatch.setattr(native, "BUILT", tmp_path / "_decode.so")
    assert load() == f"_decode.so is not built; {BUILT_BY}"
    (tmp_path / "_decode.so").write_text("another machine's")
    assert "_decode.so cannot be loaded" in load()
    monkeypatch.undo()  # before a question whose answer is kept
    if native.available():
        (tmp_path / "decode.cpp").write_bytes(native.SOURCE.read_bytes() + b"\n")
        monkeypatch.setattr(native, "SOURCE", tmp_path / "decode.cpp")
        assert load() == f"{native.BUILT.name} is built from another decode.cpp; {BUILT_BY}"


def test_the_two_languages_agree_on_what_crosses_the_border():
    """Fields by name and order: a field that only one of them has would shift all the others."""
    source = native.SOURCE.read_text()
    for structure in (native._Matrix, native._Layer, native._Model):
        body = source.split(f"struct {structure.__name__[1:]} {{")[1].split("\n};")[0]
        lines = [line.split("//")[0] for line in body.splitlines()]
        names = [
            part.split()[-1].strip("*") for x in lines for part in x.strip(" ;").split(",") if part
        ]
        assert names == [name for name, _ in structure._fields_]
