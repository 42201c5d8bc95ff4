"""What engines say: every range of the schema, and bytes that nobody would think of."""

import base64
import json
import math
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl_megatron.fleet.answer import (
    LOWEST,
    Asked,
    Part,
    Routed,
    Rules,
    answer_limit,
    read_answer,
    read_answers,
    read_info,
)
from qurl_megatron.kit.record import Malformed
from qurl_megatron.tensors.arch import StopIds
from qurl_megatron.wire.lease import MIXED, UNKNOWN_VERSION, Names
from qurl_megatron.wire.packed import pack
from tests.support.fuzz import damaged, damaged_bytes, examples

ASKED = Asked("a", 5)
RULES = Rules(vocabulary=10, names=Names("abc"), confirmed=7)


def good_answer() -> dict:
    return {
        "text": "",
        "output_ids": [4, 0, 1],
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "length", "length": 3},
            "weight_versions": [
                {"version": "7@abc", "start": 0, "end": 1},
                {"version": "8@abc", "start": 1, "end": 3},
            ],
            "output_token_logprobs": [[-1.0, 4, None], [-2, 0, None], [0.0, 1, None]],
        },
    }


def read(answer, asked: Asked = ASKED, rules: Rules = RULES) -> Part:
    return read_answer(answer, asked, rules)


def test_a_token_carries_the_version_of_its_span():
    part = read(good_answer())
    assert part.versions == ((7, 1), (8, 2))
    assert part.ids.tolist() == [4, 0, 1] and part.ids.dtype == np.int32
    assert part.log_probs.tolist() == [-1.0, -2.0, 0.0] and part.log_probs.dtype == np.float32
    assert part.finish == "length"


def read_packed(answer: dict) -> Part | Malformed:
    return read_answers(pack([answer]), [ASKED], RULES)[0]


def test_packed_numbers_are_read_as_they_were():
    answer = good_answer()
    answer["meta_info"]["output_token_logprobs"][1][0] = -0.1
    packed, expected = read_packed(answer), read(answer)
    assert packed.ids.tolist() == expected.ids.tolist() and packed.ids.dtype == np.int32
    assert packed.log_probs.tolist() == expected.log_probs.tolist()
    assert packed.versions == expected.versions
    answer["output_ids"][0] = 5  # not its log-probs': they are not packed
    assert "do not belong" in str(read_packed(answer))


ROUTED = Rules(vocabulary=10, names=Names("abc"), routed=Routed(layers=2, top_k=2, count=300))


def naming_experts(rows: int = 4, *, twice: bool = False, highest: int = 299) -> dict:
    """An answer to two tokens, with the experts of these and of all but the last of its own."""
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(8), (rows, 2, 1)), axis=-1)
    experts = np.ascontiguousarray(experts[..., :2], "<i4")
    experts[1, 0] = (highest, highest if twice else 0)
    answer = good_answer()
    answer["meta_info"]["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    return answer


@pytest.mark.parametrize("highest", [255, 256])
def test_experts_of_tokens_are_read_as_they_were_packed_or_not(highest):
    asked, answer = Asked("a", 5, given=2), naming_experts(highest=highest)
    body = pack([answer])
    (packed,) = read_answers(body, [asked], ROUTED)
    (plain,) = read_answers(json.dumps([answer]).encode(), [asked], ROUTED)
    assert packed.routes.tolist() == plain.routes.tolist()
    assert packed.routes.shape == (4, 2, 2) and packed.routes[1, 0].tolist() == [highest + 1, 1]
    carried = msgspec.msgpack.decode(body)[0]["meta_info"]["routed_experts"]
    assert len(carried) == 16 * (1 if highest < 256 else 2)
    assert answer_limit([asked], ROUTED.routed) > answer_limit([asked])


@pytest.mark.parametrize("packs", [False, True])
def test_an_aborted_answers_experts_are_those_before_its_last_whole_token(packs):
    def read_part(answer) -> Part:
        body = pack([answer]) if packs else json.dumps([answer]).encode()
        return read_answers(body, [Asked("a", 5, given=2)], ROUTED)[0]

    answer = naming_experts()
    answer["meta_info"]["finish_reason"]["type"] = "abort"
    answer["meta_info"]["output_token_logprobs"].pop()
    part = read_part(answer)
    assert (len(part.ids), len(part.routes)) == (2, 3)
    del answer["meta_info"]["routed_experts"]
    assert read_part(answer).routes is None


def test_experts_that_other_weights_chose_again_are_not_replayed():
    """SGLang retracts a request where it runs out of room, and computes it again."""
    answer = naming_experts()
    answer["meta_info"]["num_retractions"] = 1
    assert read(answer, Asked("a", 5, given=2), ROUTED).routes is None
    answer["meta_info"]["weight_versions"] = [{"version": "7@abc", "start": 0, "end": 3}]
    assert read(answer, Asked("a", 5, given=2), ROUTED).routes is not None


@pytest.mark.parametrize(
    "answer, fault",
    [
        (good_answer(), "it has no routed_experts, which .*--enable-return-routed-experts"),
        (naming_experts(3), "malformed routed_experts .48 bytes for 16 experts"),
        (naming_experts(twice=True), "token 1 went to one expert twice in layer 0"),
        (naming_experts(highest=300), "an expert that is none of the layer's 300"),
        (naming_experts(highest=-1), "an expert that is none of the layer's 300"),
    ],
)
def test_experts_that_no_router_can_have_chosen_are_refused(answer, fault):
    with pytest.raises(Malformed, match=fault):
        read(answer, Asked("a", 5, given=2), ROUTED)


@pytest.mark.parametrize("ids", [bytes(4), bytes(9), bytes(8) + b"\xff" * 4, [4, 0, 1], "?"])
def test_packed_numbers_that_are_none_or_not_of_one_length_are_refused(ids):
    (answer,) = msgspec.msgpack.decode(pack([good_answer()]))
    body = msgspec.msgpack.encode([answer | {"output_ids": ids}])
    (fault,) = read_answers(body, [ASKED], RULES)
    assert re.search("belong|malformed|outside the vocabulary|cover 3 of 1", str(fault))


def test_a_body_that_is_cut_off_or_of_another_kind_is_refused():
    body = pack([good_answer()])
    for broken in (body[:-1], body + b"?", msgspec.msgpack.encode({"error": 1}), b"\x9f"):
        with pytest.raises(Malformed, match="the answer is not (MessagePack|JSON|a list)"):
            read_answers(broken, [ASKED], RULES)


STOPS = replace(RULES, stops=StopIds(frozenset({2, 3}), frozenset({2, 3, 9})), longest_input=100)


def ends(ids: list[int], reason: str, budget: int = 5, given: int = 7, rules=STOPS) -> str:
    answer = good_answer()
    answer["output_ids"] = ids
    answer["meta_info"] |= {
        "finish_reason": {"type": reason},
        "weight_versions": [{"version": "7@abc", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
    }
    return read(answer, Asked("a", budget, given), rules).finish


@pytest.mark.parametrize(
    "ids, reason, message",
    [
        ([4, 2, 5], "stop", "1 token behind token 2, which ends a response"),
        ([3, 4, 5, 6, 2], "length", "4 tokens behind token 3, which ends a response"),
        ([3, 4], "abort", "1 token behind token 3"),
        ([4], "length", "it ended for its length after 1 of 5 tokens"),
        ([4, 2], "length", "it ended for its length after 2 of 5 tokens"),
        ([4, 5], "stop", "it stopped at token 5, which ends no response"),
    ],
)
def test_a_response_ends_where_a_sampler_ends_it(ids, reason, message):
    with pytest.raises(Malformed, match=f"^{message}"):
        ends(ids, reason)


def test_the_ends_that_samplers_have_are_taken():
    assert ends([4, 5, 2], "stop") == "stop"
    assert ends([4, 9, 9], "stop") == "stop"  # which only some engines know
    assert ends([4, 5, 6, 7, 8], "length") == "length"
    assert ends([4, 5, 6, 7, 2], "length") == "length"  # SGLang looks at the length first
    assert ends([4, 5], "abort") == "abort"
    assert ends([4, 2], "abort") == "stop"  # and for an abort before that


def test_a_response_that_fills_the_engine_ends_for_its_length():
    for tokens in (90, 98):  # SGLang keeps a few tokens free, more or fewer by its version
        assert ends([4, 5, 6], "length", given=tokens - 3) == "length"
    with pytest.raises(Malformed, match="^it ended for its length after 3 of 5 tokens"):
        ends([4, 5, 6], "length", given=60)
    # Where an engine does not say how much it takes, nobody knows.
    assert ends([4], "length", rules=replace(STOPS, longest_input=None)) == "length"


def test_an_abort_in_a_queue_has_no_tokens_and_one_between_token_and_log_prob_loses_the_token():
    aborted = {"type": "abort", "message": "why"}
    queued = {"output_ids": [], "meta_info": {"id": "a", "finish_reason": aborted}}
    assert read(queued).ids.tolist() == [] and read(queued).message == "why"
    late = good_answer()
    late["meta_info"]["finish_reason"] = aborted
    late["meta_info"]["output_token_logprobs"].pop()
    assert read(late).ids.tolist() == [4, 0]
    assert read(late).versions == ((7, 1), (8, 1))


def test_log_probs_up_to_rounding_and_down_to_the_smallest_float_are_taken():
    answer = good_answer()
    for index, value in enumerate((1e-5, math.log(2**-149), -1e-30)):
        answer["meta_info"]["output_token_logprobs"][index][0] = value
    assert read(answer).log_probs.tolist() == pytest.approx([1e-5, -103.2789, 0.0], rel=1e-5)
    assert math.log(2**-149) > LOWEST


def _without(*keys):
    return lambda answer: [answer["meta_info"].pop(key) for key in keys]


def _token(value, place=1):
    def change(answer):
        answer["output_ids"][place] = value
        answer["meta_info"]["output_token_logprobs"][place][1] = value

    return change


def _log_prob(value, place=1):
    def change(answer):
        answer["meta_info"]["output_token_logprobs"][place][0] = value

    return change


def _span(place, **changes):
    return lambda answer: answer["meta_info"]["weight_versions"][place].update(changes)


BAD = {  # beside the faults of tests/support/proxy.py
    "no ids": (lambda a: a.pop("output_ids"), "malformed"),
    "id true": (_token(True), "malformed answer .*output_ids"),
    "log-prob of another token": (
        lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(1, 9),
        "do not belong",
    ),
    "one without its text": (
        lambda a: a["meta_info"]["output_token_logprobs"].__setitem__(1, [-2.0, 0]),
        "malformed",
    ),
    "log-prob false": (_log_prob(False), "malformed answer .*output_token_logprobs"),
    "no version": (_without("weight_versions"), "no weight_versions; a run needs SGLang 0.5.23"),
    "a gap": (lambda a: a["meta_info"]["weight_versions"].pop(0), "gap"),
    "spans too short": (lambda a: a["meta_info"]["weight_versions"].pop(), "1 of 3"),
    "spans that take tokens back": (
        lambda a: a["meta_info"]["weight_versions"].append(
            {"version": "8@abc", "start": 3, "end": 1}
        ),
        "gap",
    ),
    "a span backwards": (_span(0, end=-1), "gap"),
    "going back": (
        lambda a: (_span(0, version="8@abc")(a), _span(1, version="7@abc")(a)),
        "go back",
    ),
    "a number for a version": (_span(1, version=8), "version -1, where"),
    "nobody's answer": (_without("id"), "malformed"),
}


@pytest.mark.parametrize("change,message", BAD.values(), ids=BAD)
def test_an_answer_that_cannot_be_trained_on_is_refused(change, message):
    answer = good_answer()
    change(answer)
    with pytest.raises(Malformed, match=message):
        read(answer)


def test_names_tell_this_runs_versions_from_others():
    names = Names("abc")
    assert names.number(names.of(12)) == 12
    assert names.number(names.updating(12)) == MIXED
    assert names.number("12@def") is names.number("updating-12@def") is None
    odd = ("default", "12", 12, None, "", "@abc", "-1@abc", "1e3@abc", "\u0663@abc", "9" * 40)
    assert {names.number(name) for name in odd} == {UNKNOWN_VERSION}
    assert [Names("").number(name) for name in ("12@def", "12", "x")] == [12, 12, UNKNOWN_VERSION]


ROOM = {"max_total_num_tokens": 99, "context_length": None}


@pytest.mark.parametrize(
    "said,expected",
    [
        ({"engine": "qurl-embedded", "scheme": "int8"}, ("embedded", 1, None, "int8", None)),
        ({"tp_size": 4}, ("sglang", 4, None, None, None)),
        ({"tp_size": None, "custom_weight_loader": None}, ("sglang", 1, (), None, None)),
        ({"custom_weight_loader": ["a.b"]}, ("sglang", 1, ("a.b",), None, None)),
        (ROOM, ("sglang", 1, None, None, 98)),  # there must be room for one more token
        (ROOM | {"context_length": 64, "max_req_input_len": 58}, ("sglang", 1, None, None, 57)),
    ],
)
def test_what_an_engine_is(said, expected):
    info = read_info(said)
    assert (info.kind.name, info.tp, info.loaders, info.scheme, info.longest_input) == expected


def test_settings_that_change_what_is_sampled_are_named():
    harmless = {"top_p": 0.9, "temperature": 0.6, "no_stop_trim": True, "ignore_eos": False}
    for said in (None, {}, "{}", harmless, json.dumps(harmless)):
        assert read_info({"preferred_sampling_params": said}).resamples == ""
    preferred = {"preferred_sampling_params": {**harmless, "logit_bias": {"5": 1.0}}}
    assert read_info(preferred).resamples == (
        "preferred_sampling_params = {'logit_bias': {'5': 1.0}}"
    )
    loose = {"speculative_accept_threshold_acc": 0.9}
    assert read_info(loose).resamples == ""  # nothing is speculated
    loose["speculative_algorithm"] = "EAGLE"
    assert read_info(loose).resamples == "speculative_accept_threshold_acc = 0.9"


def test_settings_that_move_experts_are_named():
    usual = {"moe_runner_backend": "triton", "moe_a2a_backend": "none", "enable_eplb": False}
    usual |= {"init_expert_location": "trivial", "ep_num_redundant_experts": 0}
    for said in ({}, usual, {"moe_runner_backend": "auto", "moe_a2a_backend": None}):
        assert read_info(said).moves_experts == ""
    moved = usual | {"moe_runner_backend": "deep_gemm", "enable_eplb": True}
    assert read_info(moved).moves_experts == "moe_runner_backend = deep_gemm, enable_eplb = True"


@pytest.mark.parametrize(
    "info",
    [
        *({"preferred_sampling_params": value} for value in (1, [], "[", "[1]", "\ud800")),
        *({"tp_size": value} for value in (-1, 2.0, "2", True, [1], 10**9)),
        *({"ep_size": value} for value in (0, "2")),
        *({"moe_runner_backend": value} for value in (1, ["triton"])),
        *({"custom_weight_loader": value} for value in (1, "a.b", [1], {"a": 1}, ["a", None])),
        *({"scheme": value} for value in (1, ["int8"])),
        {"max_req_input_len": "many"},
    ],
)
def test_nonsense_about_an_engine_is_refused(info):
    with pytest.raises(Malformed):
        read_info(info)


def check(found: Part | Malformed) -> None:
    """A value within every range, or one short sentence."""
    if isinstance(found, Malformed):
        assert 0 < len(str(found)) < 400
        return
    assert found.ids.dtype == np.int32 and found.log_probs.dtype == np.float32
    assert len(found.ids) == len(found.log_probs) == sum(count for _, count in found.versions) <= 5
    assert ((found.ids >= 0) & (found.ids < 10)).all()
    assert np.isfinite(found.log_probs).all()
    assert ((found.log_probs >= LOWEST) & (found.log_probs <= 1e-4)).all()
    assert {version for version, _ in found.versions} <= {7, 8}


@examples(800)
@given(damaged([good_answer()]) | damaged_bytes(pack([good_answer()])) | st.binary(max_size=60))
def test_any_damage_to_an_answer_gives_a_part_or_a_bad_answer(body):
    try:
        found = read_answers(body, [ASKED], replace(RULES, newest=8))
    except Malformed as error:
        found = [error]
    for one in found:
        check(one)
