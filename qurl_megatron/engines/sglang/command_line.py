"""The command line and environment of one SGLang engine, from plain values.

``engine_launch`` is what the fleet runs; ``server_arguments`` what the server makes of it, on the
machine where it runs, for SGLang.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from qurl_megatron.engines.starting import API_KEY, Launch
from qurl_megatron.wire.message import LOADER

CPU_OPTIONS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--max-total-tokens": "16384",  # without it SGLang takes most of the machine's memory
    "--max-running-requests": "64",
    "--sleep-on-idle": None,  # an idle scheduler would spin on a core
    "--skip-server-warmup": None,
}

UNQUANTIZED = ("lm_head",)  # linear layers that keep the model's own format


def engine_launch(
    python: Path | str,
    model_dir: Path | str,
    *,
    scheme: str,
    dtype: str = "bfloat16",
    tensor: int = 1,
    threads: int = 1,
    host: str = "127.0.0.1",
    port_file: Path | str,
    api_key: str | None = None,
    empty: bool = True,
    extra: Sequence[str] = (),
) -> Launch:
    """How to start one engine.

    Args:
        python: interpreter of the environment that has SGLang.
        model_dir: Hugging Face folder. With ``empty`` only its config.json is read, and must be
            that of the unquantized model.
        scheme: "none", "int8" or "fp8"; what the updates will bring.
        tensor: tensor-parallel ranks of the engine.
        threads: OpenMP threads of each rank.
        host: address to listen on.
        port_file: gets the port once the engine is healthy.
        empty: start with meaningless weights, since the first update brings all of them; else load
            those in ``model_dir``, whose config.json says how they are quantized.
        extra: further options of SGLang.
    """
    options = {
        "--model-path": model_dir,
        "--dtype": dtype,
        "--tp-size": tensor,
        "--host": host,
        "--port-file": port_file,
    }
    # -P: the working folder may have another copy of this package, or of anything.
    command = [str(python), "-P", "-m", "qurl_megatron.engines.sglang.server"]
    command += [str(part) for pair in options.items() for part in pair]
    # Trainer and engine speak token ids; with the tokenizer goes the need for its files.
    command += ["--exit-with-stdin", "--skip-tokenizer-init"]
    if empty:
        command += ["--load-format", "dummy"]
        if scheme != "none":
            # It brings torch, for which those who only look a key up should not wait.
            from qurl_megatron.quant.export import quantization_config

            changes = {"quantization_config": quantization_config(scheme, "sglang", UNQUANTIZED)}
            command += ["--json-model-override-args", json.dumps(changes)]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    env = dict.fromkeys(names, str(threads))
    if api_key is not None:
        env[API_KEY] = api_key
    return Launch((*command, *extra), env)


def server_arguments(argv: Sequence[str], *, cuda: bool, port: int) -> list[str]:
    """What SGLang's parser gets: the given options, ours, and those the machine needs.

    Args:
        port: used where no ``--port`` is given.
    """
    given = {option.split("=")[0] for option in argv}
    options: dict[str, str | None] = {"--port": str(port)}
    if not cuda:
        options |= CPU_OPTIONS
    added = [
        part
        for option, value in options.items()
        if option not in given
        for part in (option, value)
        if part is not None
    ]
    return [*argv, *added, "--custom-weight-loader", LOADER]
