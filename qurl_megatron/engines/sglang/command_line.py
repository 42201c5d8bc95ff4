"""The command line and environment of one SGLang engine.

``engine_launch`` is what the fleet runs; ``server_arguments`` what the server makes of it, on the
machine where it runs, for SGLang.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from qurl_megatron.engines.starting import Launch, Start
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
    # Trainer and engine speak token ids; with the tokenizer goes the need for its files.
    command += ["--exit-with-stdin", "--skip-tokenizer-init"]
    if start.empty:
        command += ["--load-format", "dummy"]
        if start.scheme != "none":
            # It brings torch, for which those who only look a key up should not wait.
            from qurl_megatron.quant.export import quantization_config

            config = quantization_config(start.scheme, "sglang", UNQUANTIZED)
            changes = {"quantization_config": config}
            command += ["--json-model-override-args", json.dumps(changes)]
    return Launch((*command, *extra), start.environment)


def server_arguments(argv: Sequence[str], *, cuda: bool, port: int) -> list[str]:
    """What SGLang's parser gets: the given options, ours, and those the machine needs.

    Args:
        port: used where no ``--port`` is given.
    """
    option_names = {option.split("=")[0] for option in argv}
    options: dict[str, str | None] = {"--port": str(port)}
    if not cuda:
        options |= CPU_OPTIONS
    added = [
        part
        for option, value in options.items()
        if option not in option_names
        for part in (option, value)
        if part is not None
    ]
    return [*argv, *added, "--custom-weight-loader", LOADER]
