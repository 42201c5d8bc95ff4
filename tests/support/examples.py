"""Kept responses, as a run writes them."""

from pathlib import Path

from qurl_megatron.observe.samples import SAMPLES_FILE, Example, SampleFile


def example(**changes) -> Example:
    plain = dict(step=1, of="train", index=7, prompt="12 + 3 =", answer="15", response="15")
    return Example(**{**plain, "reward": 1.0, "tokens": 2, "finish": "stop", **changes})


def keep(run_dir: Path, *examples: Example) -> None:
    file = SampleFile(run_dir / SAMPLES_FILE)
    file.append(*examples)
    file.close()
