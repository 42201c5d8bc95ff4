"""GuideLLM beside our own driver: what it is told to send, and what becomes of its report.

The report is of GuideLLM 0.8.1 against the embedded engine, cut down to what is read of it.
"""

import argparse
import contextlib
import json
import random
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from qurl_megatron import cli
from qurl_megatron.bench import rollout
from qurl_megatron.bench.load import guidellm, load_figures, reasons
from qurl_megatron.bench.load.guidellm import GuideLLM, read_report, scenario
from qurl_megatron.bench.load.requests import Clients, groups
from qurl_megatron.bench.load.words import Words, write_tokenizer
from qurl_megatron.bench.options import BENCHMARKS, add_shared
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.repeats import Repeats
from qurl_megatron.errors import ConfigError
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.tensors.arch import read_arch
from tests.waiting import PATIENCE_S

LENGTHS = [3, 5, 4, 5]
ASKS = groups(LENGTHS, samples=2, prompt=6, ids=range(256), first=0, seed=0)
ASKED = [(" ".join(f"w{token}" for token in ask.prompt), ask) for ask in ASKS]


@pytest.fixture
def report():
    return json.loads((Path(__file__).parent / "recorded/guidellm_0_8_1.json").read_text())


def requests(report):
    return report["benchmarks"][0]["requests"]


def test_a_report_becomes_answers_with_their_lengths_and_moments(report):
    outcome = read_report(report, ASKED)
    answers = outcome.answers
    assert sorted(answer.ask.tokens for answer in answers) == sorted(LENGTHS)
    assert all(answer.done and answer.tokens == answer.ask.tokens for answer in answers)
    assert load_figures.makespan(answers) == pytest.approx(0.1317, abs=1e-4)
    assert load_figures.first_token(answers)[0] == pytest.approx(0.1119, abs=1e-4)
    assert {answer.cached for answer in answers} == {0}
    assert reasons.found(outcome, 0) == {}


def test_requests_that_were_not_sent_and_others_that_nobody_asked_for_are_told(report):
    whole = requests(report)["successful"]
    whole[0]["request_args"] = whole[0]["request_args"].replace("w69", "w68")
    outcome = read_report(report, ASKED)
    told = "1 of 4 requests were not sent; 1 were sent that nobody asked for"
    assert reasons.found(outcome, 0) == {"wrong requests": told}
    del whole[1]
    assert read_report(report, ASKED).unasked.startswith("2 of 4 requests were not sent; 1 were")


def test_a_length_that_was_not_forced_is_not_what_was_asked_for(report):
    whole = requests(report)["successful"]
    whole[0]["request_args"] = whole[0]["request_args"].replace("ignore_eos", "ignored")
    assert "1 were sent that nobody asked for" in read_report(report, ASKED).unasked


def test_prompts_that_the_engine_read_as_other_tokens_are_told(report):
    requests(report)["successful"][0]["prompt_tokens"] = 7
    told = "1 prompts were read as others (the first: 7 tokens, not 6)"
    assert reasons.found(read_report(report, ASKED), 0) == {"wrong requests": told}


def test_a_response_of_another_length_is_counted(report):
    requests(report)["successful"][1]["output_tokens"] = 2
    assert list(reasons.found(read_report(report, ASKED), 0)) == ["wrong lengths"]


@pytest.mark.parametrize("kind", ["errored", "incomplete"])
def test_a_request_that_failed_there_has_failed_here(report, kind):
    failed = requests(report)["successful"].pop()
    failed["info"]["error"] = "503"
    requests(report)[kind].append(failed)
    outcome = read_report(report, ASKED)
    assert reasons.found(outcome, 0) == {"failed requests": "1 of 4 requests; the first: 503"}
    assert load_figures.tokens(outcome.answers) == sum(LENGTHS) - 5


def test_requests_that_its_limit_ended_have_failed_though_their_bodies_are_not_told(report):
    """As 0.8.1 reports what an engine never answers."""
    kinds = requests(report)
    for found in kinds["successful"]:
        found["request_args"] = found["info"]["timings"]["request_end"] = None
        found["info"] |= {"error": "ReadTimeout('')"}
        found["info"]["timings"]["resolve_end"] = found["info"]["timings"]["request_start"] + 5
    kinds["errored"], kinds["successful"] = kinds["successful"], []
    outcome = read_report(report, ASKED)
    told = "4 of 4 requests; the first: ReadTimeout('')"
    assert reasons.found(outcome, 0) == {"failed requests": told}
    assert sorted(answer.ask.tokens for answer in outcome.answers) == sorted(LENGTHS)
    assert all(answer.ended - answer.began == pytest.approx(5) for answer in outcome.answers)


@pytest.mark.parametrize(
    "clients, profile",
    [
        ("closed", {"kind": "throughput", "max_concurrency": 9}),
        ("concurrency:4", {"kind": "concurrent", "streams": [4]}),
        ("poisson:2.5", {"kind": "poisson", "rate": [2.5]}),
    ],
)
def test_clients_are_the_profile_that_is_nearest(tmp_path, clients, profile):
    client = EngineClient("http://127.0.0.1:1", api_key="secret", timeout_s=7.0)
    spec = scenario(client, 9, Clients.read(clients), tmp_path)["spec"]
    assert spec["profile"] == profile
    assert spec["backend"]["timeout"] == 7.0
    assert spec["constraints"] == [{"kind": "max_requests", "count": 9}]
    assert spec["backend"]["api_key"] == "secret"


def fake(tmp_path, script):
    """Another program by its name."""
    path = tmp_path / "guidellm"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "script, said",
    [
        ("echo Traceback; echo 'no such backend'; exit 3", "ended with status 3: no such backend"),
        ("true", "its report cannot be read"),
        ("echo '{}' > report.json", "its report cannot be read .*0.8.1 is known to work"),
    ],
)
def test_a_program_that_fails_is_an_error_of_one_sentence(tmp_path, script, said):
    async def look(session, at):
        raise KeyError("loads")

    client = EngineClient("http://127.0.0.1:9")
    one = GuideLLM(fake(tmp_path, script), client, look, lambda ids: " ".join(map(str, ids)))
    with pytest.raises(ConfigError, match=said) as error:
        one.drive(ASKS, Clients())
    assert "\n" not in str(error.value)


def test_a_program_that_never_ends_is_ended_with_its_workers(tmp_path, monkeypatch):
    async def look(session, at):
        raise KeyError("loads")

    monkeypatch.setattr(guidellm, "AROUND_S", 1.8)
    worker = tmp_path / "worker"
    script = f"sleep 600 & echo $! > {worker}; wait"
    client = EngineClient("http://127.0.0.1:9", timeout_s=0.2)
    one = GuideLLM(fake(tmp_path, script), client, look, lambda ids: " ".join(map(str, ids)))
    with pytest.raises(ConfigError, match="did not end within 2 s; .* or give a longer --timeo"):
        one.drive(ASKS, Clients())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(worker.read_text())).wait(PATIENCE_S)


def test_it_is_given_the_time_that_its_responses_may_take_one_after_another():
    assert guidellm.patience(Clients(), 9, 10.0) == guidellm.AROUND_S + 10
    assert guidellm.patience(Clients(at_once=4), 9, 10.0) == guidellm.AROUND_S + 30
    # They arrive in some 20 s, at moments of its own.
    assert guidellm.patience(Clients(rate=0.5), 10, 10.0) == guidellm.AROUND_S + 40 + 10


def test_the_program_that_is_not_there_is_told_with_how_to_install_it(capsys):
    assert cli.main(["bench", "rollout", "--model", "tiny", "--guidellm", "/no/guidellm"]) == 2
    said = capsys.readouterr().err
    assert "--guidellm /no/guidellm is not a program; install it" in said
    assert "pip install guidellm==" in said and len(said.splitlines()) == 1


def options(*words):
    parser = argparse.ArgumentParser()
    add_shared(parser, BENCHMARKS["rollout"])
    BENCHMARKS["rollout"].add_options(parser)
    return parser.parse_args(["--model", "tiny", "--schemes", "int8", "--prompts", "2", *words])


def test_nothing_is_published_while_it_sends():
    asked = options("--guidellm", "--publish-every", "half")
    with pytest.raises(ConfigError, match="--guidellm cannot go with --publish-every"):
        rollout.subjects_of(asked)


def test_its_case_has_what_it_tells_and_stands_beside_ours(tmp_path, report):
    write_tokenizer(tmp_path, 256)
    arch = read_arch(config_of("tiny"))
    plan = rollout.replace(rollout.plan_of(options(), arch), words=Words(tmp_path, 256))
    subject = rollout.Subject("embedded", "int8", sender="GuideLLM")
    bounds = rollout.Bounds(0.01)
    repeats = Repeats([0.1], [read_report(report, ASKED)], [1e-9])
    case = rollout.case_of(plan, subject, repeats, bounds, "", {})
    assert case.name == "embedded int8, GuideLLM" and case.keys["sent by"] == "GuideLLM"
    names = {figure.name for figure in case.figures}
    assert {"tokens/s", "makespan", "tail", "first token, p50", "per token, p50"} <= names
    # It does not tell when the tokens between came, nor how busy it was.
    assert not {"between tokens, p50", "client's CPU", "preemptions"} & names
    assert case.notes["sent by"] == "GuideLLM 0.8.1"


def byte_pairs(folder):
    """A tokenizer like Qwen's, with words and pieces of words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = [f"{a}{b}{c}" for a in "bdgk" for b in "aeiou" for c in "lmnr"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(words)] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return 500


def random_model(folder):
    write_tokenizer(folder, 300)
    return 300


@pytest.mark.parametrize("make", [byte_pairs, random_model])
def test_prompts_of_words_are_the_same_as_text_and_as_tokens(tmp_path, make):
    words = Words(tmp_path, make(tmp_path))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for seed in range(20):
        ids = random.Random(seed).choices(words.ids, k=30)
        assert tokenizer.encode(words.text(ids)).ids == ids


def test_engines_that_load_the_familys_tokenizer_read_the_same_words(tmp_path):
    random_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of("tiny")))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer).__name__ == "Qwen2Tokenizer" and len(tokenizer) == 300
    ids = random.Random(0).choices(Words(tmp_path, 300).ids, k=30)
    assert tokenizer(Words(tmp_path, 300).text(ids))["input_ids"] == ids


def test_text_that_is_read_as_other_tokens_is_refused(tmp_path):
    words = Words(tmp_path, byte_pairs(tmp_path))
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    with pytest.raises(ConfigError, match="does not read the text that it writes as the same"):
        words.text([model["vocab"][part] for part in model["merges"][0]])


def test_a_model_without_a_tokenizer_or_without_words_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"--guidellm sends text, and {tmp_path} has no tokeni"):
        Words(tmp_path, 256)
    write_tokenizer(tmp_path, 8)
    with pytest.raises(ConfigError, match="has only 8 tokens that are a word each"):
        Words(tmp_path, 8)
