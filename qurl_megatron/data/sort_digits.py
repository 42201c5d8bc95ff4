"""A task of our own among reasoning-gym's: write a list of digits in order.

Its answers are as long as one likes while its prompts stay short, and one wrong token spoils the
whole: the horizon over which a rollout policy's errors add up is an argument. A small model learns
it in a minute.

    sort 3 1 4 1 =   ->   1 1 3 4
"""

import random
from dataclasses import dataclass
from typing import Any

from reasoning_gym.factory import ProceduralDataset, register_dataset


@dataclass
class SortDigitsConfig:
    digits: int = 16
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert self.digits >= 1, "digits must be 1 or more"


class SortDigits(ProceduralDataset):
    """Item i is drawn with seed + i, as reasoning-gym's own tasks do."""

    def __init__(self, config: SortDigitsConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(self.seed + index)
        digits = [draw.randrange(10) for _ in range(self.config.digits)]
        return {
            "question": f"sort {' '.join(map(str, digits))} =",
            "answer": " ".join(map(str, sorted(digits))),
            "metadata": {"source_index": index},
        }


register_dataset("sort_digits", SortDigits, SortDigitsConfig)
