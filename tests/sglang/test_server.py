"""The server process: it ends with whoever started it, and says what it samples from."""

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from qurl_megatron.fleet.answer import NEUTRAL
from qurl_megatron.tensors.arch import facts_of
from qurl_megatron.wire.lease import Owner
from tests.sglang.engines import PROMPTS, Case, Server, checkpoints, servers
from tests.support.generating import generate
from tests.support.waiting import PATIENCE_S

TEMPERATURE = 0.6


def test_when_standard_input_closes_every_process_of_the_server_ends(tmp_path):
    case = Case("llama", "none")
    (version,) = checkpoints(case, tmp_path, ["first"])
    with servers(lambda: Server(version.folder, case, tmp_path / "server")) as (server,):
        running = server.processes()
        assert len(running) > 2
        running[-1].suspend()  # a stuck one goes too
        server.popen.stdin.close()
        _, alive = psutil.wait_procs(running[1:], timeout=PATIENCE_S)
        server.popen.wait(PATIENCE_S)
    assert not alive


def test_log_probs_are_of_what_is_sampled_from_whatever_the_server_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    case = Case("llama", "none")
    (version,) = checkpoints(case, tmp_path, ["first"])
    preferred = ["--preferred-sampling-params", '{"top_p": 0.3, "repetition_penalty": 2.0}']
    start = lambda: Server(version.folder, case, tmp_path / "server", extra=preferred)  # noqa: E731
    with servers(start) as (server,):
        info = server.client.info()
        assert info.resamples == "" and info.longest_input
        verdict = server.client.lease(Owner("aa", "this test"), 0, timeout_s=PATIENCE_S)
        assert verdict.computes == facts_of(version.folder)
        params = {"temperature": TEMPERATURE, "max_new_tokens": 12, "ignore_eos": True, **NEUTRAL}
        answers = generate(server.client, PROMPTS, params)
    model = AutoModelForCausalLM.from_pretrained(version.folder, dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = answer["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        reported = torch.tensor([pair[0] for pair in answer["meta_info"]["output_token_logprobs"]])
        sampled, plain = (
            (logits / t).log_softmax(-1)[range(len(ids)), ids] for t in (TEMPERATURE, 1.0)
        )
        assert reported.tolist() == pytest.approx(sampled.tolist(), abs=1e-3)
        assert (sampled - plain).abs().max() > 0.01
