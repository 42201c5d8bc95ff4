import argparse

import pytest
import torch

from benchmarks.performance import remarks
from qurl_megatron.bench import decode
from qurl_megatron.bench.decode import DecodeSpan, random_decoder, run
from qurl_megatron.bench.options import BENCHMARKS, add_shared
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.engines.embedded import native
from qurl_megatron.engines.embedded.engine import Engine
from qurl_megatron.errors import ConfigError
from qurl_megatron.tensors.arch import read_arch


@pytest.mark.parametrize("batch", [1, 600])
def test_every_row_of_the_batch_runs_from_the_first_step_that_counts_to_the_last(batch):
    decoder = random_decoder(read_arch(config_of("tiny")), "fp32", torch.device("cpu"))
    span = DecodeSpan(decoder, batch, steps=2, repeats=1)
    for _ in range(2):  # the warm-up and the repeat
        assert len(span.engine.running) == batch
        before = span.engine.generated
        span()
        assert span.engine.generated - before == 2 * batch


def test_rows_that_ended_on_the_way_are_an_error_and_not_a_rate():
    decoder = random_decoder(read_arch(config_of("tiny")), "fp32", torch.device("cpu"))
    span = DecodeSpan(decoder, 3, steps=2, repeats=1)
    span.engine.abort(lambda sequence: sequence.rid == "1", "the logits are not finite")
    with pytest.raises(ConfigError, match="only 2 of the 3 responses of --batch 3 are left"):
        span()


def cases(monkeypatch, *given):
    rates = {"read_gb_s": 10.0, "int8_gop_s": 10.0, "bf16_gflop_s": 10.0, "fp32_gflop_s": 10.0}
    monkeypatch.setattr(decode, "limits", lambda device: rates)  # seconds of work otherwise
    parser = argparse.ArgumentParser()
    add_shared(parser, BENCHMARKS["decode"])
    BENCHMARKS["decode"].add_options(parser)
    words = ["--model", "tiny", "--batch", "2", "--steps", "3", "--repeats", "1", *given]
    return run(parser.parse_args(words))


def test_a_case_tells_all_that_was_set(monkeypatch):
    (case,) = cases(monkeypatch, "--schemes", "fp32")
    expected = {"model": "tiny", "scheme": "fp32", "batch": 2, "steps": 3, "device": "cpu"}
    assert case.keys == {**expected, "threads": torch.get_num_threads(), "context": 32 + 7 / 2}


@pytest.fixture
def looked_for_anew():
    """The module: once more before the test, and after it."""
    native._found.cache_clear()
    yield
    native._found.cache_clear()


def test_a_case_tells_what_decoded_and_the_page_where_the_module_is_missing(
    monkeypatch, tmp_path, looked_for_anew
):
    monkeypatch.delenv("QURL_NATIVE", raising=False)
    monkeypatch.setattr(native, "instructions", lambda: native.INSTRUCTIONS)
    monkeypatch.setattr(native, "BUILT", tmp_path / native.BUILT.name)
    int8, fp32 = cases(monkeypatch, "--schemes", "int8,fp32")
    told = f"{native.BUILT.name} is not built; {native.BUILT_BY}"
    assert int8.notes == {"decode step": told}
    assert fp32.notes == {"decode step": "scheme none on cpu has no native step"}
    found = [line for line in remarks([int8, fp32]) if line.startswith("Decoded by")]
    assert found == [f"Decoded by torch: {told} (int8, batch 2)."]


def test_a_native_step_is_told_and_nothing_is_remarked(monkeypatch):
    monkeypatch.setattr(Engine, "decode_step", "native")  # on any processor
    (case,) = cases(monkeypatch, "--schemes", "fp32")
    assert case.notes == {"decode step": "native"}
    assert not any("Decoded by" in line for line in remarks([case]))


def test_every_prediction_is_made_before_the_first_repeat(monkeypatch):
    events = []
    foretell, measure = decode.bounds, DecodeSpan.__call__

    def bounds(*given, **named):
        events.append("prediction")
        return foretell(*given, **named)

    def call(span):
        events.append("repeat")
        measure(span)

    monkeypatch.setattr(decode, "bounds", bounds)
    monkeypatch.setattr(DecodeSpan, "__call__", call)
    cases(monkeypatch, "--schemes", "int8,fp32", "--batch", "1", "2")
    assert events == ["prediction"] * 4 + ["repeat"] * 8  # each with its warm-up
