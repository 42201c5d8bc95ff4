"""The rollout benchmark but for its engines: what is asked of whom, and what becomes of it."""

from argparse import Namespace

import numpy as np
import pytest
import torch

from qurl_megatron.bench import rollout
from qurl_megatron.bench.command import SCHEMES
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.rollout import Subject
from qurl_megatron.bench.rollout_engines import Version, model_folder
from qurl_megatron.bench.rollout_load import (
    Ask,
    LoadOutcome,
    TimedAnswer,
    drive,
    groups,
    long_tailed,
)
from qurl_megatron.cli import main
from qurl_megatron.engines.embedded.decoder import DTYPES, Decoder
from qurl_megatron.fleet.client import EngineError


@pytest.mark.parametrize("mean, longest", [(64, 256), (300, 8192), (3, 9), (9, 9)])
def test_lengths_have_the_mean_that_they_are_called_by_though_they_are_cut_off(mean, longest):
    lengths = long_tailed(512, mean=mean, longest=longest)
    assert np.mean(lengths) == pytest.approx(mean, rel=0.01)
    assert min(lengths) >= 1 and max(lengths) <= longest
    assert lengths == long_tailed(512, mean=mean, longest=longest)


def test_samples_of_a_group_share_its_prompt_and_no_repeat_has_a_prompt_of_another():
    shape = dict(samples=2, prompt=8, vocab=64)
    asks = groups([4, 5, 6, 7], seed=0, **shape)
    assert [ask.tokens for ask in asks] == [4, 5, 6, 7]
    assert asks[0].prompt == asks[1].prompt != asks[2].prompt
    assert all(0 < token < 63 for ask in asks for token in ask.prompt)
    assert not {ask.prompt for ask in asks} & {
        ask.prompt for ask in groups([4, 5], seed=1, **shape)
    }


class Engine:
    """An engine that answers when the test says, in place of its client."""

    def __init__(self, tokens=lambda asked: asked):
        self.asked, self.tokens = [], tokens

    async def generate(self, http, prompts, params, rid, read, *, limit):
        self.asked.append(params[0])
        return [{"output_ids": [1] * self.tokens(params[0]["max_new_tokens"])}]


def test_all_are_asked_for_at_their_length_and_versions_come_evenly_between_them():
    engine, asks = Engine(), [Ask((1, 2), 10)] * 8
    published = []

    def publish() -> float:
        published.append(len(engine.asked))
        return 0.25

    outcome = drive(engine, asks, publish=publish, publications=3)
    assert outcome.paused_s == [0.25] * 3 and outcome.tokens == 80
    assert outcome.reasons() == {}
    wanted = {"max_new_tokens": 10, "ignore_eos": True, "temperature": 1.0}
    assert engine.asked == [wanted] * 8


def test_a_failed_request_and_a_wrong_length_are_reasons_with_their_cause():
    def answers(asked: int) -> int:
        if asked == 6:
            raise EngineError("out of memory")
        return asked - (asked == 5)

    outcome = drive(Engine(answers), [Ask((1,), 4), Ask((1,), 5), Ask((1,), 6)])
    assert outcome.reasons() == {
        "failed requests": "1 of 3 requests; the first: out of memory",
        "wrong lengths": "1 of 3 responses; the first has 4 tokens, where 5 were asked for",
    }
    assert outcome.tokens == 8


def outcome(*ends: float, paused_s=(), failure="") -> LoadOutcome:
    tokens = 0 if failure else 2
    answers = [TimedAnswer(Ask((1, 2, 3), 2), end, tokens, failure) for end in ends]
    return LoadOutcome(answers, list(paused_s))


@pytest.mark.parametrize(
    ("ends", "tail"),
    [
        ([1, 2, 3, 10], 0.7),  # 4, 3, 2 run until the third second, then one alone
        ([2, 2], 0.0),
        ([5], 0.0),
        ([1, 4, 8], 0.5),  # one of three is fewer than half
    ],
)
def test_the_tail_is_the_time_in_which_fewer_than_half_of_the_batch_run(ends, tail):
    assert outcome(*ends).tail == pytest.approx(tail)
    assert outcome(*ends).makespan == max(ends)


def case(*outcomes):
    return rollout.case_of(Subject("embedded", "int8"), {"model": "tiny"}, outcomes, {"tp": 1})


def test_a_case_has_a_value_per_repeat_and_the_slowest_publication():
    found = case(outcome(1.0, 2.0, paused_s=[0.1, 0.3]), outcome(1.0, 4.0, paused_s=[0.2]))
    assert found.figure("tokens/s").repeats == [2.0, 1.0]
    assert found.figure("makespan").repeats == [2.0, 4.0]
    assert found.figure("paused to publish").repeats == [0.3, 0.2]
    assert found.figure("tail").better is None
    assert (found.keys["model"], found.keys["engine"]) == ("tiny", "embedded")
    assert found.reasons == [] and found.notes == {"identity": {"tp": 1}}


def test_a_reason_of_one_repeat_is_one_of_the_case_and_without_an_answer_there_are_no_figures():
    found = case(outcome(1.0), outcome(1.0, failure="cut off"))
    assert found.figures == [] and found.reasons == ["failed requests"]
    assert found.notes["failed requests"] == "1 of 1 requests; the first: cut off"


def measured(scheme: str, rates: list[float], prompts=8, **given) -> Case:
    keys = {"engine": "sglang", "scheme": scheme, "dtype": "bfloat16", "prompts": prompts}
    speed = Figure(name="tokens/s", unit="1/s", better="higher", repeats=rates)
    return Case(name=f"sglang {scheme}", figures=[speed], keys=keys, **given)


@pytest.mark.parametrize(
    ("rounds", "line"),
    [
        ([1.5, 1.4, 1.7], "1.50 (1.40 to 1.70)"),  # too few for an interval: all
        ([0.1, 1.3, 1.4, 1.5, 1.5, 1.5, 1.6, 1.7, 9.0], "1.50 (1.30 to 1.70)"),
    ],
)
def test_it_ends_with_int8_over_bf16_in_the_median_of_the_rounds_and_where_it_lies(
    rounds, line, monkeypatch, capsys
):
    slower = [100.0 / (i + 1) for i in range(len(rounds))]  # drift that both have
    bf16 = measured("bf16", slower)
    int8 = measured("int8", [rate * ratio for rate, ratio in zip(slower, rounds, strict=True)])
    other_load = measured("int8", slower, prompts=9)
    failed = measured("fp8", slower, reasons=["failed requests"])
    monkeypatch.setattr(rollout, "run", lambda options: [failed, int8, bf16, other_load])
    assert main(["bench", "rollout"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"failed requests\nsglang int8: INT8 / BF16 = {line}\n")
    assert rollout.ratios([int8]) == []


@pytest.mark.parametrize(
    ("gpus", "engines", "together"),
    [(True, ["sglang"], 1), (True, ["embedded"], 2), (False, ["sglang"], 2)],
)
def test_engines_that_fill_a_gpu_are_measured_one_after_another(
    gpus, engines, together, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(rollout, "_measured", lambda subjects, _: [subjects])
    asked = Namespace(engine=engines, schemes=["bf16", "int8"], tensor=[2], prompts=[8])
    found = rollout.run(asked)
    assert [s.scheme for s in sum(found, [])] == ["bf16", "int8"] and len(found[0]) == together


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("empty", [False, True], ids=["written", "never written"])
def test_weights_are_a_whole_version_as_engines_load_it(empty, scheme, tmp_path):
    subject = Subject("embedded", scheme)
    number, dtype = subject.quant_scheme, subject.dtype
    folder = model_folder("tiny", tmp_path, empty=empty)
    version = Version(folder, number, dtype, tmp_path / "versions")
    decoder = Decoder(version.arch, number, DTYPES[dtype], torch.device("cpu"))
    tensors = {shard.name: shard.value for shard in version.shards}
    decoder.check(tensors)
    kinds = {tensors[name].dtype for name in tensors if name.endswith("q_proj.weight")}
    codes = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": DTYPES[dtype]}
    assert kinds == {codes[scheme]}
    layer = "model.layers.0."
    key, value = (tensors[f"{layer}self_attn.{name}_proj.weight"] for name in "kv")
    assert (key is value) == empty  # of one shape: a large model takes no more room than a layer


def test_a_folder_that_has_weights_is_taken_as_it_is(tmp_path):
    random = model_folder("tiny", tmp_path, empty=False)
    assert model_folder(str(random), tmp_path / "other", empty=False) == random
    assert not (tmp_path / "other").exists()
