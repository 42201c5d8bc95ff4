"""Compile every kernel for a GPU that need not be there, and print what came of it as JSON.

    python -m tests.triton.compiled 80 90

A program of its own, because TRITON_INTERPRET, once set, leaves nothing to compile in a process.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qurl_megatron.algo import fused_vocabulary as vocabulary
from qurl_megatron.quant import fused_channels as channels

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
FORMATS = {"bf16": "*bf16", "fp32": "*fp32"}
ALIGNED = [["tt.divisibility", 16]]


def variants() -> dict[str, tuple]:
    """By name: kernel, types of its arguments, constants, warps; row lengths from 7B to 32B."""
    found = {}
    for weight, pointer in FORMATS.items():
        found[f"amax_row {weight}"] = (
            channels.amax_row,
            {"weight": pointer, "amax": "*fp32", "columns": "i32", "row_step": "i32"},
            {"BLOCK": channels.STRIDE},
            8,
        )
        for scheme, codes in (("int8", "*i8"), ("fp8", "*u8")):
            arguments = {
                "weight": pointer,
                "values": codes,
                "scale": "*fp32",
                "columns": "i32",
                "row_step": "i32",
                "largest": "fp32",
                **dict.fromkeys(channels.COUNTER, "i32"),
            }
            for way in ("", " drawn"):
                constants = {"E4M3": scheme == "fp8", "DRAWN": way == " drawn"}
                for finds_scale, block, warps in (
                    (True, 4096, channels.warps(4096)),
                    (True, channels.HELD, channels.warps(channels.HELD)),
                    (False, channels.STRIDE, 8),
                ):
                    constants |= {"FINDS_SCALE": finds_scale, "BLOCK": block}
                    name = f"round_row {weight} {scheme} {block} {finds_scale}{way}"
                    found[name] = channels.round_row, arguments, dict(constants), warps
        found[f"sum_token {weight}"] = _loss(
            vocabulary.sum_token,
            {"logits": pointer, "targets": "*i64", "highest": "*fp32", "sums": "*fp32"},
        )
        found[f"gradient_block {weight}"] = _loss(
            vocabulary.gradient_block,
            {"grad": pointer, "logits": pointer, "target_column": "*i64", "onehot": "*fp32"}
            | {"highest": "*fp32", "a": "*fp32", "b": "*fp32"},
        )
    return found


def _loss(kernel, pointers: dict[str, str]) -> tuple:
    """Steps between columns are 1, which triton compiles for by itself."""
    real = ("inverse_temperature", "floor", "lowest")
    constants = {"BLOCK": vocabulary.BLOCK}
    constants |= {n: 1 for n in kernel.arg_names if n.endswith(("column_step", "target_step"))}
    types = {n: "fp32" if n in real else "i32" for n in kernel.arg_names if n not in constants}
    return kernel, types | pointers, constants, vocabulary.WARPS


def compiled(capability: int, kernel, types: dict, constants: dict, warps: int) -> dict:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): ALIGNED
            for place, name in enumerate(names)
            if name in types and (types[name][0] == "*" or name.endswith(("columns", "row_step")))
        },
    )
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]
    return {**_resources(ptx, capability), "ptx": ptx, "threads": 32 * warps}


def _resources(ptx: str, capability: int) -> dict[str, int]:
    name = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        told = subprocess.run(
            [PTXAS, "-v", f"--gpu-name={name}", source, "-o", Path(folder) / "kernel.cubin"],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    spilled = re.findall(r"(\d+) bytes spill", told)
    return {
        "registers": int(re.search(r"Used (\d+) registers", told)[1]),
        "spilled": sum(map(int, spilled)),
    }


if __name__ == "__main__":
    made = {
        f"sm_{capability} {name}": compiled(capability, *variant)
        for capability in map(int, sys.argv[1:])
        for name, variant in variants().items()
    }
    json.dump(made, sys.stdout)
