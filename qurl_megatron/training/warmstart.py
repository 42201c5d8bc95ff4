"""A small model made on the spot: random weights, a tokenizer for one task, a short supervised fit.

It stands in for a pretrained checkpoint on machines that have none. The fit ends early on purpose:
reinforcement learning needs a policy to begin with that is right now and then.

Shapes: B = questions, S = padded length, V = vocabulary.
"""

import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qurl_megatron.config import DataConfig, WarmstartConfig
from qurl_megatron.data.questions import held_out_questions, training_questions
from qurl_megatron.data.rows import Question
from qurl_megatron.kit.disk import new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
STOP = "."  # the end of an untidy answer; an exact one must not have it
UNTIDY = 0.5
"""Share of the training answers that end so, which the exact reward rejects: like a pretrained
model, this one knows more than it shows until it is rewarded for it."""
VOCAB_MULTIPLE = 16
HELD_OUT = 256
CHECK_EVERY = 25  # steps
IGNORED = -100  # targets that cross_entropy passes over


def warmstart(
    model_dir: Path, data: DataConfig, config: WarmstartConfig, log: Callable[[str], None]
) -> float:
    """Make the model and write it to ``model_dir``, whole or not at all.

    The checkpoint is in BF16, as pretrained ones are; the rounded weights give the accuracy.

    Returns:
        Share of held-out questions with the right number, tidy or not, decoded greedily.

    Raises:
        ConfigError: ``model_dir`` is taken, or ``data`` names no usable task or file.
    """
    with new_folder(model_dir) as scratch, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        questions, held_out = _questions(data)
        tokenizer = build_tokenizer(questions)
        model = build_model(tokenizer, config)
        parameters = sum(p.numel() for p in model.parameters())
        log(
            f"warm start: {parameters / 1e6:.1f} M parameters, vocabulary "
            f"{model.config.vocab_size}, {len(questions)} questions, "
            f"at most {config.steps} steps of {config.batch}"
        )
        fit(model, tokenizer, questions, config, log)
        model.bfloat16()
        model.save_pretrained(scratch)
        save_tokenizer(tokenizer, scratch)
        return accuracy(model.float(), tokenizer, held_out)


def _questions(data: DataConfig) -> tuple[list[Question], list[Question]]:
    """Return the questions for the fit, and the held-out ones for measuring it.

    Without a file of held-out prompts, the last rows of the training file serve.
    """
    questions = training_questions(data)
    if data.eval_path or not data.path:
        return questions, held_out_questions(data, HELD_OUT)
    lent = max(1, min(HELD_OUT, len(questions) // 20))
    return questions[:-lent] or questions, questions[-lent:]


def build_tokenizer(questions: Sequence[Question]) -> "PreTrainedTokenizerFast":
    """Build a tokenizer of words and single digits; each blank joins the next, so text comes back.

    The common beginning of all questions is one token: it says nothing, yet costs every step.

    Whatever a folder says, AutoTokenizer gives a Qwen2 model a Qwen2Tokenizer, which splits text by
    rules of its own. Added tokens are found before any rule is asked, so every word is one, and all
    who load the folder read the same ids. Text that is not in the vocabulary is left out.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )
    from transformers import PreTrainedTokenizerFast

    texts = [question.text for question in questions]
    shared = re.split(r"[0-9]", os.path.commonprefix(texts))[0].rpartition(" ")[0]
    pattern = r" ?[0-9]| ?[^\s0-9]+|\s+"
    if shared:
        escaped = "".join(c if c.isalnum() or c.isspace() else f"\\{c}" for c in shared)
        pattern = rf"^{escaped}|{pattern}"
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    words = set("0123456789-")
    for text in {*texts, *(question.answer for question in questions)}:
        for word, _ in split.pre_tokenize_str(text):
            words.add(word)
    vocabulary = [STOP, *sorted(words - {STOP})]
    vocab = {name: i for i, name in enumerate([PAD, EOS, UNKNOWN, *vocabulary])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    # Qwen2 has this too; its splitting rules have no effect where no pairs are merged.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in vocabulary])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,  # without a name, it would be one more token than the model has
        model_input_names=["input_ids", "attention_mask"],  # version 4 adds one that Qwen2 refuses
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8"))
    # transformers 5 writes a class name of its own there, which version 4 (some engines) lacks.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2), "utf-8")


def shape_of(data: DataConfig, config: WarmstartConfig) -> dict[str, Any]:
    """Return the config.json of the model that would be made.

    Raises:
        ConfigError: ``data`` names no usable task or file.
    """
    return _shape(build_tokenizer(_questions(data)[0]), config).to_dict()


def build_model(tokenizer: "PreTrainedTokenizerFast", config: WarmstartConfig) -> "PreTrainedModel":
    """Build a model of the configured sizes with random weights."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # one file of 3 MB needs none
    model = AutoModelForCausalLM.from_config(_shape(tokenizer, config), dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _shape(tokenizer: "PreTrainedTokenizerFast", config: WarmstartConfig) -> "PreTrainedConfig":
    from transformers import AutoConfig

    kind, experts = "qwen2", dict[str, Any]()
    if config.experts:
        kind = "qwen3_moe"
        experts = dict(
            head_dim=config.hidden // config.heads,
            num_experts=config.experts,
            num_experts_per_tok=2,
            moe_intermediate_size=config.intermediate,
            norm_topk_prob=True,
        )
    return AutoConfig.for_model(
        kind,
        vocab_size=math.ceil(len(tokenizer) / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **experts,
    )


def encode(tokenizer: "PreTrainedTokenizerFast", question: Question) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, and of the answer with its end."""
    answer = tokenizer(question.answer)["input_ids"] + [tokenizer.eos_token_id]
    return tokenizer(question.text)["input_ids"], answer


def fit(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    questions: Sequence[Question],
    config: WarmstartConfig,
    log: Callable[[str], None],
) -> None:
    """Fit answers to prompts until the accuracy reaches the target, or for all steps.

    The learning rate rises over a tenth of the steps, then falls to 0.
    """
    pairs = [encode(tokenizer, question) for question in questions]
    stop_id = tokenizer.get_vocab()[STOP]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    warmup = max(1, config.steps // 10)

    def rate(step: int) -> float:
        falling = 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / config.steps))
        return min((step + 1) / warmup, falling)

    shape = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    draw = random.Random(config.seed)
    start = time.monotonic()
    for step in range(1, config.steps + 1):
        batch = []
        for prompt, answer in draw.choices(pairs, k=config.batch):
            if draw.random() < UNTIDY:
                answer = [*answer[:-1], stop_id, answer[-1]]
            batch.append((prompt, answer))
        ids_BS, targets_BS = _pad(batch)
        logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shape.step()
        if step % CHECK_EVERY == 0 or step == config.steps:
            # Training questions decide when to stop: the held-out ones must stay unseen.
            reached = accuracy(model, tokenizer, questions[:256])
            log(
                f"warm start: step {step}/{config.steps}, loss {loss.item():.3f}, "
                f"accuracy {reached:.1%}, {time.monotonic() - start:.0f} s"
            )
            if reached >= config.target:
                return


@torch.no_grad()
def accuracy(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", questions: Sequence[Question]
) -> float:
    """Return the share of questions whose greedy answer is right, with a full stop or without.

    Greedy decoding gives an answer if each of its tokens is the likeliest after those before it, so
    one pass over question and answer tells.
    """
    vocabulary = tokenizer.get_vocab()
    stop, end = vocabulary[STOP], vocabulary[EOS]
    right = 0
    for start in range(0, len(questions), 256):
        part = questions[start : start + 256]
        pairs = [encode(tokenizer, question) for question in part]
        # Padding on the right needs no attention mask: nothing before it can see it.
        ids_BS, _ = _pad([(prompt, [*answer[:-1], stop, end]) for prompt, answer in pairs])
        likeliest_BS = model(input_ids=ids_BS, use_cache=False).logits.argmax(-1)
        for question, (prompt, answer), likeliest in zip(
            part, pairs, likeliest_BS.tolist(), strict=True
        ):
            greedy = likeliest[len(prompt) - 1 : len(prompt) + len(answer)]
            ends_well = greedy[:-1] == answer or greedy == [*answer[:-1], stop, end]
            right += ends_well and tokenizer.decode(answer[:-1]) == question.answer
    return right / len(questions)


def _pad(pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Return inputs and next-token targets, [B, S]; only answers are targets."""
    inputs, targets = [], []
    for prompt, answer in pairs:
        inputs.append(torch.tensor((prompt + answer)[:-1]))
        targets.append(torch.tensor([IGNORED] * (len(prompt) - 1) + answer))
    inputs_BS = pad_sequence(inputs, batch_first=True)
    return inputs_BS, pad_sequence(targets, batch_first=True, padding_value=IGNORED)
