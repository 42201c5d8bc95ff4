"""Static decode steps beside the ordinary ones, on a GPU as CUDA graphs."""

import copy
import warnings

import pytest
import torch

from qurl_megatron.engines.embedded.cache import bytes_per_token
from qurl_megatron.engines.embedded.decoder import Slot
from qurl_megatron.engines.embedded.endpoints import load_engine
from qurl_megatron.engines.embedded.engine import Engine
from qurl_megatron.engines.embedded.static import POSITIONS, rounded_up, rows_for
from tests.unit.engine_models import (
    engine_for,
    finish,
    published_tensors,
    random_tensors,
    sequence,
    write_model,
)

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_A_GPU = pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)], indirect=True)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.1}
FORMATS = {
    "fp32": ("none", torch.float32),
    "int8": ("int8", torch.float32),
    "bf16": ("none", torch.bfloat16),
    "int8 in bf16": ("int8", torch.bfloat16),
    "fp8 in bf16": ("fp8", torch.bfloat16),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def ragged_work() -> list:
    """Eleven rows between two sizes; two cross POSITIONS; they end one by one, some by stop ids."""
    lengths = [3, 60, POSITIONS - 9, 17, 120, 5, 33, 8, 90, 12, POSITIONS - 2]
    return [
        sequence(
            [(3 * i + 5 * j) % 90 + 2 for j in range(length)],
            6 + 5 * (i % 5),
            seed=i,
            temperature=0.0 if i % 4 == 3 else 0.7 + 0.1 * i,
            stop_ids=frozenset(range(i, 2 * i)) if i % 3 == 1 else frozenset(),
        )
        for i, length in enumerate(lengths)
    ]


def agreeing(actual, expected, tolerance: float) -> int:
    """Tokens before the first that differs; up to there the log-probs must be the same, too."""
    pairs = zip(actual.output_ids, expected.output_ids, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected.output_ids))
    torch.testing.assert_close(
        *(torch.tensor(s.log_probs[:same]) for s in (actual, expected)), rtol=0, atol=tolerance
    )
    return same


def assert_same(work: list, expected: list, dtype: torch.dtype = torch.float32) -> None:
    same = [agreeing(a, b, TOLERANCE[dtype]) for a, b in zip(work, expected, strict=True)]
    total = sum(len(s.output_ids) for s in expected)
    if dtype is torch.float32:
        assert sum(same) == total
        assert [s.finish_reason for s in work] == [s.finish_reason for s in expected]
    else:  # a last bit of a logit may decide a draw, and all that follows
        assert sum(same) > 0.7 * total


def in_two_waves(engine: Engine, work: list) -> None:
    """The last three join while the others run."""
    engine.add(work[:-3])
    for _ in range(8):
        engine.step()
    finish(engine, *work[-3:])


@pytest.mark.parametrize("format", FORMATS)
def test_static_steps_draw_what_ordinary_steps_do(folder, device, format):
    scheme, dtype = FORMATS[format]
    work, expected = ragged_work(), ragged_work()
    for static, sequences in ((True, work), (False, expected)):
        engine = engine_for(folder, scheme=scheme, dtype=dtype, device=device, static=static)
        in_two_waves(engine, sequences)
    assert len({len(s.output_ids) for s in expected}) > 3
    assert_same(work, expected, dtype)


def test_a_full_cache_has_no_idle_rows_to_round_up_to(folder, device):
    work = [sequence([5 + i, 6], 20, seed=i) for i in range(11)]
    expected = copy.deepcopy(work)
    for static, sequences in ((True, work), (False, expected)):
        engine = engine_for(folder, device=device, static=static)
        row = 64 * bytes_per_token(engine.decoder.arch, engine.decoder.dtype)
        engine = Engine(engine.decoder, 11.5 * row / 2**30, static=static)
        finish(engine, *sequences)
        assert engine.cache.rows == 11
    assert_same(work, expected)


@pytest.mark.parametrize("prompt,top_p", [(range(2, 90), 0.6), ([7] * (POSITIONS + 44), 1.0)])
def test_a_newcomer_is_seen_by_the_next_step(folder, device, prompt, top_p):
    """One that wants top_p, or one whose prompt is longer than what the step before read."""
    work = [sequence([5, 6], 30, seed=0), sequence(prompt, 12, seed=1, top_p=top_p)]
    expected = copy.deepcopy(work)
    for static, (first, second) in ((True, work), (False, expected)):
        engine = engine_for(folder, device=device, static=static)
        engine.add([first])
        for _ in range(5):
            engine.step()
        finish(engine, second)
    assert_same(work, expected)


@pytest.mark.parametrize("new,stop_ids", [(370, ()), (290, range(40, 46))], ids=["recut", "stops"])
def test_what_a_graph_has_captured_may_be_laid_out_anew(folder, device, new, stop_ids):
    """A longer request recuts the cache, more stop ids move their column; the shape stays."""
    work = [sequence([5, 6], 290, seed=1), sequence([6, 7], 6, seed=2)]
    work.append(sequence([8, 9], new, seed=3, stop_ids=frozenset(stop_ids)))
    expected = copy.deepcopy(work)
    for static, (*first, last) in ((True, work), (False, expected)):
        engine = engine_for(folder, device=device, static=static)
        engine.add(first)
        while len(engine.running) != 1:
            engine.step()
        before = engine.cache.length
        engine.add([last])
        for _ in range(60):
            engine.step()
        engine.abort(lambda _: True, "enough")
        assert (engine.cache.length > before) == (not stop_ids)
    assert expected[-1].finish_reason["type"] == ("stop" if stop_ids else "abort")
    assert len(expected[-1].output_ids) > 5
    assert_same(work, expected)


def test_top_p_is_left_to_the_ordinary_step(folder, device):
    work = [sequence([5 + i, 6], 12, seed=i, top_p=0.6 if i == 1 else 1.0) for i in range(3)]
    work[1].max_new_tokens = 6  # the others go on without it
    expected = copy.deepcopy(work)
    finish(engine_for(folder, device=device, static=True), *work)
    finish(engine_for(folder, device=device, static=False), *expected)
    assert_same(work, expected)


@pytest.mark.parametrize("scheme", ["none", "int8"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_publication_is_seen_by_the_next_step(folder, device, scheme, recompute):
    tensors = published_tensors(random_tensors(folder, seed=1), scheme)
    work, expected = ragged_work(), ragged_work()
    for static, sequences in ((True, work), (False, expected)):
        engine = engine_for(folder, scheme=scheme, device=device, static=static)
        engine.add(sequences)
        for _ in range(5):
            engine.step()
        engine.update(tensors, "2", recompute=recompute)
        finish(engine)
    assert_same(work, expected)
    assert [s.versions for s in work] == [s.versions for s in expected]


def test_broken_weights_end_what_runs_and_nothing_after_it(folder, device):
    good = random_tensors(folder, seed=0)
    broken = {name: tensor * float("nan") for name, tensor in good.items()}
    engine = engine_for(folder, device=device, static=True)
    first, second = ragged_work(), ragged_work()
    engine.add(first)
    for _ in range(3):
        engine.step()
    engine.update(broken, "nan")
    interrupted = list(engine.running)
    finish(engine)
    assert {s.finish_reason["type"] for s in interrupted} == {"abort"}
    engine.update(good, "good")
    finish(engine, *second)
    expected = ragged_work()
    finish(engine_for(folder, device=device, static=False), *expected)
    assert_same(second, expected)


@ON_A_GPU
def test_graphs_outlive_a_publication_but_not_weights_that_moved(folder, device):
    engine = engine_for(folder, device=device)
    assert engine.decode_step == "CUDA graphs"

    def captures_of(seed: int) -> int:
        before, one = engine._static.captures, sequence([5, 6, 7], 20, seed=seed)
        finish(engine, one)
        plain = engine_for(folder, device=device, static=False)
        plain.update(random_tensors(folder, seed=seed), "1")
        other = sequence([5, 6, 7], 20, seed=seed)
        finish(plain, other)
        assert_same([one], [other])
        return engine._static.captures - before

    assert captures_of(0) == 1
    engine.update(random_tensors(folder, seed=1), "1")
    assert captures_of(1) == 0
    slots, name = engine.decoder.slots, "model.norm.weight"
    engine.decoder.norm = engine.decoder.norm.clone()
    slots[name] = Slot(engine.decoder.norm, slots[name].dtypes)
    engine.update(random_tensors(folder, seed=2), "2")
    assert captures_of(2) == 1


@ON_A_GPU
def test_the_host_waits_once_a_step(folder, device):
    engine = engine_for(folder, device=device)
    engine.add([sequence([5 + i, 6], 20, seed=i) for i in range(3)])
    for _ in range(4):  # the prompts, a warm-up, a capture and a replay
        engine.step()
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(5):
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode(0)
    assert sum("synchronizing CUDA operation" in str(one.message) for one in seen) == 5


@ON_A_GPU
def test_graphs_can_be_switched_off(folder, device):
    settings = {"scheme": "none", "dtype": "bfloat16", "cache_gb": 0.01}
    assert load_engine(folder, **settings).decode_step == "CUDA graphs"
    plain = load_engine(folder, **settings, graphs=False)
    assert plain.decode_step == "scheme none on cuda has no native step"


@ON_A_GPU
def test_launched_captured_and_replayed_a_step_gives_the_same_bits(folder, device):
    engine, runs = engine_for(folder, device=device), []
    for _ in range(3):
        work = ragged_work()
        finish(engine, *work)
        runs.append([(s.output_ids, s.log_probs) for s in work])
    assert runs[0] == runs[1] == runs[2]


def test_sizes_are_few_and_at_most_an_eighth_too_large():
    assert [rows_for(n) for n in (1, 2, 3, 5, 8, 9, 16, 17, 65, 129, 512)] == [
        *(1, 2, 4, 8, 8, 16, 16, 24, 72, 144, 512)
    ]
    for number in range(1, 40_000):
        rounded = rounded_up(number, POSITIONS)
        assert number <= rounded < number + max(POSITIONS, number / 8 + 1)
    assert len({rounded_up(number, POSITIONS) for number in range(1, 32_769)}) == 8 + 4 * 8
