"""What anyone gets from a model's folder who has transformers and nothing of this package."""

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Answer(NamedTuple):
    prompt: list[int]
    ids: list[int]
    text: str


def answers(folder: Path, prompts: list[str], new_tokens: int) -> list[Answer]:
    """Greedy ones, up to the token that ends them; computed in FP32, where ties are rare."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        asked = inputs["input_ids"][0].tolist()
        (ids,) = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False).tolist()
        new = ids[len(asked) :]
        found.append(Answer(asked, new, tokenizer.decode(new, skip_special_tokens=True)))
    return found
