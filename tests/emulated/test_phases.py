"""What a rank does with its GPU in each phase of a run, as the emulated device counts it.

Memory is what the dry run says, nothing of it is read before it is written (it is full of NaN), and
only tensors travel over NCCL.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.config import AlgoConfig, OptimizerConfig, QuantConfig, SyncConfig
from qurl_megatron.data.responses import Responses
from qurl_megatron.observe.metrics import Timer
from qurl_megatron.plan.footprint import footprint
from tests.emulated.phases import SLACK, Phases, build, save_and_load, train_and_publish
from tests.support.cases import all_but
from tests.support.meta_ranks import small_recipe
from tests.support.models import random_samples, tiny_checkpoint
from tests.support.ranks import run_on_ranks


def go_through_all(device, config, out: Path) -> None:
    from emulated_cuda.distributed import object_collectives

    with megatron_runtime(config.parallel) as ranks:
        phase = Phases()
        policy, critic = build(phase, config, ranks)
        train_and_publish(phase, config, policy, critic, out)
        save_and_load(phase, policy, critic, out)
        assert not object_collectives()
        if ranks.tensor.rank == ranks.data.rank == ranks.context.rank == 0:
            (out / f"stage-{ranks.pipeline.rank}.json").write_text(json.dumps(vars(phase)))


CASES = {
    "FP32": dict(dtype="float32"),
    "DP2, whole optimizer on every rank": dict(
        data=2, optimizer=OptimizerConfig(distributed=False)
    ),
    "TP2 x PP2, critic": dict(tensor=2, pipeline=2, algo=AlgoConfig(advantage="gae")),
    "CP2": dict(context=2),
}


@pytest.mark.parametrize("case", all_but(CASES, "FP32", "CP2"))
def test_each_phase_takes_the_memory_that_the_dry_run_says(case, nccl, tmp_path):
    sizes = dict(hidden_size=128, intermediate_size=512, vocab_size=2051)
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", **sizes)
    config = replace(
        small_recipe(folder, **CASES[case]),
        quant=QuantConfig(scheme="int8"),
        sync=SyncConfig(bucket_mb=0.25, dir=str(tmp_path / "versions")),
    )
    out = tmp_path / "out"
    out.mkdir()
    run_on_ranks(go_through_all, config.parallel.world_size, nccl, tmp_path, config, out)
    for index, stage in enumerate(footprint(config).stages):
        real = json.loads((out / f"stage-{index}.json").read_text())
        for phase, held in real["after"].items():
            assert abs(held - stage.at_rest) < SLACK, phase
        most = {phase: size - stage.at_rest for phase, size in real["most"].items()}
        assert most["save"] < SLACK
        assert max(most["publish 1"], most["publish 2"]) < stage.publishing + SLACK
        assert most["load"] < stage.loading + SLACK
        assert max(real["most"]["step 1"], real["most"]["step 2"]) < stage.total


def count_waits(device, config, out: Path) -> None:
    """How often the host waits for the GPU in one update, by the number of its microbatches."""
    import emulated_cuda

    from qurl_megatron.actor.policy import Policy
    from qurl_megatron.training.step import improve

    with megatron_runtime(config.parallel) as ranks:
        policy = Policy.build(config.model, config.parallel, config.optimizer, ranks)
        waits = {}
        for count in (2, 4):
            cut = replace(config, train=replace(config.train, micro_batch=16 // count))
            emulated_cuda.reset_synchronizations()
            improve(policy, Responses.of(random_samples(16)), cut, step=1, timer=Timer())
            waits[count] = sum(emulated_cuda.synchronizations().values())
        (out / f"{config.model.path.rpartition('/')[2]}-{ranks.rank}.json").write_text(
            json.dumps(waits)
        )


def test_the_host_waits_for_the_gpu_once_in_a_while_and_not_in_every_layer(nccl, tmp_path):
    found = {}
    for layers in (2, 4):
        folder = tiny_checkpoint(tmp_path / f"layers{layers}", "qwen2", num_hidden_layers=layers)
        run_on_ranks(count_waits, 2, nccl, tmp_path, small_recipe(folder, tensor=2), tmp_path)
        found[layers] = json.loads((tmp_path / f"layers{layers}-0.json").read_text())
    # Megatron's gradient norm fetches that of each parameter, where neither Transformer Engine nor
    # apex has a better one: 7 in a layer, in both updates.
    more_layers = 2 * 7 * 2
    assert found[4] == {count: waits + more_layers for count, waits in found[2].items()}
    # A microbatch: seven copies to the GPU; where its response tokens are, in both passes; metrics.
    assert found[2]["4"] - found[2]["2"] <= 2 * 16
