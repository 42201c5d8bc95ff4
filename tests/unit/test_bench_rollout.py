"""The rollout benchmark but for its engines: what is asked of whom, and what becomes of it."""

import argparse
import contextlib
from dataclasses import replace

import pytest
import torch

from qurl_megatron.bench import machine_limits, rollout
from qurl_megatron.bench.drive import PROTOCOLS
from qurl_megatron.bench.options import BENCHMARKS, add_options, quant_scheme
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.repeats import Repeats
from qurl_megatron.bench.rollout_engines import (
    Target,
    Version,
    _openai_identity,
    engine_config,
    model_folder,
)
from qurl_megatron.bench.rollout_load import Ask, LoadOutcome, Look, Publication, TimedAnswer
from qurl_megatron.engines.embedded.decoder import DTYPES, Decoder
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.plan.rollout_time import DecodeRank
from qurl_megatron.tensors.arch import read_arch
from tests.support.versions import read_version

ARCH = read_arch(config_of("tiny"))


def options(*words):
    parser = argparse.ArgumentParser()
    add_options(parser, BENCHMARKS["rollout"])
    return parser.parse_args(["--model", "tiny", *words])


def plan(*words):
    return rollout.plan_of(options(*words), ARCH)


def target(publish=None):
    return Target(None, PROTOCOLS["sglang"], "", None, dict, publish)


def outcome(failure=""):
    """Two requests of 2 tokens, the first done after one second, the second after two."""
    made = []
    for sample, end in enumerate((1.0, 2.0)):
        ask = Ask(0, (1, 2, 3), 2)
        made.append(TimedAnswer(ask, 0.0, [0.5, end], [1, 2], end, failure, [sample, 9]))
    return LoadOutcome(made, client_cpu_s=0.5)


def repeats(*outcomes):
    # A yardstick that no machine beats: none of them is "another load".
    count = len(outcomes)
    return Repeats(seconds=[2.0] * count, results=list(outcomes), yardsticks=[1e-9] * count)


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    """Of this machine and of its GPU, without a second of work."""
    rates = {"cpu": {"read_gb_s": 10.0}, "cuda": {"read_gb_s": 1000.0}}
    monkeypatch.setattr(machine_limits, "limits", rates.__getitem__)


def case(*outcomes, changed="", words=(), gpu=None, engine="embedded", device=None):
    subject = rollout.Subject(engine, "int8")
    made = plan("--prompts", "1", "--samples", "2", "--mean", "2", "--sigma", "0", *words)
    device = ("cuda" if gpu else "cpu") if device is None else device
    least = rollout.least_of(made, subject, ARCH, device, gpu)
    return rollout.case_of(made, subject, repeats(*outcomes), least, changed, {"threads": 2})


def test_every_repeat_has_the_same_lengths_in_the_same_order_on_other_prompts():
    made = plan("--prompts", "4")
    first, second = made.asks(0), made.asks(1)
    assert [ask.tokens for ask in first] == [ask.tokens for ask in second]
    assert not {ask.prompt for ask in first} & {ask.prompt for ask in second}
    assert len(first) == 16 and sum(a.tokens for a in first) == pytest.approx(16 * 64, rel=0.01)


def test_a_later_command_has_the_same_lengths_on_other_prompts():
    first, later = plan().asks(0), plan().asks(0)
    assert [ask.tokens for ask in first] == [ask.tokens for ask in later]
    assert not {ask.prompt for ask in first} & {ask.prompt for ask in later}


def test_every_engine_is_measured_in_every_scheme_and_only_sglang_at_several_ranks():
    asked = options("--engine", "embedded,sglang", "--schemes", "bf16,int8", "--tensor", "1", "2")
    assert [subject.name for subject in rollout.subjects_of(asked)] == [
        "embedded bf16",
        "embedded int8",
        "sglang bf16",
        "sglang bf16 tp2",
        "sglang int8",
        "sglang int8 tp2",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("--engine", "embedded", "--tensor", "2"),
        ("--engine", "embedded", "--tensor", "1", "2"),
        ("--engine", "embedded,sglang", "--tensor", "2"),
    ],
)
def test_a_tensor_size_that_an_embedded_engine_does_not_have_is_refused(words):
    with pytest.raises(ConfigError, match="--tensor 2 is not for --engine embedded, which is one"):
        rollout.subjects_of(options(*words))


def test_an_engine_at_a_url_has_one_scheme():
    asked = options("--engine", "http://127.0.0.1:1", "--schemes", "bf16,int8")
    with pytest.raises(ConfigError, match="--engine http://127.0.0.1:1 serves one scheme"):
        rollout.subjects_of(asked)


def test_an_engine_of_another_name_is_refused():
    with pytest.raises(ConfigError, match="--engine sglong is neither embedded, sglang nor a URL"):
        rollout.subjects_of(options("--engine", "embedded,sglong"))


def test_an_engine_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    asked = options("--engine", "http://127.0.0.1:9", "--schemes", "bf16", "--protocol", "openai")
    with pytest.raises(ConfigError, match="--engine http://127.0.0.1:9 does not answer as --proto"):
        rollout.run(asked)


@pytest.mark.parametrize(
    "when, seconds, tokens, once",
    [
        ("half", None, 512, True),
        ("2.5s", 2.5, None, False),
        ("300tokens", None, 300, False),
    ],
)
def test_a_publication_comes_at_half_or_every_so_often(when, seconds, tokens, once):
    made = plan("--publish-every", when, "--prompts", "4", "--mean", "64", "--sigma", "0")
    found = made.publishing(target(publish=lambda: ("2", 0.0)))
    assert (found.seconds, found.tokens, found.once) == (seconds, tokens, once)


def test_nothing_is_published_unless_asked_nor_to_an_engine_at_a_url():
    assert plan().publishing(target()) is None
    with pytest.raises(ConfigError, match="--publish-every needs an engine that this command sta"):
        plan("--publish-every", "half").publishing(target())


@pytest.mark.parametrize("clients", ["open", "concurrency:0", "concurrency:x", "poisson:4"])
def test_clients_are_closed_or_concurrent_and_nothing_else(clients, capsys):
    assert (options().clients, options("--clients", "concurrency:8").clients) == (0, 8)
    with pytest.raises(SystemExit):
        options("--clients", clients)
    assert "must be closed or concurrency:N" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["sometimes", "0tokens", "5", "0s", "0.0s", ".s"])
def test_another_word_for_when_to_publish_is_refused(when, capsys):
    with pytest.raises(SystemExit):
        options("--publish-every", when)
    assert "must be half, seconds (10s) or tokens (5000tokens)" in capsys.readouterr().err


def test_figures_have_a_value_per_repeat_and_the_makespan_its_limit():
    found = case(outcome(), outcome())
    assert found.figure("tokens/s").repeats == [2.0, 2.0]
    assert found.figure("makespan").repeats == [2.0, 2.0]
    assert found.figure("first token, p50").median == 500.0
    assert found.figure("client's CPU").median == 25.0
    makespan, rate = found.figure("makespan"), found.figure("tokens/s")
    assert 0 < makespan.limit < 2.0 and rate.limit == pytest.approx(4 / makespan.limit)
    assert found.reasons == []
    assert (found.keys["model"], found.keys["engine"]) == ("tiny", "embedded")


RANK = DecodeRank(
    weights=1000,
    quantized=1,
    plain=1,
    token=10,
    attention=1,
    layers=1,
    hidden=1,
    tensor=1,
    scheme="int8",
)


@pytest.mark.parametrize(
    ("prompt", "slots", "read"),
    [
        # Responses of 2 and 4 tokens. Two steps with both, at 1 token each on average; two with
        # one, at 3 tokens.
        (5, 2, 2 * (1000 + 2 * 6 * 10) + 2 * (1000 + 8 * 10)),
        # One at a time reads the weights for every token.
        (0, 1, 6 * 1000 + 10 * (2 * 1 + 4 * 2)),
    ],
)
def test_a_step_reads_the_weights_once_and_each_responses_keys_and_values(prompt, slots, read):
    assert rollout.least_seconds(RANK, [2, 4], prompt, slots, 100.0) == pytest.approx(read / 100)


def test_a_publications_figures_are_those_of_the_slowest():
    published = outcome()
    published.publications += [
        Publication("2", 0.2, 0.4, paused_s=0.15),
        Publication("3", 0.6, 0.9, paused_s=0.25),
    ]
    published.answers[0].first_of = {"2": 0.5, "3": 1.0}
    found = case(published)
    assert found.figure("paused to publish").median == 0.25
    assert found.figure("first valid token").median == pytest.approx(0.4)


def test_the_first_valid_token_is_that_of_publications_that_had_one():
    published = outcome()
    published.publications += [
        Publication("2", 0.2, 0.4, paused_s=0.15),
        Publication("3", 1.9, 1.95, paused_s=0.0),  # nothing was left to generate
    ]
    published.answers[0].first_of = {"2": 0.5}
    found = case(published)
    assert found.figure("first valid token").median == pytest.approx(0.3)


def test_a_figure_that_only_some_repeats_have_is_told_and_not_compared():
    early, late = outcome(), outcome()
    early.publications = [Publication("2", 0.2, 0.4, paused_s=0.15)]
    early.answers[0].first_of = {"2": 0.5}
    late.publications = [Publication("2", 1.9, 1.95, paused_s=0.15)]  # with nothing left
    found = case(early, late)
    valid, paused = found.figure("first valid token"), found.figure("paused to publish")
    assert valid.repeats == [pytest.approx(0.3)] and valid.better is None
    assert paused.repeats == [0.15, 0.15] and paused.better == "lower"


def test_what_only_describes_a_load_is_told_and_never_compared():
    seen = outcome()
    seen.looks = [Look(occupancy=0.5)]
    seen.publications = [Publication("2", 0.2, 0.4, paused_s=0.15)]
    seen.answers[0].first_of = {"2": 0.5}
    better = {figure.name: figure.better for figure in case(seen).figures}
    assert [name for name, way in better.items() if way is None] == [
        "tail",
        "cache in use, mean",
        "cache in use, most",
        "preemptions",
        "client's CPU",
    ]
    assert better["tokens/s"] == "higher" and better["makespan"] == "lower"
    assert better["first valid token"] == better["between tokens, p99"] == "lower"


@pytest.mark.parametrize(
    "words",
    [
        ("--seed", "1"),
        ("--mean", "1"),
        ("--sigma", "0.1"),
        ("--max", "99"),
        ("--threads", "1"),
        ("--cache-gb", "1"),
        ("--protocol", "openai"),
        ("--clients", "concurrency:2"),
        ("--publish-every", "half"),
        ("--prompt", "9"),
    ],
    ids=lambda words: words[0],
)
def test_another_load_has_other_keys(words):
    assert case(outcome()).keys != case(outcome(), words=words).keys


def test_an_engine_on_another_machine_has_no_limit_and_no_yardstick_of_this_one():
    found = case(outcome(), engine="http://10.1.2.3:8000", gpu="NVIDIA H100 80GB HBM3")
    makespan = found.figure("makespan")
    assert makespan.limit is None and found.yardsticks == []
    for host in ("127.0.0.1", "localhost", "[::1]"):
        near = case(outcome(), engine=f"http://{host}:8000")
        assert near.figure("makespan").limit and near.yardsticks


@pytest.mark.parametrize("device, gpu", [("cuda", None), ("", None), ("", "NVIDIA H100")])
def test_what_an_engine_runs_on_that_this_side_cannot_measure_gives_no_limit(device, gpu):
    found = case(outcome(), device=device, gpu=gpu)
    assert found.figure("makespan").limit is found.figure("tokens/s").limit is None


@pytest.mark.parametrize(
    "identity, gpu, device",
    [
        ({"device": "cuda:0"}, False, "cuda"),
        ({"device": "cpu"}, True, "cpu"),
        ({"version": "0.32.0"}, True, ""),
        ({"version": "0.32.0"}, False, "cpu"),
    ],
)
def test_what_an_engine_runs_on_is_what_it_says_or_all_there_is(monkeypatch, identity, gpu, device):
    monkeypatch.setattr(rollout.torch.cuda, "is_available", lambda: gpu)
    assert rollout.device_of(identity) == device


def test_an_engine_on_the_cpu_has_the_cpus_limit_though_this_side_has_a_gpu():
    makespan = case(outcome(), device="cpu", gpu="NVIDIA H100 80GB HBM3").figure("makespan")
    assert makespan.limit == case(outcome()).figure("makespan").limit


def test_an_engine_that_does_not_answer_at_the_beginning_is_named_in_one_sentence(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def gone():
        raise EngineError("http://127.0.0.1:1/server_info did not answer")

    seen = replace(target(), identity=gone)
    monkeypatch.setattr(rollout, "_targets", lambda *_: {"embedded bf16": seen})
    with pytest.raises(ConfigError, match="^embedded bf16 does not answer: http://127.0.0.1:1/ser"):
        rollout.run(options("--schemes", "bf16"))


def test_why_an_engine_could_not_be_looked_at_is_noted():
    blind = outcome()
    blind.unseen = "KeyError('loads')"
    assert case(outcome(), blind).notes["not looked at"] == "KeyError('loads')"


def test_an_engine_that_is_gone_at_the_end_is_a_reason_of_its_own_case_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def gone():
        if next(asked):
            raise EngineError("http://127.0.0.1:1/server_info did not answer")
        return {"version": "1", "device": "cpu"}

    asked = iter([False, True])
    targets = {
        "embedded bf16": replace(target(), identity=gone),
        "embedded int8": replace(target(), identity=lambda: {"version": "1", "device": "cpu"}),
    }
    monkeypatch.setattr(rollout, "_targets", lambda *_: targets)
    monkeypatch.setattr(rollout, "_candidate", lambda *_: outcome)
    monkeypatch.setattr(
        rollout, "interleaved", lambda found, **_: {n: repeats(outcome()) for n in found}
    )
    dead, alive = rollout.run(options("--schemes", "bf16,int8", "--prompts", "1", "--samples", "2"))
    assert dead.reasons == ["engine changed"] and alive.reasons == []
    assert dead.notes["engine changed"] == (
        "it does not answer any more: http://127.0.0.1:1/server_info did not answer"
    )
    assert dead.figures and alive.figures


def test_an_engine_of_openais_protocol_that_changed_says_so():
    class Server:
        version = "0.1"

        def get(self, path):
            models = {"data": [{"id": "m", "owned_by": "vllm"}]}
            return models if path == "/v1/models" else {"version": self.version}

    server = Server()
    before = _openai_identity(server)
    assert before == {"model": "m", "engine": "vllm", "version": "0.1"}
    server.version = "0.2"
    seen = replace(target(), identity=lambda: _openai_identity(server))
    assert rollout.changed_since(before, seen) == "version was 0.1, is 0.2"


@pytest.mark.parametrize("fault", ["", "dies", "does not start"])
@pytest.mark.parametrize("out", [True, False])
def test_logs_lie_beside_the_record_or_are_kept_where_an_engine_fails(
    tmp_path, monkeypatch, out, fault
):
    written = []

    def targets(options, subjects, work, logs, stack):
        logs.mkdir(parents=True, exist_ok=True)
        written.append(logs / "engine-0.log")
        written[0].write_text("what it said")
        if fault == "does not start":
            raise ConfigError(f"see {written[0]}")
        return {"embedded bf16": replace(target(), identity=identity)}

    def identity():
        if fault and next(asked):
            raise EngineError("it did not answer")
        return {}

    asked = iter([False, True])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rollout, "_targets", targets)
    monkeypatch.setattr(rollout, "_candidate", lambda *_: outcome)
    asked_for = options("--schemes", "bf16", "--prompts", "1", "--repeats", "1")
    asked_for.out = tmp_path / "found" if out else None
    with contextlib.suppress(ConfigError):
        rollout.run(asked_for)
    (log,) = written
    assert log.exists() == (out or bool(fault))
    assert not out or log.parent == tmp_path / "found/logs"


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_an_engine_that_is_started_streams_new_tokens_alone_from_a_cache_of_the_size_given(kind):
    config = engine_config(kind, tensor=1, threads=1, timeout_s=9.0, cache_gb=3.5)
    assert config.backend == kind and config.engine_memory_gb == 3.5
    streams = kind == "sglang"  # an embedded engine answers whole
    assert ("--incremental-streaming-output" in config.engine_args) == streams


def test_a_reason_of_one_repeat_is_one_of_the_case():
    broken = outcome()
    broken.answers[1].failure = "cut off"
    found = case(outcome(), broken)
    assert found.reasons == ["failed requests"]
    assert found.notes["failed requests"] == "1 of 2 requests; the first: cut off"


def test_a_repeat_without_a_single_answer_leaves_no_figures_and_says_why():
    found = case(outcome(), outcome(failure="refused"))
    assert found.figures == [] and found.reasons == ["failed requests"]


def test_an_engine_that_changed_between_repeats_is_a_reason():
    found = case(outcome(), changed="version was 1, is 2")
    assert found.reasons == ["engine changed"]
    assert found.notes["engine changed"] == "version was 1, is 2"


@pytest.mark.parametrize("scheme", BENCHMARKS["rollout"].schemes)
def test_random_weights_are_a_whole_version_as_engines_load_it(tmp_path, scheme):
    number, dtype = quant_scheme(scheme), rollout.Subject("embedded", scheme).dtype
    version = Version(model_folder("tiny", tmp_path), number, dtype, tmp_path / "versions")
    decoder = Decoder(version.arch, number, DTYPES[dtype], torch.device("cpu"))
    folder = version.sender.folder
    tensors = read_version(folder)
    decoder.check(tensors)
    kinds = {tensors[name].dtype for name in tensors if name.endswith("q_proj.weight")}
    assert kinds == {
        {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(scheme, DTYPES[dtype]),
    }


@pytest.mark.parametrize(
    ("engine", "scheme", "gpu", "dtype"),
    [
        ("embedded", "int8", False, "float32"),
        ("embedded", "int8", True, "bfloat16"),
        ("embedded", "bf16", False, "bfloat16"),
        ("embedded", "fp32", True, "float32"),
        ("sglang", "int8", False, "bfloat16"),
    ],
)
def test_beside_codes_an_embedded_engine_without_a_gpu_has_fp32(
    monkeypatch, engine, scheme, gpu, dtype
):
    monkeypatch.setattr(rollout.torch.cuda, "is_available", lambda: gpu)
    assert rollout.Subject(engine, scheme).dtype == dtype


def test_a_folder_that_has_weights_is_taken_as_it_is(tmp_path):
    random = model_folder("tiny", tmp_path)
    assert model_folder(str(random), tmp_path / "other") == random
    assert not (tmp_path / "other").exists()
