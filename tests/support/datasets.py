"""Data files in the layouts that other trainers document, as their own scripts write them."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SYSTEM = "you add"


def verl_table(path: Path, questions: Sequence[tuple[str, str]]) -> Path:
    """verl's parquet: the prompt as turns, the answer in reward_model, more beside them."""
    rows = [
        {
            "data_source": "sums/main",
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": index},
        }
        for index, (text, answer) in enumerate(questions)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def slime_lines(path: Path, questions: Sequence[tuple[str, str]]) -> Path:
    """slime's JSONL: the prompt as turns, the answer as label, what rewards read as metadata."""
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "label": answer,
            "metadata": {"rm_type": "math", "index": index},
        }
        for index, (text, answer) in enumerate(questions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
