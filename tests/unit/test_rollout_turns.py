"""Conversations with an environment, from scripted engines that end a turn at every fifth place."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer as Words
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.data.rows import Question
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.fleet.answer import Part
from qurl_megatron.fleet.collect import Interrupted, collect, greedy
from qurl_megatron.fleet.turns import Response, Turns
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.rewards.workers import EnvironmentPool
from qurl_megatron.types import Prompt
from tests.support.environments import write_classes, write_tokenizer
from tests.support.fake_engine import FakeEngine, token_at
from tests.support.publishing import fleet_of, publish
from tests.support.waiting import PATIENCE_S, wait_until

PROMPTS = [Prompt(10 + i, tuple(range(2, 4 + i)), "?", "") for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    write_classes(folder)
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def turns(folder):
    with talking(folder, "Repeats", max_turns=3) as turns:
        yield turns


@contextmanager
def talking(folder, name, **options):
    config = RolloutConfig(environment=f"{folder}/environment.py:{name}", **options)
    with EnvironmentPool(config) as pool:
        yield Turns(pool, Tokenizer(folder), chat=False)


def engine(**options) -> FakeEngine:
    made = FakeEngine(**options)
    made.stop_every = 5
    return made


def gather(fleet, turns, prompts=PROMPTS, **options):
    return collect(fleet, prompts, fleet.config, seed=3, step=4, turns=turns, **options)


def conversation(prompt: int, *, turns: int = 3) -> list[tuple[int, bool]]:
    """(token, whether the policy wrote it) of all that follows on so many tokens of a prompt."""
    found: list[tuple[int, bool]] = []
    wrote = 0
    for turn in range(turns):
        if turn:
            found += [(token, False) for token in (90, wrote, 2 * turn - 1)]
        begin = len(found)
        while len(found) == begin or (prompt + len(found)) % 5:
            found.append((token_at(prompt + len(found)), True))
        wrote = len(found) - begin
    return found


def check_whole(samples, *, turns=3, versions=None):
    for sample in samples:
        ids, mine = zip(*conversation(len(sample.prompt.input_ids), turns=turns), strict=True)
        assert sample.response_ids.tolist() == list(ids)
        assert sample.written.tolist() == list(mine)
        # The engine's for what it wrote; nothing for what it did not.
        right = [np.float32(-token / 100) for token in np.array(ids)[np.array(mine)]]
        assert sample.behaviour_log_probs[sample.written].tolist() == right
        assert not sample.behaviour_log_probs[~sample.written].any()
        assert sample.versions == (versions or ((7, sum(mine)),))
        assert (sample.finish_reason, sample.failure) == ("stop", None)


@pytest.mark.parametrize("embedded", [True, False])
def test_a_turn_goes_on_from_the_very_tokens_of_those_before_it(turns, embedded):
    with fleet_of(engine(embedded=embedded), max_new_tokens=40) as fleet:
        told = []
        check_whole(gather(fleet, turns, finished=told.append))
        assert sorted(group[0].prompt.index for group in told) == [10, 11, 12, 13]
        assert all(len(group) == 2 for group in told)
        assert all(e.in_flight == e.tokens_in_flight == 0 for e in fleet.engines())
        check_whole(greedy(fleet, PROMPTS[:1], 40, turns=turns))


def test_embedded_engines_get_a_turn_of_all_conversations_in_one_request_in_one_order(turns):
    with engine(embedded=True) as only, fleet_of(only, max_new_tokens=40) as fleet:
        samples = gather(fleet, turns)
        first, second, third = only.bodies("/generate")
        assert [len(body["input_ids"]) for body in (first, second, third)] == [8, 8, 8]
        for sample, row in zip(samples, third["input_ids"], strict=True):
            end = len(sample.response_ids) - len(sample.turns[-1])
            assert row == [*sample.prompt.input_ids, *sample.response_ids[:end]]
        # All turns and the environment's words share one budget; each turn draws anew.
        for one, two in zip(first["sampling_params"], second["sampling_params"], strict=True):
            assert one["sampling_seed"] != two["sampling_seed"]
        used = [40 - params["max_new_tokens"] for params in third["sampling_params"]]
        assert used == [len(s.response_ids) - len(s.turns[-1]) for s in samples]
        assert gather(fleet, turns) == samples
        again = only.bodies("/generate")[3:]
        assert [b["sampling_params"] for b in again] == [
            b["sampling_params"] for b in (first, second, third)
        ]


@pytest.mark.parametrize("budget, expected", [(3, 3), (6, 3), (7, 7), (8, 8), (10, 8)])
def test_what_does_not_fit_into_the_budget_ends_the_response(turns, budget, expected):
    # A prompt of 2: turns of 3 and 2 tokens, three words of the environment between them.
    with fleet_of(engine(embedded=True), max_new_tokens=budget) as fleet:
        [sample, _] = gather(fleet, turns, PROMPTS[:1])
        ids, mine = zip(*conversation(2)[:expected], strict=True)
        assert (sample.response_ids.tolist(), sample.written.tolist()) == ([*ids], [*mine])
        assert sample.written[-1]  # nobody pays for words that nobody reads
        # A turn that ends with the last token of the budget has ended all the same; one of 7 has
        # not, and nothing was said to it.
        assert (sample.finish_reason, sample.left_out) == ("length", budget != 7)


def test_conversations_survive_engines_that_fail_between_turns(turns):
    bad, good = engine(), engine()
    with fleet_of(bad, good, max_new_tokens=40, max_restarts=0) as fleet:
        seen = 0

        def fail_later(samples):
            nonlocal seen
            seen += 1

        bad.faults = ["", "500", "cut", "nan"]
        check_whole(gather(fleet, turns, finished=fail_later))
        assert seen == len(PROMPTS)


def test_each_turn_has_the_version_that_wrote_it(turns):
    class Publishing:
        """Between two turns the weights change."""

        config = turns.pool.config

        def ask(self, messages, *rest):
            def publish_and_ask():
                publish(fleet, 7 + (len(messages) + 1) // 2)
                return turns.pool.ask(messages, *rest).result(PATIENCE_S)

            return executor.submit(publish_and_ask)

    with ThreadPoolExecutor(1) as executor, fleet_of(engine(), max_new_tokens=40) as fleet:
        fleet.config = replace(fleet.config, samples_per_prompt=1)
        [sample] = gather(fleet, replace(turns, pool=Publishing()), PROMPTS[:1])
        check_whole([sample], versions=((7, 3), (8, 2), (9, 2)))
        assert sample.token_versions == [7] * 3 + [None] * 3 + [8] * 2 + [None] * 3 + [9] * 2


def test_a_failure_of_the_environment_ends_one_conversation_with_what_it_has(folder):
    with talking(folder, "Scripted") as turns, fleet_of(engine(), max_new_tokens=40) as fleet:
        # The scripted class repeats the response; it knows w13 for none of its words, but a
        # tokenizer may: here the first turn is "w12 w13 w14".
        decode = turns.tokenizer.decode

        class Spoken(Tokenizer):
            def decode(self, ids):
                return "raise" if ids[0] == 12 else "over" if ids[0] == 13 else decode(ids)

        spoken = replace(turns, tokenizer=Spoken(folder))
        samples = gather(fleet, spoken, PROMPTS[:2])
        assert [s.failure and s.failure.cause for s in samples] == ["exceptions"] * 2 + [None] * 2
        assert all("no unit" in s.failure.why for s in samples[:2])
        for sample in samples:
            assert sample.finish_reason == "stop" and sample.written.all()


def test_what_the_model_cannot_read_of_an_environment_is_said_once_and_is_no_message(
    folder, tmp_path, capsys
):
    made = Words(models.BPE({}, []))  # what is none of these words is no token at all
    made.add_tokens([f"w{i}" for i in range(96)])
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)

    def samples(name):
        with talking(folder, name) as turns, fleet_of(engine(), max_new_tokens=40) as fleet:
            turns.tokenizer = Tokenizer(tmp_path)
            answered = gather(fleet, turns, PROMPTS[:2])
        return answered

    assert all(one.failure is None for one in samples("Repeats"))
    assert all(one.failure is None and not one.written.all() for one in samples("Half"))
    for one in samples("Foreign"):
        assert one.failure.cause == "invalid" and one.written.all()
        assert f"{tmp_path} has no token for any part of its message 'h\xe9'" in one.failure.why


def test_a_stop_waits_for_no_environment(folder):
    talker, stopped = engine(), []
    with talking(folder, "Slow") as turns, fleet_of(talker) as fleet, ThreadPoolExecutor(1) as one:
        pending = one.submit(gather, fleet, turns, stop=lambda: bool(stopped))
        wait_until(lambda: talker.generated >= 3)
        stopped.append(True)
        with pytest.raises(Interrupted):
            pending.result(PATIENCE_S)


TEMPLATE = """{% for m in messages %}{% if m.role == "tool" %}{{ raise_exception("no tools") }}
{%- endif %} <{{ m.role }}> {{ m.content }} w7 {% endfor -%}
{% if add_generation_prompt %} <assistant> {% endif %}"""


def test_a_chat_goes_on_by_the_template_with_the_end_of_a_turn_once(folder):
    tokenizer = Tokenizer(folder)
    [ids] = tokenizer.read([Question("w5 w6", "")], chat=False)
    plain = dict(chat=False, last=7)
    assert tokenizer.following({"role": "tool", "content": "w5 w6"}, **plain) == ids
    tokenizer._wrapped.chat_template = TEMPLATE.replace("<", "w1").replace(">", "")
    said = {"role": "user", "content": "w5 w6"}
    end, user, assistant = 7, 0, 0  # words that the tokenizer does not know are w0
    rest = (user, 5, 6, end, assistant)
    assert tokenizer.following(said, chat=True, last=end) == rest
    # A turn that ended otherwise gets the template's end, too.
    assert tokenizer.following(said, chat=True, last=9) == (end, *rest)
    assert tokenizer.following(said, chat=True, last=None) == (end, *rest)
    with pytest.raises(ConfigError, match="no tools.; .*; this was a message of the environment"):
        tokenizer.following({"role": "tool", "content": ""}, chat=True, last=end)
    tokenizer._wrapped.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ConfigError, match="drops what the policy said"):
        tokenizer.following(said, chat=True, last=end)


def test_a_tokens_experts_are_of_the_engine_that_computed_it_first():
    """A continued request names those of all tokens before it once more."""

    def part(tokens: int, routes: list | None, version: int | None = 0) -> Part:
        versions = () if version is None else ((version, tokens),)
        rows = None if routes is None else np.array(routes, np.uint8).reshape(-1, 1, 1)
        return Part(np.zeros(tokens, np.int32), np.zeros(tokens), versions, "abort", routes=rows)

    response = Response(Prompt(0, (1, 2, 3), "", ""), {"max_new_tokens": 20})
    assert response.routes() is None
    response.parts = [
        part(2, [1, 1, 1, 1]),
        part(1, None),  # of an aborted request, which has told none
        part(2, None, version=None),  # the environment's
        part(3, [9, 9, 9, 9, 2, 2, 2, 2, 2, 2]),
    ]
    assert response.routes().ravel().tolist() == [1] * 4 + [0] + [2] * 5
    response.finish = "stop"
    assert response.sample().routes.shape == (10, 1, 1)  # of 3 + 8 tokens the last has none
