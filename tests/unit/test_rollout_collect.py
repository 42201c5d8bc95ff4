import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.rollout.client import EngineError
from qurl_megatron.rollout.collect import collect, greedy, sample_seed
from qurl_megatron.types import Prompt

GOOD = {
    "text": "",
    "output_ids": [4, 5, 6],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 3},
        "weight_version": "8",
        "weight_versions": [
            {"version": "7", "start": 0, "end": 1},
            {"version": "8", "start": 1, "end": 3},
        ],
        "output_token_logprobs": [[-1.0, 4, None], [-2.0, 5, None], [0.0, 6, None]],
    },
}
PROMPTS = [Prompt(10 + i, (2, 3 + i), "", "") for i in range(3)]


@dataclass
class FakeEngine:
    """A server that answers everything with one canned response."""

    answer: dict = field(default_factory=lambda: copy.deepcopy(GOOD))
    url: str = "http://fake"
    requests: list = field(default_factory=list)

    def generate(self, input_ids, sampling_params, *, rid):
        self.requests.append((input_ids, sampling_params, rid))
        return [self.answer] * len(input_ids)

    def abort(self, rid):
        pass


def fleet_of(*engines):
    return SimpleNamespace(clients=list(engines), check=lambda: None)


def test_prompts_go_round_robin_with_one_batched_request_per_engine():
    engines = FakeEngine(), FakeEngine()
    config = RolloutConfig(samples_per_prompt=2, max_new_tokens=5, temperature=0.5)
    samples = collect(fleet_of(*engines), PROMPTS, config, seed=3, step=4)
    assert [sample.prompt.index for sample in samples] == [10, 10, 11, 11, 12, 12]
    [(ids, params, _)] = engines[0].requests
    assert ids == [(2, 3), (2, 3), (2, 5), (2, 5)]
    assert [p["sampling_seed"] for p in params] == [
        sample_seed(3, 4, index, sample) for index in (10, 12) for sample in (0, 1)
    ]
    assert params[0]["temperature"] == 0.5 and params[0]["max_new_tokens"] == 5
    assert len(engines[1].requests) == 1


def test_an_engine_without_work_is_not_asked():
    engines = FakeEngine(), FakeEngine()
    assert len(greedy(fleet_of(*engines), PROMPTS[:1], 5)) == 1
    assert engines[1].requests == []
    assert greedy(fleet_of(*engines), [], 5) == []


def test_a_token_carries_the_version_of_its_span():
    [sample] = greedy(fleet_of(FakeEngine()), PROMPTS[:1], 5)
    assert sample.versions == (7, 8, 8)
    assert sample.behaviour_log_probs == (-1.0, -2.0, 0.0)
    assert sample.truncated


def test_weights_under_a_name_that_is_no_number_have_version_minus_one():
    engine = FakeEngine()
    del engine.answer["meta_info"]["weight_versions"]
    engine.answer["meta_info"]["weight_version"] = "default"
    [sample] = greedy(fleet_of(engine), PROMPTS[:1], 5)
    assert sample.versions == (-1, -1, -1)


def test_seeds_are_stable_and_differ():
    assert sample_seed(0, 0, 0, 0) == 8662518681111019217
    seeds = {
        sample_seed(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)
    }
    assert len(seeds) == 16 and all(0 <= seed < 2**63 for seed in seeds)


def _without(key):
    return lambda meta: meta.pop(key)


def _set_log_prob(value):
    def change(meta):
        meta["output_token_logprobs"][1][0] = value

    return change


BAD = {
    "no log-probs": (_without("output_token_logprobs"), "malformed"),
    "too few log-probs": (lambda m: m["output_token_logprobs"].pop(), "do not belong"),
    "another token": (lambda m: m["output_token_logprobs"][0].__setitem__(1, 9), "do not belong"),
    "nan": (_set_log_prob(float("nan")), "not finite"),
    "null": (_set_log_prob(None), "malformed"),
    "positive": (_set_log_prob(0.5), "positive"),
    "no version": (lambda m: (m.pop("weight_versions"), m.pop("weight_version")), "malformed"),
    "a gap": (lambda m: m["weight_versions"].pop(0), "gap"),
    "spans too short": (lambda m: m["weight_versions"].pop(), "1 of 3"),
    "aborted": (lambda m: m.update(finish_reason={"type": "abort", "message": "why"}), "why"),
    "unknown end": (lambda m: m.update(finish_reason={"type": "tired"}), "tired"),
}


@pytest.mark.parametrize("change,message", BAD.values(), ids=BAD)
def test_an_answer_that_cannot_be_trained_on_is_an_error(change, message):
    engine = FakeEngine()
    change(engine.answer["meta_info"])
    with pytest.raises(EngineError, match=message) as error:
        greedy(fleet_of(engine), PROMPTS[:1], 5)
    assert "http://fake, prompt 10" in str(error.value)
