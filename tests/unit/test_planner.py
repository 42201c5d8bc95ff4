"""The formulas of a plan by hand, what must hold of any plan, and the command."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.cli import main
from qurl_megatron.config import ParallelConfig, TrainConfig, load
from qurl_megatron.plan import seconds
from qurl_megatron.plan.command import AS_ESTIMATED, best_trainers, stop_sentence, workload
from qurl_megatron.plan.constants import ASSUMPTIONS, GPUS, Constants, Gpu, gpu_of
from qurl_megatron.plan.footprint import footprint
from qurl_megatron.plan.layouts import choices, overrides, own_choice, scaled
from qurl_megatron.plan.memory import GIB, engine_weights
from qurl_megatron.plan.planner import Planner
from qurl_megatron.plan.seconds import Engine, Hand, Roofline, Workload
from qurl_megatron.tensors.arch import Experts, read_arch
from qurl_megatron.training.shapes import find_models

RECIPES = Path(__file__).parents[2] / "launch" / "recipes"

# Round numbers: 1000 FLOP/s, 100 bytes/s of memory, 10 and 1 to other GPUs.
GPU = Gpu(gib=80, flops={"none": 1000.0, "int8": 2000.0}, hbm=100.0, nvlink=10.0, network=1.0)
IDEAL = Constants(
    flops=1.0,
    codes=1.0,
    activation_codes=0.0,
    hbm=1.0,
    collective=1.0,
    latency=0.0,
    layer_launch=0.0,
    decode_layer=0.0,
    decode_step=0.0,
)
ROOF = Roofline(gpu=GPU, constants=IDEAL, node=8)
ARCH = read_arch(
    {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
)
MOE = replace(
    ARCH, experts=Experts(count=8, top_k=2, intermediate=6, norm_topk_prob=True), family="qwen3_moe"
)
# q and o 8 x 8 each, k and v 4 x 8, gate, up and down 16 x 8, in four layers.
LINEAR = 4 * (2 * 64 + 2 * 32 + 3 * 128)


def work(**changes) -> Workload:
    defaults = dict(
        prompts=4, samples=4, prompt=10.0, mean=20.0, longest=100, minibatches=2, epochs=1
    )
    return Workload(**{**defaults, **changes})


def planner(name: str, *settings: str) -> Planner:
    config = load(RECIPES / f"{name}.toml", settings)
    roof = Roofline(gpu=gpu_of("h100", config.quant.scheme), constants=Constants(), node=8)
    return Planner(config, find_models(config), roof, workload(config, None, None))


def with_constants(**changes) -> Roofline:
    return replace(ROOF, constants=replace(IDEAL, **changes))


@pytest.mark.parametrize("mean", [50.0, 300.0, 700.0, 999.0])
def test_lengths_have_the_mean_that_was_asked_for_and_reach_the_limit(mean):
    lengths = work(mean=mean, longest=1000).lengths(4000)
    assert sum(lengths) / 4000 == pytest.approx(mean, rel=0.01)
    assert lengths[-1] == 1000 and lengths == sorted(lengths)
    scale = seconds.decay(mean, 1000)
    assert scale * (1 - math.exp(-1000 / scale)) == pytest.approx(mean, rel=1e-6)


ENGINE = Engine(ARCH, "int8", 1)


def test_a_decode_step_by_hand():
    """INT8 weights at 100 bytes/s; products of the layers at 2000/s, of the output at 1000/s; 5 x
    20 tokens of 2 x 4 layers x 2 heads x 2 numbers x 2 bytes."""
    weights = LINEAR + 4 * 4 * (8 + 4 + 4 + 8 + 16 + 16 + 8) + 2 * (9 * 8 + 80)
    step = seconds.decode_step(ROOF, ENGINE, running=5, context=20)
    assert step[seconds.WEIGHTS] == pytest.approx(weights / 100) and step[seconds.COMPUTE] == 0
    assert step[seconds.CACHE] == pytest.approx(100 * 64 / 100)
    assert step[seconds.SENDS] == step[seconds.LAUNCH] == 0
    full = seconds.decode_step(ROOF, ENGINE, running=50, context=20)
    assert full[seconds.COMPUTE] == pytest.approx(50 * (2 * LINEAR / 2000 + 160 / 1000))
    assert full[seconds.WEIGHTS] == 0


def test_codes_multiply_slower_than_the_data_sheet_and_activations_are_quantized_first():
    slower = with_constants(codes=0.5, activation_codes=3.0)
    step = seconds.decode_step(slower, ENGINE, running=50, context=20)
    assert step[seconds.COMPUTE] == pytest.approx(50 * (2 * LINEAR / 1000 + 160 / 1000))
    assert step[seconds.LAUNCH] == 4 * 3.0
    bf16 = replace(ENGINE, scheme="none")
    assert seconds.decode_step(slower, bf16, 50, 20) == seconds.decode_step(ROOF, bf16, 50, 20)


def test_the_ranks_of_an_engine_add_up_twice_a_layer():
    """2 x 4 sums of 2 x 1/2 x 5 x 8 x 2 bytes at 10/s, and half a second each."""
    step = seconds.decode_step(
        with_constants(latency=0.5), replace(ENGINE, tensor=2), running=5, context=20
    )
    assert step[seconds.SENDS] == pytest.approx(8 * (80 / 10 + 0.5))


def test_a_decode_step_reads_the_experts_that_any_response_has_chosen():
    """Each of 8 stays unread where none of 3 responses has it among its 2: (3/4)^3."""
    roof, engine = with_constants(decode_experts=0.5), replace(ENGINE, arch=MOE)
    step = seconds.decode_step(roof, engine, running=3, context=20)
    expert = 3 * 8 * 6 + 4 * (6 + 6 + 8)  # INT8 codes and scales of gate, up and down
    unread = 4 * 8 * expert * 0.75**3
    embedding = 2 * 80
    read = engine_weights(MOE, "int8", 1, 2) - embedding - unread
    assert step[seconds.WEIGHTS] == pytest.approx(read / 100)
    assert step[seconds.LAUNCH] == 4 * 0.5
    # Of products each response has its own two.
    met = 4 * (2 * 64 + 2 * 32 + 2 * 3 * 48)
    full = seconds.decode_step(roof, engine, running=100, context=20)
    assert full[seconds.COMPUTE] == pytest.approx(100 * (2 * met / 2000 + 160 / 1000))


def rollout(asked=None, engine=ENGINE, roof=ROOF, **changes):
    options = {**dict(engines=1, room=10**6, requests=256), **changes}
    return seconds.rollout_time(roof, engine, asked or work(), **options)


def test_a_rollout_is_a_step_for_each_token_of_the_longest_and_its_prefill():
    phase = rollout(work(prompts=1, samples=1))
    step = seconds.decode_step(ROOF, ENGINE, running=1, context=10 + 50)
    prefill = 10 * 2 * LINEAR / 2000
    assert phase.seconds == pytest.approx(100 * sum(step.values()) + prefill)


def test_responses_wait_where_the_cache_or_the_requests_are_full():
    """The cache has room for 4 responses at their average length, so 12 of 16 wait, or for one."""
    lengths = work().lengths(16)
    age = sum(x * x for x in lengths) / (2 * sum(lengths))
    four = rollout(room=int(4.5 * (10 + age)))
    assert four.seconds == rollout(requests=4).seconds > rollout().seconds
    assert rollout(room=1).seconds == rollout(requests=1).seconds > four.seconds


def test_what_limits_a_rollout_is_named():
    many = work(prompts=64, mean=80.0)
    launches = with_constants(decode_step=1000.0)
    assert rollout(roof=launches).limit == seconds.LONGEST
    assert rollout(many, roof=launches, room=500).limit == seconds.ROOM
    assert rollout(many, roof=launches, requests=16).limit == seconds.REQUESTS
    assert rollout(many).limit == seconds.CACHE


def forward(roof=ROOF, head=True, arch=ARCH, **sizes) -> dict[str, float]:
    return seconds.forward(roof, arch, ParallelConfig(**sizes), HAND, head=head)


HAND = Hand(passes=2, tokens=50, squares=1000)


def test_a_forward_pass_by_hand():
    """2 x (parameters + output layer) x 50 tokens; 2 x 4 layers x 8 x sum of L^2; at 1000/s."""
    attention = 2 * 4 * 8 * 1000
    ahead = forward()
    assert ahead[seconds.COMPUTE] == pytest.approx((2 * (LINEAR + 80) * 50 + attention) / 1000)
    assert ahead[seconds.SENDS] == ahead[seconds.LAUNCH] == 0
    headless = forward(head=False)
    assert headless[seconds.COMPUTE] == pytest.approx((2 * LINEAR * 50 + attention) / 1000)
    # Tensor ranks add up two times a layer over NVLink.
    halves = forward(tensor=2)
    assert halves[seconds.SENDS] == pytest.approx(2 * 4 * (2 * 0.5 * 50 * 8 * 2) / 10)
    assert halves[seconds.COMPUTE] == ahead[seconds.COMPUTE] / 2
    # Kernels shorter than their launches wait for the host.
    launched = forward(with_constants(layer_launch=100.0))
    assert sum(launched.values()) == pytest.approx(2 * 4 * 100.0)


def test_tokens_travel_to_experts_and_back():
    """Two copies of 50 tokens of 8 x 2 bytes, 1.5 times as many for the fullest rank, in 4 layers:
    to ranks of a machine, at 10/s; to 8 of two, between which half cross the network, at 1/s."""
    crowded = with_constants(crowded=1.5)
    size = 1.5 * 2 * 50 * 8 * 2
    near, far = (forward(crowded, arch=MOE, expert=n, data=n)[seconds.SENDS] for n in (2, 8))
    assert (near, far) == pytest.approx((4 * 2 * size / 2 / 10, 4 * 2 * size * 7 / 8 / 10))
    sent = forward(replace(crowded, node=4), arch=MOE, expert=8, data=8)[seconds.SENDS]
    assert sent == pytest.approx(4 * 2 * size / 2 / 1)
    # In place of one of two sums over tensor ranks, each of which sends half of the tokens.
    both = forward(crowded, arch=MOE, expert=2, tensor=2)[seconds.SENDS]
    assert both == pytest.approx(4 * (2 * 0.5 * 50 * 8 * 2) / 10 + near / 2)


def test_experts_are_multiplied_one_after_another_and_the_fullest_rank_is_waited_for():
    experts = 4 * 2 * 3 * 48  # that a token meets
    even, crowded = (
        forward(with_constants(crowded=x), arch=MOE, expert=4, data=4)[seconds.COMPUTE]
        for x in (1.0, 1.5)
    )
    assert crowded - even == pytest.approx(0.5 * 2 * experts * 50 / 1000)
    launched = with_constants(layer_launch=100.0, expert_launch=50.0)
    for dealt, launches in ((1, 100 + 8 * 50), (4, 100 + 2 * 50)):
        ahead = forward(launched, arch=MOE, expert=dealt, data=dealt)
        assert sum(ahead.values()) == pytest.approx(2 * 4 * launches)


def test_context_ranks_pass_keys_on_behind_attention():
    """2 x 4 bytes x 2 heads x 2 of 25 tokens in each of 4 layers, less half of the attention."""
    ahead = forward(context=2)
    assert ahead[seconds.SENDS] == pytest.approx(4 * 25 * 16 / 10 - 2 * 4 * 8 * 1000 / 2 / 1000)


def test_a_pipeline_fills_and_drains():
    """Four stages, two passes: three halves of the work more."""
    ahead = forward(pipeline=4)
    assert ahead[seconds.BUBBLE] == pytest.approx(1.5 * ahead[seconds.COMPUTE])


def training(archs=(ARCH,), recompute=False, reference=False, all_scored=True) -> float:
    options = dict(recompute=recompute, reference=reference, all_scored=all_scored)
    return seconds.training_time(ROOF, archs, ParallelConfig(), work(), HAND, **options).seconds


def test_scoring_is_a_forward_pass_an_update_three_and_recomputation_a_fourth():
    ahead = forward()[seconds.COMPUTE]
    assert training() == pytest.approx(2 * (1 + 3) * ahead)
    assert training(recompute=True) == pytest.approx(2 * (1 + 4) * ahead)
    assert training(all_scored=False) == pytest.approx((1 + 2 * 3) * ahead)


def test_a_reference_is_scored_too_and_a_critic_scored_and_trained():
    ahead = forward()[seconds.COMPUTE]
    assert training(reference=True) == pytest.approx(2 * (2 + 3) * ahead)
    share = 1 + forward(head=False)[seconds.COMPUTE] / ahead
    assert training(archs=(ARCH, ARCH)) == pytest.approx(share * training())


def test_a_hand_is_an_even_share_but_the_longest_response_at_least():
    lengths = [10 + length for length in work().lengths(8)]
    whole = seconds.deal_out(work(), 1, TrainConfig(max_tokens=1000))
    assert whole == Hand(1, sum(lengths), sum(x * x for x in lengths))
    assert seconds.deal_out(work(), 8, TrainConfig(max_tokens=1000)) == Hand(1, 110, 110**2)
    padded = seconds.deal_out(work(), 1, TrainConfig(micro_batch=4))  # to the quantile at 4/5
    assert padded == Hand(2, 8 * lengths[6], 8 * lengths[6] ** 2)


def test_a_publication_by_hand():
    """29 bytes of traffic a weight are made while 33 a byte are loaded and sent. Or eight engines
    read from a disk."""

    def published(transport: str, *changes: str, **rates) -> float:
        changes = (f"sync.transport={transport}", *changes)
        config = load(RECIPES / "grpo_qwen2.5_32b.toml", changes)
        constants = replace(IDEAL, publish_over=1.0)
        roof = Roofline(gpu=replace(GPUS["h100"], **rates), constants=constants, node=8)
        return seconds.publish_time(roof, config, arch)

    arch = find_models(load(RECIPES / "grpo_qwen2.5_32b.toml")).policy
    version, weights = engine_weights(arch, "int8", 1, 2), parameter_count(arch)
    made = (weights * 29 + version * 33) / 16  # 8 tensor ranks of 2 replicas
    received = version / 2  # by each rank of an engine of two GPUs
    slow, fast = 1e3, 1e15
    assert published("group", hbm=slow, network=fast) == pytest.approx(received * 33 / slow)
    loaded = received * 33 / slow + received / 10
    assert (
        published("group", hbm=slow, network=10.0) == pytest.approx(loaded) and made / slow < loaded
    )
    more = "rollout.engines=64"  # each gets it from the one before
    assert published("group", more, hbm=slow, network=10.0) == pytest.approx(loaded)
    by_files = 8 * version / IDEAL.disk
    assert published("files", hbm=fast, network=1.0) == pytest.approx(by_files, rel=1e-3)


def test_layouts_divide_the_model_the_batch_and_the_machines():
    found = [*choices(ARCH, ParallelConfig(), 16, 8, shares=8)]
    assert len(found) == len(set(found))
    for one in found:
        parallel = one.parallel
        assert one.gpus == 16 and parallel.tensor <= 8 and one.engine_tensor <= 8
        assert ARCH.heads % parallel.tensor == ARCH.kv_heads % parallel.tensor == 0
        assert ARCH.num_layers % parallel.pipeline == 0 and 8 % parallel.data == 0
        assert parallel.world_size == (16 if one.colocated else 8)
    for several in (found, choices(ARCH, ParallelConfig(), 8, 8, shares=8)):
        assert {one.colocated for one in several} == {True, False}
    assert {one.recompute for one in found} == {True, False}
    assert {one.parallel.expert for one in found} == {1}


def test_experts_are_dealt_to_the_ranks_of_a_stage_in_every_way():
    arch = replace(MOE, kv_heads=4)
    found = [*choices(arch, ParallelConfig(), 16, 8, shares=16)]
    assert {one.parallel.expert for one in found} == {1, 2, 4, 8}
    for one in found:
        parallel = one.parallel
        assert parallel.expert_copies * parallel.expert * parallel.expert_tensor == (
            parallel.tensor * parallel.context * parallel.data
        )
        assert parallel.expert == 1 or parallel.expert % parallel.tensor == 0
        assert 6 % parallel.expert_tensor == 0 and 6 % one.engine_tensor == 0
    assert any("EP8" in one.label() for one in found)


def test_the_recipes_own_layout_is_scaled_by_data_ranks_and_engines():
    own = own_choice(load(RECIPES / "grpo_qwen2.5_32b.toml"))
    assert own.gpus == 32 and scaled(own, 32) == own
    doubled = replace(own.parallel, data=4)
    assert scaled(own, 64) == replace(own, parallel=doubled, engines=16)
    assert scaled(own, 8) is None


@pytest.mark.parametrize(("name", "gpus"), [("grpo_qwen2.5_14b", 8), ("grpo_qwen2.5_32b", 32)])
def test_the_overrides_of_a_layout_make_the_recipe_that_was_predicted(name, gpus):
    plans = planner(name)
    for one in list(best_trainers(plans.plan(gpus)))[:6]:
        settings = [
            *overrides(plans.config, one.config),
            f"train.run_dir={one.config.train.run_dir}",
        ]
        assert load(RECIPES / f"{name}.toml", settings) == one.config
        if one.own and name == "grpo_qwen2.5_32b":
            assert overrides(plans.config, one.config) == []


def test_a_plan_is_sorted_fits_and_marks_the_recipes_layout():
    plans = planner("grpo_qwen2.5_14b")
    found = plans.plan(8)
    assert [one.step for one in found] == sorted(one.step for one in found)
    assert sum(one.own for one in found) == 1
    for one in found:
        assert one.bytes < 80 * GIB and one.choice.gpus == 8
        held = footprint(one.config, plans.models)
        assert held.fullest[2] == one.bytes
        assert held.engine.tokens("int8") >= 2048 + 8192


def predicted(name: str, *settings: str):
    plans = planner(name, *settings)
    return plans.predict(own_choice(plans.config), own=True)


def test_in_turn_phases_add_up_and_one_step_off_the_longer_one_counts():
    ahead = predicted("grpo_qwen2.5_32b")
    assert ahead.step == pytest.approx(
        max(ahead.rollout.seconds, ahead.train.seconds) + ahead.publish
    )
    inturn = predicted("grpo_qwen2.5_32b", "rollout.max_staleness=0")
    total = inturn.rollout.seconds + inturn.train.seconds + inturn.publish
    assert inturn.step == pytest.approx(total)
    colocated = predicted("grpo_qwen2.5_14b")
    assert colocated.reload == Constants().reload
    assert colocated.speed == pytest.approx(colocated.tokens / colocated.step / 8)


def test_more_gpus_are_never_slower_and_the_end_of_scaling_is_found():
    plans = planner("deepscaler_1.5b_stage1")
    curve = plans.scaling(128)
    assert [one.choice.gpus for one in curve] == [8, 16, 32, 64, 128]
    for less, more in zip(curve, curve[1:], strict=False):
        assert more.step <= 1.02 * less.step
    sentence = stop_sentence(curve, plans.roof.constants.worth)
    pattern = r"It stops scaling at (\d+) GPUs: twice as many take ([\d.]+) % off the step"
    gpus, saved = re.match(pattern, sentence).groups()
    best, doubled = (one for one in curve if one.choice.gpus in (int(gpus), 2 * int(gpus)))
    assert float(saved) == pytest.approx(100 * (1 - doubled.step / best.step), abs=0.05)
    assert sentence.endswith(f"limited by rollout: {seconds.LONGEST}.")
    assert stop_sentence(curve, worth=-10.0).startswith("It scales up to 128 GPUs")


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *map(str, arguments)])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


SMALL = RECIPES / "gsm8k_ppo_qwen2.5_0.5b.toml"


def test_the_page_tells_what_the_command_prints_for_32b_and_for_experts(capsys):
    page = (RECIPES.parents[1] / "docs/planning.md").read_text(encoding="utf-8")
    dense, experts = RECIPES / "grpo_qwen2.5_32b.toml", RECIPES / "grpo_qwen3_30b_a3b.toml"
    for recipe, options in (
        (dense, ["32"]),
        (dense, ["256", "--up-to", "0", "--top", "6"]),
        (experts, ["16", "--up-to", "128"]),
        (experts, ["64", "--up-to", "0", "--top", "4"]),
    ):
        code, out, _ = call(capsys, recipe, "--gpu", "h100", "--gpus", *options)
        assert code == 0 and f"```\n{out}```\n" in page, out


def test_the_page_on_what_pays_has_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.chdir(RECIPES.parents[1])
    page = Path("docs/does_it_pay.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^\$ qurl (plan .*)\n((?:(?!\$ |```).*\n)+)", page, re.M)
    assert len(blocks) == 13
    for words, printed in blocks:
        main(words.split())
        seen = capsys.readouterr()
        assert printed.rstrip() == (seen.out or seen.err).rstrip(), words
        for ratio, span in re.findall(r"^INT8 .*  (\d\.\d\d)  (\d.* to \d\.\d\d)  ", printed, re.M):
            assert f"| {ratio} ({span}) |" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "4", "--gpu", "tpu"], "--gpu tpu is not in the table; known: a100-80, h100"),
        (["--gpus", "4", "--gpu", "b200"], "quant.scheme=int8 has no kernels on b200"),
        (["--gpus", "0"], "--gpus 0 --gpus-per-node 8 must be 1 or more"),
        (["--gpus", "12"], "--gpus 12 is no multiple of --gpus-per-node 8"),
        (["--gpus", "4", "--mean-tokens", "9999"], "must lie between 1 and rollout.max_new_tokens"),
        (["rollout.backend=embedded", "rollout.colocate=false", "rollout.engine_args=[]"]
         + ["--gpus", "4"], "set rollout.backend=sglang"),
        (["--gpus", "4", "--config", "nowhere"], "--config nowhere is neither"),
        (["--gpus", "4", "parallel.expert=4"], "parallel.expert=4 deals experts to ranks, and the"),
        (["--gpus", "4", "model.routing_replay=proximal"], "replays the choice of experts, and a"),
        (["--gpus", "4", "--compare", "int8,fp"], "quant.scheme must be one of none, int8, fp8"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(arguments, message, capsys):
    code, _, err = call(capsys, SMALL, *arguments)
    assert code == 2 and message in err and len(err.splitlines()) == 1


def test_schemes_are_compared_by_their_best_layouts_and_their_estimates_at_both_ends(capsys):
    recipe, options = RECIPES / "grpo_qwen2.5_14b.toml", ["--gpus", "8"]
    code, out, _ = call(capsys, recipe, *options, "--compare", "int8,none")
    rows = {line.split()[0]: line for line in out.splitlines()[2:5]}
    assert code == 0 and list(rows) == ["scheme", "BF16", "INT8"]
    steps = {}
    for scheme in ("none", "int8"):
        plans = planner("grpo_qwen2.5_14b", f"quant.scheme={scheme}")
        step, steps[scheme] = plans.plan(8)[0].step, steps_of(plans)
        assert steps[scheme][AS_ESTIMATED] == step
        assert f" {step:.1f} " in rows["BF16" if scheme == "none" else "INT8"]
    ratios = {words: steps["none"][words] / steps["int8"][words] for words in steps["int8"]}
    span = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}"
    assert f" {ratios[AS_ESTIMATED]:.2f}  {span}  " in rows["INT8"] and " to " not in rows["BF16"]
    for end in (min, max):
        assert f"{end(ratios.values()):.2f} where {end(ratios, key=ratios.get)}" in out
    assert "\nBF16, as overrides: model.recompute=false quant.scheme=none " in out


def steps_of(plans: Planner) -> dict[str, float]:
    """The fastest step under each assumption, each planned anew."""
    steps = {AS_ESTIMATED: plans.plan(8)[0].step}
    for name, value, words in ASSUMPTIONS:
        roof = replace(plans.roof, constants=replace(Constants(), **{name: value}))
        steps[words] = replace(plans, roof=roof).plan(8)[0].step
    return steps


def test_where_nothing_fits_the_nearest_layout_is_named(capsys):
    code, _, err = call(capsys, RECIPES / "grpo_qwen2.5_32b.toml", "--gpus", "8")
    assert code == 2
    assert "no layout fits on 8 GPUs: the nearest, TP" in err and "of 78 that may be filled" in err


def test_a_layout_of_the_recipe_that_cannot_be_scaled_is_said(capsys):
    code, out, _ = call(capsys, SMALL, "--gpus", "7", "--up-to", "0")
    assert code == 0 and "The recipe's own layout is not among those of 7 GPUs." in out
    shape = ["--config", str(RECIPES.parent / "models/Qwen2.5-0.5B-Instruct")]
    recipe = RECIPES / "grpo_qwen2.5_14b.toml"
    code, out, _ = call(capsys, recipe, "--gpus", "8", *shape, "--up-to", "0")
    assert code == 0 and "those of 8 GPUs: parallel.tensor=8 does not divide the model's" in out
    # What the user gives is refused, whatever else of the recipe does not fit.
    code, _, error = call(capsys, recipe, "--gpus", "8", *shape, "parallel.pipeline=5")
    assert code == 2 and "parallel.pipeline=5 does not divide the model's" in error
    cut = ["quant.scheme=fp8_block", "rollout.engine_tensor=8"]
    code, _, error = call(capsys, RECIPES / "grpo_qwen2.5_14b.toml", "--gpus", "8", *cut)
    assert code == 2 and "a smaller rollout.engine_tensor" in error
