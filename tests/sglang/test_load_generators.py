"""Load generators cannot tell the embedded engine from SGLang: same events, same counts."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.sglang.engines import PYTHON, Case, Server, checkpoints, servers
from tests.unit.engine_models import LiveServer, write_tokenizer
from tests.unit.recorded import SGLANG, events, shape

CASE = Case("llama", "none", changes={"vocab_size": 264, "max_position_embeddings": 2048})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    (version,) = checkpoints(CASE, tmp_path_factory.mktemp("models"), ["first"])
    return write_tokenizer(version.folder)


@pytest.fixture(scope="module")
def engines(model, tmp_path_factory) -> Iterator[list[tuple[str, str]]]:
    """URL and key of SGLang and of the embedded engine."""
    folder = tmp_path_factory.mktemp("engines") / "sglang"
    with servers(lambda: Server(model, CASE, folder, text=True)) as (sglang,):
        embedded = LiveServer(model, scheme="none", api_key=sglang.key)
        yield [(sglang.client.url, sglang.key), (embedded.url, sglang.key)]
        embedded.close()


def last_of_each(found: list[dict]) -> list[dict]:
    return [event for _, event in sorted({event.get("index", 0): event for event in found}.items())]


@pytest.mark.parametrize("case", ["single", "batch_n", "interval"])
def test_both_stream_the_same_tokens_in_the_same_form(engines, case):
    both = []
    for url, key in engines:
        headers = {"Authorization": f"Bearer {key}"}
        response = httpx.post(
            f"{url}/generate",
            json=SGLANG[case]["body"],
            headers=headers,
            timeout=60,
            trust_env=False,
        )
        assert response.headers["content-type"] == SGLANG[case]["content_type"]
        both.append(last_of_each(events(response.text)))
    theirs, ours = both
    assert shape(ours) == shape(theirs)
    for one, other in zip(theirs, ours, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert one["text"] == other["text"]
        pairs = [each["meta_info"].get("output_token_logprobs", []) for each in (one, other)]
        for (value, *_), (like, *_) in zip(*pairs, strict=True):
            assert value == pytest.approx(like, abs=1e-5)


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai"])
def test_sglangs_own_benchmark_counts_the_same_of_both(engines, model, backend, tmp_path):
    counts = []
    for index, (url, key) in enumerate(engines):
        out = tmp_path / f"{index}.jsonl"
        options = {
            "--backend": backend,
            "--base-url": url,
            "--model": model,
            "--dataset-name": "random-ids",
            "--num-prompts": 12,
            "--random-input-len": 32,
            "--random-output-len": 40,
            "--random-range-ratio": 0.5,
            "--seed": 1,
            "--output-file": out,
        }
        arguments = [str(part) for pair in options.items() for part in pair]
        subprocess.run(
            [PYTHON, "-m", "sglang.bench_serving", *arguments, "--output-details"],
            env={**os.environ, "OPENAI_API_KEY": key},
            check=True,
            timeout=200,
        )
        (told,) = map(json.loads, out.read_text().splitlines())
        assert told["completed"] == 12 and not any(told["errors"])
        counts.append([told[name] for name in ("input_lens", "output_lens", "generated_texts")])
    assert counts[0] == counts[1]
    assert all(20 <= length <= 40 for length in counts[0][1])
