"""Critics on several ranks, with made-up targets, beside plain autograd."""

from dataclasses import replace

import torch

from qurl_megatron.actor.megatron import everywhere, megatron_runtime
from qurl_megatron.config import CriticConfig
from qurl_megatron.data.responses import Responses
from qurl_megatron.observe.metrics import merge, values
from tests.support.models import as_stored, in_float64, random_samples
from tests.support.policies import gradient, joined, relative

SAMPLES = random_samples(16)
WHOLE = Responses.of(SAMPLES)
LENGTH = 24  # divides over every layout, and is more than the longest sample has
CLIP = 0.2
FAST = CriticConfig(lr=1e-3)
HEAD = ("output_layer.weight", "output_layer.bias")


def build(config, ranks, critic=FAST, *, head=True):
    """A critic, with a head that is not zero, so that its body has a gradient."""
    from qurl_megatron.actor.critic import Critic

    optimizer = replace(config.optimizer, lr=critic.lr, warmup_steps=critic.warmup_steps)
    built = Critic.build(config.model, config.parallel, optimizer, ranks)
    if head and ranks.last_stage:
        for parameter, value in zip(built.gpt.output_layer.parameters(), a_head(), strict=True):
            value = value[:, : parameter.shape[-1]] if parameter.ndim == 2 else value
            with torch.no_grad():
                parameter.copy_(value)
            built.write_master(parameter, value)
    return built


def a_head(hidden: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return 0.1 * torch.randn(1, hidden, generator=generator), torch.tensor([0.3])


def targets(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up returns of a sample's written tokens, and values from before, some out of reach."""
    generator = torch.Generator().manual_seed(100 + index)
    count = SAMPLES[index].written_tokens
    return torch.randn(2, count, generator=generator).unbind()


def minibatch(ranks, number: int, *, packed: bool = False) -> list:
    """This data rank's microbatches of one half of the samples, with values and returns."""
    from qurl_megatron.data.pack import pack_samples, pad_samples

    half = list(range(8 * number, 8 * number + 8))
    mine = half[ranks.data.rank :: ranks.data.size]
    batches = []
    for chunk in (mine[i : i + 2] for i in range(0, len(mine), 2)):
        # Every response counts alike, its tokens too.
        shares = [1 / (8 * SAMPLES[i].written_tokens) for i in chunk]
        if packed:
            batch = pack_samples(WHOLE, chunk, shares, sequence_multiple=4, multiple=8)
        else:
            batch = pad_samples(WHOLE, chunk, shares, length=LENGTH)
        returns, before = (torch.cat(parts) for parts in zip(*map(targets, chunk), strict=True))
        batches.append(replace(batch, returns=returns, values=before).to(ranks.device))
    return batches


def named(critic, read=None):
    """A critic's weights by Hugging Face name, its head's by Megatron's; for ``joined``."""
    from qurl_megatron.actor.build import parameter_ops
    from qurl_megatron.checkpoints.source import open_checkpoint
    from qurl_megatron.tensors.slice import Shard

    ranks = critic.ranks
    arch = open_checkpoint(critic.folder).arch
    ops = parameter_ops(replace(arch, tied=False), ranks)
    for name, parameter in critic.gpt.named_parameters():
        value = read(parameter) if read else parameter.detach().float()
        if name in HEAD:
            yield Shard.whole(name, value)
            continue
        for part, (hf, shard) in zip(ops[name].hf, ops[name].to_hf(value).items(), strict=True):
            dim = part.split_dim
            offset = 0 if dim is None else ranks.tensor.rank * shard.shape[dim]
            yield Shard(hf, shard, part.shape, dim, offset)


def learn(critic, number: int) -> dict[str, float]:
    """One update on a minibatch; what all ranks saw of it."""
    from qurl_megatron.training.losses import ValueLoss

    ranks = critic.ranks
    seen = critic.accumulate(minibatch(ranks, number), ValueLoss(ranks.context, clip=CLIP))
    grad_norm, lr = critic.apply()
    gathered = everywhere(seen if ranks.counted else [])
    measured = values(merge(metrics for rank in gathered for metrics in rank))
    loss = merge(m for rank in gathered for m in rank)["critic/loss"].total
    return {**measured, "critic/loss": loss, "critic/grad_norm": grad_norm, "critic/lr": lr}


def observe(device, config, out) -> None:
    """Values and gradients before any update, then the weights after two of them."""
    from qurl_megatron.training.losses import ValueLoss, attach_values

    with megatron_runtime(config.parallel) as ranks:
        critic = build(config, ranks)
        critic.folder = config.model.path
        batches = minibatch(ranks, 0, packed=config.train.packed)
        scored = attach_values(critic, batches)
        found = {}
        if ranks.last_stage:
            for batch in scored:
                found |= dict(zip(batch.indices, batch.values.split(batch.lengths), strict=True))
        gathered = everywhere(found)
        critic.accumulate(batches, ValueLoss(ranks.context, clip=CLIP))
        gradients = joined(named(critic, gradient(critic)))
        metrics = [learn(critic, number) for number in (0, 1)]
        weights = joined(named(critic))
        if ranks.leads:
            found = {i: v.cpu() for rank in gathered for i, v in rank.items()}
            torch.save(
                dict(values=found, gradients=gradients, metrics=metrics, weights=weights), out
            )


def expected_of(folder) -> tuple[dict, dict, float]:
    """The same by plain autograd in float64: transformers' hidden states, a product, the loss."""
    model = in_float64(folder)
    hidden = model.config.hidden_size
    weight, bias = (x.double() for x in a_head())
    weight = weight[:, :hidden].clone().requires_grad_()
    bias.requires_grad_()
    found, loss = {}, 0.0
    for i in range(8):
        sample = SAMPLES[i]
        ids = torch.tensor([[*sample.prompt.input_ids, *sample.response_ids]])
        states = model.model(ids).last_hidden_state[0]
        start, count = len(sample.prompt.input_ids), len(sample.response_ids)
        all_of_it = (states @ weight[0] + bias)[start - 1 : start - 1 + count]
        found[i] = all_of_it[torch.tensor(sample.written)]
        returns, before = (x.double() for x in targets(i))
        moved = torch.maximum(torch.minimum(found[i], before + CLIP), before - CLIP)
        error = torch.maximum((found[i] - returns) ** 2, (moved - returns) ** 2)
        loss = loss + (error / 2).mean() / 8
    loss.backward()
    gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    gradients = as_stored(gradients) | dict(zip(HEAD, (weight.grad, bias.grad), strict=True))
    return {i: v.detach() for i, v in found.items()}, gradients, loss.item()


def assert_as_by_autograd(found: dict, expected: dict, gradients: dict, close=1e-5) -> None:
    """What ``observe`` found before any update is what ``expected_of`` did."""
    assert found["values"].keys() == expected.keys()
    for i, value in expected.items():
        torch.testing.assert_close(found["values"][i].double(), value, rtol=close, atol=close)
    assert found["gradients"].keys() == gradients.keys()
    for name, value in gradients.items():
        assert relative(found["gradients"][name], value) < 2e-5, name
