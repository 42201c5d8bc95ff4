import base64

import pytest
import torch

from qurl_megatron.engines.embedded import engine as engine_module
from qurl_megatron.engines.embedded.cache import Cache
from qurl_megatron.engines.embedded.protocol import Generation
from tests.support.engine_models import (
    EXPERTS,
    advance,
    copies,
    decoding_by,
    drain,
    engine_for,
    finish,
    published_tensors,
    random_tensors,
    sequence,
    switch,
    write_model,
)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), **getattr(request, "param", {}))


also_experts = pytest.mark.parametrize(
    "folder", [{}, EXPERTS], indirect=True, ids=["dense", "experts"]
)


def requests(*lengths: int) -> list:
    """Requests for so many tokens, with prompts of 3 to 31 tokens."""
    prompts = [[(3 * i + 5 * j) % 90 + 2 for j in range(3 + 7 * (i % 5))] for i in range(9)]
    return [sequence(prompts[i], length, seed=i) for i, length in enumerate(lengths)]


def assert_as_alone(folder, work) -> None:
    """Each response is the one that an engine gives to its request alone."""
    engine = engine_for(folder)
    for actual, alone in zip(work, copies(work), strict=True):
        finish(engine, alone)
        assert actual.output_ids == alone.output_ids
        torch.testing.assert_close(
            torch.tensor(actual.log_probs), torch.tensor(alone.log_probs), rtol=0, atol=2e-5
        )


@also_experts
def test_joining_and_leaving_a_running_batch_changes_no_result(folder):
    work = requests(*(4 + 9 * (i % 4) for i in range(8)))
    engine = engine_for(folder)
    for one in work:
        engine.add([one])
        advance(engine, 2)
    drain(engine)
    assert_as_alone(folder, work)


@torch.inference_mode()
def test_a_response_names_the_experts_that_its_tokens_went_to(tmp_path):
    """Through shared prompts, changing rows, a retraction and a longer cut of the cache."""
    engine = engine_for(write_model(tmp_path / "model", **EXPERTS))
    work = requests(*(4 + 9 * (i % 4) for i in range(8)))
    work += copies([work[0], work[0]])
    for one in work:
        engine.add([one])
        advance(engine, 2)
    engine.retract()
    work.append(sequence(range(2, 80), 100, seed=9))
    engine.add(work[-1:])
    drain(engine)
    for one in work:
        answer = Generation([one], batched=False, log_probs=False, experts=True).answer()
        rows = base64.b64decode(answer["meta_info"]["routed_experts"])
        ids = torch.tensor([*one.prompt, *one.output_ids][:-1])
        alone: list[torch.Tensor] = []
        cache = Cache(engine.decoder.arch, torch.float32, ids.device, 0.1, 1)
        cache.cut(len(ids), live_rows=0)
        cache.reach(0, 1, len(ids))
        attend = cache.attend_prefill(torch.tensor([0]), len(ids))
        engine.decoder.forward(ids, torch.arange(len(ids)), attend, alone)
        expected = torch.stack(alone, dim=1).sort(-1).values
        actual = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(expected.shape)
        assert actual.long().sort(-1).values.equal(expected)


def test_the_queue_waits_when_rows_are_full_and_is_served_in_order(folder):
    engine = engine_for(folder, max_rows=3)
    work = requests(*[6] * 8)
    engine.add(work)
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.running))
        assert [s.rid for s in engine.waiting] == [s.rid for s in work][8 - len(engine.waiting) :]
    assert most == 3
    assert_as_alone(folder, work)


def test_a_longer_request_recuts_the_cache_under_running_sequences(folder):
    engine = engine_for(folder)
    short, long = sequence([5, 6], 40, seed=1), sequence(range(2, 90), 100, seed=2)
    engine.add([short])
    advance(engine, 10)
    before = engine.cache.length
    finish(engine, long)
    assert engine.cache.length > before
    assert_as_alone(folder, [short, long])


def test_samples_of_one_prompt_share_one_prefill_and_differ_by_seed(folder):
    engine = engine_for(folder)
    prefilled = []
    forward = engine.decoder.forward
    engine.decoder.forward = lambda ids, *rest: prefilled.append(len(ids)) or forward(ids, *rest)
    work = [sequence(range(7, 17), 16, seed=i) for i in range(6)]
    engine.add(work)
    engine.step()
    assert prefilled == [10]
    drain(engine)
    assert len({tuple(s.output_ids) for s in work}) > 1
    assert_as_alone(folder, work)


@also_experts
@pytest.mark.parametrize(
    "scheme,path", [("none", "torch"), ("int8", "torch"), ("int8", "native"), ("fp8", "torch")]
)
def test_the_same_requests_on_an_idle_engine_give_the_same_bits(folder, scheme, path):
    runs = []
    with decoding_by(path):
        engine = engine_for(folder, scheme=scheme)
        for _ in range(2):
            work = requests(*[20] * 9)
            finish(engine, *work)
            runs.append([(s.output_ids, s.log_probs) for s in work])
            finish(engine, sequence(range(2, 9), 7, seed=3))  # other work in between
    assert runs[0] == runs[1]


def test_abort_ends_running_and_waiting_requests_with_what_they_have(folder):
    engine = engine_for(folder, max_rows=2)
    work = requests(*[50] * 4)
    engine.add(work)
    advance(engine, 6)
    engine.abort(lambda s: s.rid in ("s0", "s3"), "enough")
    assert work[0].finish_reason == {"type": "abort", "message": "enough"}
    assert len(work[0].output_ids) == len(work[0].log_probs) == 6
    assert work[3].output_ids == []
    drain(engine)
    assert len(work[1].output_ids) == len(work[2].output_ids) == 50


def test_the_short_ones_go_on_after_an_update_before_the_long_ones_are_computed_anew(
    folder, monkeypatch
):
    """And all as if nothing had happened."""
    monkeypatch.setattr(engine_module, "RECOMPUTE_TOKENS", 60)
    work = [sequence([7 + i] * length, 20, seed=i) for i, length in enumerate((50, 4, 30, 5, 4))]
    engine = engine_for(folder)
    engine.add(work)
    advance(engine, 6)
    engine.retract()
    joined, gained = [], []
    while engine.waiting:
        engine.step()
        joined.append([s.rid for s in engine.running])
        gained.append([engine._batch.produced(row) - 6 for row in range(len(engine.running))])
    # 11 tokens each at most; between two prefills all that run get a token more.
    short = ["s1", "s4", "s3"]
    assert joined == [short, short, [*short, "s2"], [*short, "s2"], [*short, "s2", "s0"]]
    assert gained == [[1, 1, 1], [2, 2, 2], [2, 2, 2, 1], [3, 3, 3, 2], [3, 3, 3, 2, 1]]
    drain(engine)
    assert_as_alone(folder, work)


@pytest.mark.parametrize("recompute", [False, True])
def test_tokens_carry_the_version_that_generated_them(folder, recompute):
    engine = engine_for(folder)
    one = sequence([5, 6, 7], 12, seed=1)
    engine.add([one])
    advance(engine, 5)
    switch(engine, random_tensors(folder, seed=9), "2")
    if recompute:
        engine.retract()
    drain(engine)
    meta = Generation([one], batched=False, log_probs=False).answer()["meta_info"]
    assert meta["weight_version"] == "2"
    assert meta["weight_versions"] == [
        {"version": "default", "start": 0, "end": 5},
        {"version": "2", "start": 5, "end": 12},
    ]
    # An engine that had the new weights from the start, given the same first five tokens:
    again = sequence([5, 6, 7], 12, seed=1)
    again.output_ids, again.log_probs = one.output_ids[:5], one.log_probs[:5]
    finish(engine, again)
    same_first = again.output_ids[5] == one.output_ids[5]
    equal = same_first and abs(again.log_probs[5] - one.log_probs[5]) < 1e-5
    assert equal == recompute


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_nan_weights_leave_no_trace_once_they_are_replaced(folder, scheme):
    good = random_tensors(folder, seed=0)
    engine = engine_for(folder, scheme=scheme)
    running = sequence([5, 6, 7], 30, seed=1)
    engine.add([running])
    engine.step()
    broken = {**good, "model.layers.0.self_attn.k_proj.bias": torch.full((16,), float("nan"))}
    switch(engine, published_tensors(broken, scheme), "broken")
    hopeless = requests(*[60] * 6)
    finish(engine, *hopeless)
    assert {s.finish_reason["type"] for s in [running, *hopeless]} == {"abort"}
    assert len(running.output_ids) == 1 and all(s.output_ids == [] for s in hopeless)
    with torch.inference_mode():
        engine.cache.values[0].fill_(float("nan"))
    switch(engine, published_tensors(good, scheme), "good")
    work = requests(10, 30, 50)
    finish(engine, *work)
    assert [len(one.output_ids) for one in work] == [10, 30, 50]
