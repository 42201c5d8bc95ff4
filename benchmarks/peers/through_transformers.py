"""Decoding with transformers' own ``generate``, from random weights of the same shape."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}  # as rollouts are
PAD = 0


class Generating:
    """Calls decode some tokens each, of the same responses, which grow meanwhile.

    The keys and values are kept from call to call, so that a call computes its new tokens alone.

    Args:
        config: of a model folder, as in its config.json.
        prompts: token ids, all of one length, [batch, prompt].
        steps: tokens of each response in a call.
    """

    def __init__(
        self,
        config: dict[str, Any],
        dtype: torch.dtype,
        device: torch.device,
        prompts: list[list[int]],
        steps: int,
    ) -> None:
        kind = AutoConfig.for_model(**config)
        self._model = AutoModelForCausalLM.from_config(kind, dtype=dtype).to(device).eval()
        self._model.generation_config.pad_token_id = PAD
        self._cache = DynamicCache(config=kind)
        self._tokens = torch.tensor(prompts, device=device)
        self._steps = steps
        self._generate(1)  # the prompts

    def __call__(self) -> None:
        self._generate(self._steps)

    @torch.inference_mode()
    def _generate(self, new: int) -> None:
        self._tokens = self._model.generate(
            self._tokens,
            attention_mask=torch.ones_like(self._tokens),
            past_key_values=self._cache,
            max_new_tokens=new,
            min_new_tokens=new,  # no end before
            **SAMPLING,
        )
