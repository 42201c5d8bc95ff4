"""Start this machine's SGLang servers: their Python, GPUs and options.

The fleet calls ``launches``; the server itself calls ``server_arguments``.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.engines.kinds import LOADER
from qurl_megatron.engines.sglang import compiling
from qurl_megatron.engines.starting import Launch, Start, refuse_without_gpu
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant.export import CONFIGS
from qurl_megatron.schemes import SCHEMES

CPU_OPTIONS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--max-total-tokens": "16384",  # without it SGLang takes most of the machine's memory
    "--max-running-requests": "64",
    "--sleep-on-idle": None,  # an idle scheduler would spin on a core
    "--skip-server-warmup": None,
}


def quantization_config(scheme: str) -> dict:
    """Return the config by which SGLang's own loaders make layers of a scheme.

    The output layer keeps the model's format, which FP8 loaders know without a list.
    """
    if SCHEMES[scheme].block:
        return CONFIGS[scheme]
    return {"quant_method": f"w8a8_{scheme}", "ignore": ["lm_head"]}


def engine_launch(
    start: Start, python: Path | str, port_file: Path | str, extra: Sequence[str] = ()
) -> Launch:
    """Return how to start one engine.

    Args:
        python: interpreter of the environment that has SGLang.
        port_file: gets the port once the engine is healthy.
        extra: further options of SGLang.
    """
    options = {
        "--model-path": start.model_dir,
        "--dtype": start.dtype,
        "--tp-size": start.config.engine_tensor,
        "--host": start.config.engine_host,
        "--port-file": port_file,
    }
    # -P: the working folder may have another copy of this package, or of anything.
    command = [str(python), "-P", "-m", "qurl_megatron.engines.sglang.server"]
    command += [str(part) for pair in options.items() for part in pair]
    # Trainer and engine exchange token ids, so the engine needs no tokenizer files.
    command += ["--exit-with-stdin", "--skip-tokenizer-init"]
    if start.routed:
        command.append("--enable-return-routed-experts")
    if start.empty:
        command += ["--load-format", "dummy"]
        if start.scheme != "none":
            changes = {"quantization_config": quantization_config(start.scheme)}
            command += ["--json-model-override-args", json.dumps(changes)]
    return Launch((*command, *extra), start.environment)


def server_arguments(argv: Sequence[str], *, cuda: bool, port: int, nccl_port: int) -> list[str]:
    """Return the options for SGLang's parser: the given ones, ours, and those the machine needs.

    Args:
        port: used where no ``--port`` is given.
        nccl_port: where the engine's ranks meet, unless ``--nccl-port`` says so.
    """
    option_names = {option.split("=")[0] for option in argv}
    options: dict[str, str | None] = {
        "--port": str(port),
        "--nccl-port": str(nccl_port),
        "--moe-runner-backend": "triton",  # others keep experts in a layout that no update knows
    }
    if not cuda:
        options |= CPU_OPTIONS
    added: list[str] = []
    for option, value in options.items():
        if option not in option_names:
            added += [option] if value is None else [option, value]
    return [*argv, *added, "--custom-weight-loader", LOADER]


def ask_itself_directly(host: str) -> None:
    """Have this process's requests to ``host``, SGLang's warm-up, bypass a proxy."""
    direct_hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    hosts = ",".join(filter(None, (direct_hosts, host, "127.0.0.1", "::1")))
    os.environ.update(no_proxy=hosts, NO_PROXY=hosts)


def compiler_fault(config: RolloutConfig) -> str | None:
    """Return why engines on this machine cannot compile kernels for its GPUs; None: they can."""
    command = [str(sglang_python(config.sglang_python)), "-P", "-m", compiling.__name__]
    process = subprocess.run(command, capture_output=True, text=True)
    lines = process.stderr.strip().splitlines() or [f"{command[0]} ended with {process.returncode}"]
    return lines[-1] if process.returncode else None


def refuse_not_installed(config: RolloutConfig) -> None:
    """Raise ``ConfigError`` if there is no Python with SGLang."""
    sglang_python(config.sglang_python)


def launches(start: Start) -> list[Launch]:
    """Return one per port file.

    Raises:
        ConfigError: ``rollout.sglang_python`` does not exist; there are too few GPUs for the
            engines or the scheme, or the trainer's are among them.
    """
    refuse_without_gpu(start.config, start.scheme)
    config, gpus = start.config, torch.cuda.device_count()
    python = sglang_python(config.sglang_python)
    if gpus and (wrong := misplaced(config, gpus, start.trainer_ranks)):
        raise ConfigError(wrong)
    if start.empty:  # the model's description is enough
        start = replace(start, model_dir=description_of(start.model_dir))
    engines = []
    for index, port in enumerate(start.port_files.values()):
        options: list[str] = []
        if gpus:
            first = config.engine_first_gpu + index * config.engine_tensor
            options += ["--base-gpu-id", str(first)]
            if config.colocate:
                options.append("--enable-memory-saver")  # the trainer borrows its memory
        engines.append(engine_launch(start, python, port, [*options, *config.engine_args]))
    return engines


def misplaced(config: RolloutConfig, gpus: int, trainer_ranks: int) -> str | None:
    """Return why the engines cannot have the GPUs that they would get; None: they can.

    Args:
        gpus: number that the leading rank sees.
        trainer_ranks: on this machine.
    """
    first = config.engine_first_gpu
    last = first + config.engines * config.engine_tensor - 1
    if last >= gpus:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (
            f"rollout.engines={config.engines} of rollout.engine_tensor={config.engine_tensor} "
            f"from rollout.engine_first_gpu={first} on need {last + 1} GPUs, but the leading rank "
            f"sees {gpus}{f' (CUDA_VISIBLE_DEVICES={shown})' if shown else ''}; start fewer "
            "engines, or, where a batch system hides GPUs from the rank, ask it for "
            "--gpus-per-node instead of --gpus-per-task and no --gpu-bind"
        )
    if not config.colocate and first < trainer_ranks:
        return (
            f"rollout.engine_first_gpu={first} puts engines on GPUs of the trainer, which has "
            f"{trainer_ranks} ranks on this machine; set rollout.engine_first_gpu={trainer_ranks}, "
            "or rollout.colocate=true to take turns"
        )
    return None


def sglang_python(setting: str) -> Path:
    if setting:
        if not Path(setting).is_file():
            raise ConfigError(
                f"rollout.sglang_python = {setting} does not exist; `make sglang` makes the "
                "environment .venv-sglang"
            )
        return Path(setting)
    usual = Path(".venv-sglang/bin/python")
    if usual.is_file():
        return usual.absolute()  # not resolved: only through the link is it the environment's
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "rollout.backend=sglang needs SGLang: neither .venv-sglang exists here nor is it "
            "installed beside this package; run `make sglang`, or set rollout.sglang_python"
        )
    return Path(sys.executable)
