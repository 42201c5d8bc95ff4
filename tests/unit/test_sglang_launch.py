import json
import os
import socket
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch

from qurl_megatron.cli import main
from qurl_megatron.config import RolloutConfig
from qurl_megatron.engines.sglang import compiling
from qurl_megatron.engines.sglang.starting_sglang import (
    ask_itself_directly,
    engine_launch,
    server_arguments,
)
from qurl_megatron.engines.starting import API_KEY, Launch, Start, given_key, refuse_without_gpu
from qurl_megatron.fleet.client import EngineClient
from qurl_megatron.kit.errors import ConfigError
from tests.support.fake_engine import FakeEngine
from tests.support.programs import Programs

ROOT = Path(__file__).parents[2]


def start_of(config: RolloutConfig, scheme: str = "int8", **options) -> Start:
    folders = {"model_dir": Path("model"), "folder": Path("logs")}
    return Start(
        config=config, scheme=scheme, dtype="bfloat16", api_key="secret", **folders, **options
    )


def launch_of(scheme: str, *, empty: bool = True) -> Launch:
    start = start_of(RolloutConfig(backend="sglang"), scheme, empty=empty)
    return engine_launch(start, "python", "port")


def test_an_empty_engine_is_told_how_its_weights_will_be_quantized():
    command = launch_of("int8").command
    changes = json.loads(command[command.index("--json-model-override-args") + 1])
    assert changes["quantization_config"]["quant_method"] == "w8a8_int8"
    assert changes["quantization_config"]["ignore"] == ["lm_head"]
    command = launch_of("fp8_block").command
    changes = json.loads(command[command.index("--json-model-override-args") + 1])
    assert changes["quantization_config"]["quant_method"] == "fp8"
    assert changes["quantization_config"]["weight_block_size"] == [128, 128]
    assert "--json-model-override-args" not in launch_of("none").command
    # A checkpoint says so by itself.
    assert not {"dummy", "--json-model-override-args"} & {*launch_of("int8", empty=False).command}


def test_engines_that_need_a_gpu_for_their_scheme_are_refused_without_one(monkeypatch):
    config = RolloutConfig(backend="sglang", sglang_python=sys.executable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="quant.scheme=fp8_block on GPUs alone"):
        start_of(config, "fp8_block").launches()
    refuse_without_gpu(config, "fp8")
    refuse_without_gpu(replace(config, urls=("http://node:1",)), "fp8_block")
    refuse_without_gpu(RolloutConfig(), "fp8_block")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refuse_without_gpu(config, "fp8_block")


PORTS = dict(port=99, nccl_port=98)


@pytest.mark.parametrize("given", [["--port", "7"], ["--port=7"], ["--nccl-port", "7"]])
def test_options_that_are_given_win_over_those_the_machine_needs(given):
    arguments = server_arguments([*given, "--attention-backend", "other"], cuda=False, **PORTS)
    assert len({"98", "99"} & {*arguments}) == 1
    assert arguments.count("--attention-backend") == 1
    assert "torch_native" not in arguments
    assert arguments[arguments.index("--device") + 1] == "cpu"


def test_where_there_is_cuda_sglang_keeps_its_defaults():
    arguments = server_arguments([], cuda=True, **PORTS)
    assert arguments[:4] == ["--port", "99", "--nccl-port", "98"]
    assert arguments[4:6] == ["--moe-runner-backend", "triton"]  # experts must stay in place
    assert "--device" not in arguments


@pytest.mark.parametrize("given", ["", "example.org"])
def test_an_engine_is_asked_directly_where_the_proxy_for_the_internet_is_dead(given, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", given)
    with FakeEngine() as engine:
        assert EngineClient(engine.url).server_info()
        with pytest.raises(requests.exceptions.ProxyError):
            requests.get(f"{engine.url}/health")  # as SGLang's warm-up asks itself
        for host in ("127.0.0.1", "0.0.0.0"):
            ask_itself_directly(host)
            assert requests.get(f"{engine.url}/health").status_code == 200
    assert requests.utils.should_bypass_proxies("http://example.org", None) == bool(given)


def test_a_kernel_is_compiled_and_linked_by_what_pip_left(tmp_path, monkeypatch):
    pip = tmp_path / "nvidia/cu13"
    (pip / "lib").mkdir(parents=True)
    (pip / "lib/libcudart.so.13").touch()
    programs = Programs(pip, monkeypatch)
    programs("nvcc", "cp kernel.cu kernel.o")
    looks = (
        "for folder in $(echo $LIBRARY_PATH | tr : ' '); do ls $folder/libcudart.so && exit; done"
    )
    programs("c++", f"{looks}; echo cannot find -lcudart >&2; exit 1")
    env = {"PATH": os.environ["PATH"], "SGLANG_JIT_CACHE_DIR": f"{pip}/lib/libcudart.so.13"}
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(os, "environ", env)
    compiling.use_cuda_of_pip()
    assert "CUDA_HOME" not in env  # where no link can be made
    env["SGLANG_JIT_CACHE_DIR"] = str(tmp_path)
    (tmp_path / "cuda").mkdir()
    (tmp_path / f"cuda/.{os.getpid()}").touch()  # of a process that was killed on the way
    assert compiling.fault("13.0") is None and env["CUDA_HOME"] == str(pip)
    del env["LIBRARY_PATH"]
    assert "cannot find -lcudart); install cuda-toolkit" in compiling.fault("13.0")
    programs("c++", "echo ld: cannot find -lcuda: No such file >&2; exit 1")
    assert "-lcuda: No such file); link libcuda.so" in compiling.fault("13.0")
    env["CUDA_HOME"] = "/none"
    assert "CUDA_HOME=/none (sh: " in compiling.fault("13.0")


@pytest.mark.parametrize("key", ["", " ", "a\n", "k\u00e9y", "two\nlines"])
def test_what_no_request_could_carry_is_refused_as_a_key(key):
    with pytest.raises(ConfigError, match="QURL_API_KEY is set, but .*; unset it, or set it to"):
        given_key({API_KEY: key})


@pytest.mark.parametrize(
    "command",
    [
        ["train", f"{ROOT}/launch/recipes/quickstart.toml", "rollout.urls=['http://127.0.0.1:1']"],
        ["serve", "nowhere"],
    ],
    ids=["train", "serve"],
)
def test_an_empty_key_is_one_sentence_at_once(command, monkeypatch, capsys):
    monkeypatch.setenv(API_KEY, "")
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("qurl: QURL_API_KEY is set, but empty; unset it")
    assert said.count("\n") == 1


def test_an_engine_for_others_needs_a_key(monkeypatch, capsys):
    monkeypatch.delenv(API_KEY, raising=False)
    assert main(["serve", "nowhere", "--host", "0.0.0.0", "--port", "99999"]) == 2
    assert capsys.readouterr().err.startswith("qurl: --host 0.0.0.0 without a key: whoever")
    monkeypatch.setenv(API_KEY, "s3cret-_=")
    assert main(["serve", "nowhere", "--host", "0.0.0.0", "--port", "99999"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("qurl: nothing can listen at 0.0.0.0, port 99999 (bind(): port must")


def test_a_port_that_is_taken_is_one_sentence_at_once(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "nowhere", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"qurl: nothing can listen at 127.0.0.1, port {port} (Address already in use); "
        "give another --port or --host\n"
    )


def test_sglang_engines_are_told_their_environment_devices_and_key(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = RolloutConfig(
        backend="sglang",
        engines=2,
        engine_tensor=2,
        engine_first_gpu=4,
        engine_threads=3,
        engine_args=("--mem-fraction-static=0.8",),
        sglang_python=sys.executable,
        colocate=True,
    )
    launches = start_of(config, empty=False).launches()
    command = list(launches["engine-1"].command)
    assert command[0] == sys.executable
    assert command[command.index("--base-gpu-id") + 1] == "6"
    assert command[command.index("--tp-size") + 1] == "2"
    assert "--enable-memory-saver" in command and "--mem-fraction-static=0.8" in command
    assert launches["engine-1"].env["OMP_NUM_THREADS"] == "3"
    assert launches["engine-1"].env["QURL_API_KEY"] == "secret"
    assert "secret" not in " ".join(command) + repr(launches)
    lost = RolloutConfig(backend="sglang", sglang_python="/no/python")
    with pytest.raises(ConfigError, match="rollout.sglang_python = /no/python does not exist"):
        start_of(lost).launches()


SHARED = {"engines": 4, "engine_tensor": 2}


@pytest.mark.parametrize(
    "rollout,gpus,ranks,message",
    [
        ({**SHARED, "colocate": True}, 8, 8, None),
        ({**SHARED, "engine_first_gpu": 8}, 16, 8, None),
        (SHARED, 8, 0, None),  # nobody trains here
        (SHARED, 8, 8, "puts engines on GPUs of the trainer.*set rollout.engine_first_gpu=8"),
        ({**SHARED, "engine_first_gpu": 3}, 16, 4, "rollout.engine_first_gpu=3 puts engines on"),
        ({**SHARED, "engine_first_gpu": 1}, 8, 0, "need 9 GPUs, but the leading rank sees 8"),
        (
            {**SHARED, "colocate": True},
            1,
            8,
            r"need 8 GPUs, but the leading rank sees 1 \(CUDA_VISIBLE_DEVICES=0\).*ask it for "
            "--gpus-per-node instead of --gpus-per-task",
        ),
    ],
)
def test_engines_that_have_no_gpus_of_their_own_are_refused_in_a_sentence(
    rollout, gpus, ranks, message, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = RolloutConfig(backend="sglang", sglang_python=sys.executable, **rollout)
    start = start_of(config, empty=False, trainer_ranks=ranks)
    if message is None:
        assert len(start.launches()) == 4
    else:
        with pytest.raises(ConfigError, match=message):
            start.launches()
