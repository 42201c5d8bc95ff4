"""The formulas of a plan by hand, what must hold of any plan, and the command."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.cli import main
from qurl_megatron.config import ParallelConfig, load
from qurl_megatron.plan import rollout_time as rollouts
from qurl_megatron.plan import training_time as training
from qurl_megatron.plan.command import best_trainers, stop_sentence
from qurl_megatron.plan.constants import GPUS, Constants, Gpu, gpu_of
from qurl_megatron.plan.footprint import footprint
from qurl_megatron.plan.layouts import Choice, choices, overrides, own_choice, scaled
from qurl_megatron.plan.memory import GIB, engine_weights
from qurl_megatron.plan.planner import Planner
from qurl_megatron.plan.publish_time import publish_time
from qurl_megatron.plan.rollout_time import DecodeRank, decode_rank, decode_step, rollout_time
from qurl_megatron.plan.training_time import Hand, Trainer, deal_out, training_time
from qurl_megatron.plan.workload import Workload, decay, in_turn, workload
from qurl_megatron.tensors.arch import read_arch
from qurl_megatron.training.shapes import find_models

RECIPES = Path(__file__).parents[2] / "launch" / "recipes"

# Round numbers: 1000 FLOP/s, 100 bytes/s of memory, 10 and 1 to other GPUs.
GPU = Gpu(
    gib=80,
    flops={"none": 1000.0, "int8": 2000.0},
    hbm=100.0,
    nvlink=10.0,
    network=1.0,
    source="a test",
)
IDEAL = Constants(
    gemm=1.0,
    attention=1.0,
    attention_backward=2.5,
    layer_launch=0.0,
    collective=1.0,
    training_latency=0.0,
    prefill=1.0,
    decode_gemm=1.0,
    decode_hbm=1.0,
    decode_latency=0.0,
    decode_layer=0.0,
    decode_step=0.0,
)
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
# q and o 8 x 8 each, k and v 4 x 8, gate, up and down 16 x 8, in four layers.
LINEAR = 4 * (2 * 64 + 2 * 32 + 3 * 128)


def work(**changes) -> Workload:
    defaults = dict(
        prompts=4, samples=4, prompt=10.0, mean=20.0, longest=100, minibatches=2, epochs=1
    )
    return Workload(**{**defaults, **changes})


def planner(name: str, *settings: str, gpu: str = "h100", constants=None, **lengths) -> Planner:
    config = load(RECIPES / f"{name}.toml", settings)
    constants = constants or Constants()
    asked = workload(config, constants, lengths.get("mean"), lengths.get("prompt"))
    kind = gpu_of(gpu, config.quant.scheme)
    return Planner(config, find_models(config), kind, constants, asked, node=8)


# -- what is asked for -------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [50.0, 300.0, 700.0, 999.0])
def test_lengths_have_the_mean_that_was_asked_for_and_reach_the_limit(mean):
    lengths = work(mean=mean, longest=1000).lengths(4000)
    assert sum(lengths) / 4000 == pytest.approx(mean, rel=0.01)
    assert lengths[-1] == 1000 and list(lengths) == sorted(lengths)
    scale = decay(mean, 1000)
    assert scale * (1 - math.exp(-1000 / scale)) == pytest.approx(mean, rel=1e-6)


def test_responses_come_in_a_mixed_order_that_is_always_the_same():
    lengths = work().lengths(100)
    mixed = in_turn(lengths)
    assert sorted(mixed) == list(lengths) and mixed == in_turn(lengths)
    assert abs(sum(mixed[:50]) - sum(mixed[50:])) < 0.1 * sum(mixed)


# -- rollouts ----------------------------------------------------------------------------------

RANK = DecodeRank(
    weights=200.0,
    quantized=100.0,
    plain=10.0,
    token=2,
    attention=1.0,
    layers=4,
    hidden=8,
    tensor=1,
    scheme="int8",
)


def test_a_decode_step_by_hand():
    """200 bytes of weights at 100/s; 5 x (100/2000 + 10/1000) s of products; 5 x 20 tokens of 2
    bytes at 100/s."""
    found = decode_step(RANK, GPU, IDEAL, running=5, context=20)
    assert found[rollouts.WEIGHTS] == 2.0 and found[rollouts.COMPUTE] == 0
    assert found[rollouts.CACHE] == 2.0
    assert found[rollouts.REDUCE] == found[rollouts.LAUNCH] == 0
    full = decode_step(RANK, GPU, IDEAL, running=50, context=20)
    assert full[rollouts.COMPUTE] == pytest.approx(3.0) and full[rollouts.WEIGHTS] == 0


def test_the_ranks_of_an_engine_add_up_twice_a_layer():
    """2 x 4 sums of 2 x 1/2 x 5 x 8 x 2 bytes at 10/s, and half a second each."""
    halves = replace(RANK, tensor=2)
    found = decode_step(halves, GPU, replace(IDEAL, decode_latency=0.5), running=5, context=20)
    assert found[rollouts.REDUCE] == pytest.approx(8 * (80 / 10 + 0.5))


def test_what_an_engine_reads_is_its_weights_without_the_embedding():
    rank = decode_rank(ARCH, "none", 1)
    norms = 4 * 2 * 8 + 8
    assert rank.weights == 2 * (LINEAR + norms + 10 * 8)
    assert rank.quantized == 2 * LINEAR and rank.plain == 2 * 80
    assert rank.token == 2 * 4 * 2 * 2 * 2  # keys and values, 4 layers, 2 heads of 2, 2 bytes


def test_responses_that_end_make_room_for_those_that_wait():
    """In two places 3 and 1 begin; after a step 2 takes the place of 1, and both end at 3."""
    assert list(rollouts.schedule([3, 1, 2], slots=2)) == [(1, 2, 0.5), (2, 2, 1.5)]
    assert list(rollouts.schedule([3, 1], slots=2)) == [(1, 2, 0.5), (2, 1, 2.0)]
    assert sum(steps for steps, _, _ in rollouts.schedule([3, 1, 2], slots=1)) == 6


def test_the_cache_holds_what_responses_have_on_average_over_their_lives():
    lengths = work().lengths(16)
    age = sum(x * x for x in lengths) / (2 * sum(lengths))
    assert rollouts.slots_of(work(), 16, room=int(5.5 * (10 + age)), most=256) == 5
    assert rollouts.slots_of(work(), 16, room=10**6, most=256) == 16
    assert rollouts.slots_of(work(), 16, room=10**6, most=4) == 4


def rollout(asked=None, rank=RANK, **changes):
    options = {**dict(engines=1, room=10**6, requests=256), **changes}
    return rollout_time(rank, GPU, IDEAL, asked or work(), **options)


def test_a_rollout_is_its_steps_and_its_parts_add_up():
    same = rollout(work(prompts=1, samples=1))
    # 100 steps of 2 s of weights, and 2 bytes of 10 + 0.5 ... 99.5 tokens.
    cache = sum(2 * (10 + age + 0.5) for age in range(100)) / 100
    prefill = 10 * 100 / 2000
    assert same.seconds == pytest.approx(200 + cache + prefill)
    found = rollout()
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_what_limits_a_rollout_is_named():
    light = replace(RANK, token=0, attention=0.0)
    assert rollout(rank=light).limit == rollouts.LONGEST
    many = work(prompts=64, mean=80.0)
    assert rollout(many, rank=light, room=500).limit == rollouts.ROOM
    assert rollout(many, rank=light, requests=16).limit == rollouts.REQUESTS
    assert rollout(many, rank=light).limit == rollouts.COMPUTE
    assert rollout(work(mean=90.0), rank=light).limit == rollouts.WEIGHTS
    assert rollout(many).limit == rollouts.CACHE


@pytest.mark.parametrize("shape", ["Qwen2.5-0.5B-Instruct", "Qwen2.5-14B", "Qwen2.5-32B"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("running", [1, 64, 2048])
def test_eight_bits_are_never_slower_than_bf16_where_there_are_kernels(shape, tensor, running):
    folder = RECIPES.parent / "models" / shape
    arch = read_arch(json.loads((folder / "config.json").read_text()))
    for gpu in GPUS.values():
        seconds = {
            scheme: sum(
                decode_step(
                    decode_rank(arch, scheme, tensor), gpu, Constants(), running, 2000
                ).values()
            )
            for scheme in gpu.flops
        }
        assert max(seconds.values()) == seconds["none"]


# -- training ----------------------------------------------------------------------------------


def trainer(tensor=1, pipeline=1, data=1, **changes) -> Trainer:
    defaults = dict(
        arch=ARCH,
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline, data=data),
        node=8,
        recompute=False,
        distributed=True,
        overlap=False,
        parameters=1000,
    )
    return Trainer(**{**defaults, **changes})


HAND = Hand(passes=2, tokens=50, squares=1000, even=50.0)


def test_a_forward_pass_by_hand():
    """2 x (parameters + output layer) x 50 tokens; 2 x 4 layers x 8 x sum of L^2; at 1000/s."""
    found = training.forward(trainer(), GPU, IDEAL, HAND)
    assert found[training.PRODUCTS] == pytest.approx(2 * (LINEAR + 80) * 50 / 1000)
    assert found[training.ATTENTION] == pytest.approx(2 * 4 * 8 * 1000 / 1000)
    assert found[training.TENSOR] == found[training.CONTEXT] == found[training.SENDS] == 0
    assert training.forward(trainer(head=False), GPU, IDEAL, HAND)[
        training.PRODUCTS
    ] == pytest.approx(2 * LINEAR * 50 / 1000)


def test_tensor_ranks_add_up_two_times_a_layer_over_nvlink():
    found = training.forward(trainer(tensor=2), GPU, IDEAL, HAND)
    assert found[training.TENSOR] == pytest.approx(2 * 4 * (2 * 0.5 * 50 * 8 * 2) / 10)
    whole = training.forward(trainer(), GPU, IDEAL, HAND)
    assert found[training.PRODUCTS] == whole[training.PRODUCTS] / 2


def test_kernels_shorter_than_their_launches_wait_for_the_host():
    slow = replace(IDEAL, layer_launch=100.0)
    found = training.forward(trainer(), GPU, slow, HAND)
    assert sum(found.values()) == pytest.approx(2 * 4 * 100.0)


def test_an_update_is_three_forward_passes_and_recomputation_a_fourth():
    ahead = training.forward(trainer(), GPU, IDEAL, HAND)
    for recompute, more in ((False, 0), (True, 1)):
        found = training.update(trainer(recompute=recompute), GPU, IDEAL, HAND)
        assert found[training.PRODUCTS] == pytest.approx((3 + more) * ahead[training.PRODUCTS])
        attention = (3.5 + more) * ahead[training.ATTENTION]
        assert found[training.ATTENTION] == pytest.approx(attention)
        assert found[training.OPTIMIZER] == 1000 * IDEAL.optimizer_bytes / 100


def test_a_pipeline_fills_and_drains():
    """Four stages, two passes: three halves of the work more. Scores of both updates drain once."""
    stages = trainer(pipeline=4)
    found = training.update(stages, GPU, IDEAL, HAND)
    outside = (training.BUBBLE, training.OPTIMIZER)
    busy = sum(s for name, s in found.items() if name not in outside)
    assert found[training.BUBBLE] == pytest.approx(1.5 * busy)
    time = training_time(stages, None, GPU, IDEAL, work(), HAND, reference=False)
    ahead = sum(training.forward(stages, GPU, IDEAL, HAND).values())
    assert time.score == pytest.approx(2 * ahead * (1 + 3 / 4))


def test_gradients_are_added_up_and_weights_gathered_once_an_update():
    """3/4 of 1000 numbers: 4 bytes there, 2 back, at 10/s; beyond a machine 1/s and a ring of as
    many networks as it has members on a machine."""
    found = training.update(trainer(data=4), GPU, IDEAL, HAND)
    assert found[training.GRADIENTS] == pytest.approx(750 * (4 + 2) / 10)
    across = training.update(trainer(data=4, tensor=4, node=8), GPU, IDEAL, HAND)
    assert across[training.GRADIENTS] == pytest.approx(750 * (4 + 2) / 2)
    hidden = training.update(trainer(data=4, overlap=True), GPU, IDEAL, HAND)
    assert 750 * 2 / 10 <= hidden[training.GRADIENTS] < found[training.GRADIENTS]


def test_data_ranks_of_uneven_length_wait_for_the_fullest():
    """The fullest has twice the mean: half of its time, the optimizer's apart, the others wait."""
    uneven = replace(HAND, even=25.0)
    time = training_time(trainer(), None, GPU, IDEAL, work(), uneven, reference=False)
    passes = time.seconds - time.parts[training.OPTIMIZER]
    assert time.parts[training.UNEVEN] == pytest.approx(passes / 2)
    assert time.limit == training.UNEVEN


def test_a_reference_is_scored_too_and_a_critic_scored_and_trained():
    alone = training_time(trainer(), None, GPU, IDEAL, work(), HAND, reference=False)
    both = training_time(trainer(), None, GPU, IDEAL, work(), HAND, reference=True)
    assert both.score == pytest.approx(2 * alone.score) and both.train == alone.train
    critic = training_time(trainer(), trainer(), GPU, IDEAL, work(), HAND, reference=False)
    assert critic.seconds == pytest.approx(2 * alone.seconds)


def test_a_hand_is_the_fullest_of_an_update():
    whole = deal_out(work(), 1, 1000, 8, True)
    lengths = [10 + length for length in work().lengths(8)]
    assert whole == Hand(1, sum(lengths), sum(x * x for x in lengths), sum(lengths))
    eight = deal_out(work(), 8, 1000, 8, True)
    assert (eight.passes, eight.tokens, eight.even) == (1, 110, sum(lengths) / 8)
    padded = deal_out(work(), 1, 0, 4, False)
    assert padded.passes == 2 and padded.tokens >= sum(lengths)


# -- publication -------------------------------------------------------------------------------


def published(*settings: str, **rates) -> float:
    config = load(RECIPES / "grpo_qwen2.5_32b.toml", ["sync.bucket_mb=1e9", *settings])
    arch = find_models(config).policy
    gpu = replace(GPUS["h100"], **rates)
    return publish_time(config, arch, gpu, replace(IDEAL, publish_over=1.0, publish_call=0.0))


def test_a_publication_by_hand():
    """One bucket is made, then loaded: 29 bytes of traffic a weight and 33 a byte of each side."""
    arch = find_models(load(RECIPES / "grpo_qwen2.5_32b.toml")).policy
    version, weights = engine_weights(arch, "int8", 1, 2), parameter_count(arch)
    made = (weights * 29 + version * 33) / 16  # 8 tensor ranks of 2 replicas
    loaded = version / 2 * 33  # engines of two GPUs
    received = version / 2  # a rank of an engine; more than a trainer's rank sends to all eight
    seconds = (made + loaded) / 1e3 + received / 10
    assert published("sync.transport=group", hbm=1e3, network=10.0) == pytest.approx(seconds)


def test_a_publication_by_files_waits_for_the_disk():
    """Written once, and read by eight engines."""
    arch = find_models(load(RECIPES / "grpo_qwen2.5_32b.toml")).policy
    version = engine_weights(arch, "int8", 1, 2)
    seconds = published("sync.transport=files", hbm=1e15, network=1.0)
    assert seconds == pytest.approx(9 * version / IDEAL.disk, rel=1e-3)


# -- layouts -----------------------------------------------------------------------------------


def test_layouts_divide_the_model_the_batch_and_the_machines():
    found = list(choices(ARCH, 16, 8, shares=8))
    assert len(found) == len(set(found))
    for one in found:
        assert one.gpus == 16 and one.tensor <= 8 and one.engine_tensor <= 8
        assert ARCH.heads % one.tensor == ARCH.kv_heads % one.tensor == 0
        assert ARCH.num_layers % one.pipeline == 0 and 8 % one.data == 0
        assert one.colocated or one.trainer == 8
    assert {one.colocated for one in found} == {True, False}
    assert {one.recompute for one in found} == {True, False}


def test_the_recipes_own_layout_is_scaled_by_data_ranks_and_engines():
    own = own_choice(load(RECIPES / "grpo_qwen2.5_32b.toml"))
    assert own.gpus == 32 and scaled(own, 32) == own
    assert scaled(own, 64) == replace(own, data=4, engines=16)
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


# -- plans -------------------------------------------------------------------------------------


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


def test_in_turn_phases_add_up_and_one_step_off_the_longer_one_counts():
    ahead = planner("grpo_qwen2.5_32b")
    own = ahead.predict(own_choice(ahead.config), own=True)
    both = max(own.rollout.seconds, own.training.seconds)
    assert own.step == pytest.approx(both + own.publish)
    inturn = planner("grpo_qwen2.5_32b", "rollout.max_staleness=0")
    same = inturn.predict(own_choice(inturn.config), own=True)
    total = same.rollout.seconds + same.training.seconds + same.publish
    assert same.step == pytest.approx(total)
    shared = planner("grpo_qwen2.5_14b")
    colocated = shared.predict(own_choice(shared.config), own=True)
    assert colocated.reload == Constants().reload
    assert colocated.speed == pytest.approx(colocated.tokens / colocated.step / 8)


def test_more_gpus_are_never_slower_and_the_end_of_scaling_is_found():
    plans = planner("deepscaler_1.5b_stage1")
    curve = plans.scaling(128)
    assert [one.choice.gpus for one in curve] == [8, 16, 32, 64, 128]
    for less, more in zip(curve, curve[1:], strict=False):
        assert more.step <= 1.02 * less.step
    sentence = stop_sentence(curve, plans.constants.worth)
    pattern = r"It stops scaling at (\d+) GPUs: twice as many take ([\d.]+) % off the step"
    gpus, saved = re.match(pattern, sentence).groups()
    best, doubled = (one for one in curve if one.choice.gpus in (int(gpus), 2 * int(gpus)))
    assert float(saved) == pytest.approx(100 * (1 - doubled.step / best.step), abs=0.05)
    assert sentence.endswith(f"limited by rollout ({rollouts.LONGEST}).")
    assert stop_sentence(curve, worth=-10.0).startswith("It scales up to 128 GPUs")


# -- the command -------------------------------------------------------------------------------


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *map(str, arguments)])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


SMALL = RECIPES / "gsm8k_ppo_qwen2.5_0.5b.toml"


def test_the_command_prints_the_table(capsys):
    code, out, _ = call(capsys, SMALL, "--gpus", "4", "--up-to", "8", "--top", "3")
    assert code == 0
    assert out == GOLDEN


GOLDEN = """\
4 x h100, 256 responses a step of 154 tokens (at most 512) after 102, int8 rollouts, max_staleness 0

layout            GiB  rollout  train  publish  step s  tokens/s/GPU  limited by
  DP2 + 2 x TP1  26.0      2.0    0.5      0.2     2.7          6004  rollout: the longest response
  DP2 + 1 x TP2  26.0      2.3    0.5      0.2     2.9          5564  rollout: the longest response
  PP3 + 1 x TP1  20.2      2.1    0.8      0.2     3.0          5426  rollout: the longest response
* DP4 & 4 x TP1  50.4      2.0    0.3      0.2     5.5          2997  engines' release and reload

56 layouts fit; the best trainer beside each of 6 sets of engines is shown (--json: all); * is the recipe's own.
Fastest, as overrides: parallel.data=2 rollout.engines=2 rollout.engine_args=["--mem-fraction-static=0.85"] rollout.colocate=false

GPUs  best layout    step s  tokens/s/GPU  limited by
   8  DP4 + 4 x TP1     2.5          3322  rollout: the longest response
It scales up to 8 GPUs, the most that were simulated.
"""  # noqa: E501


def test_the_page_tells_what_the_command_prints_for_32b_on_32_256_and_up_to_1024_gpus(capsys):
    page = (RECIPES.parents[1] / "docs/planning.md").read_text(encoding="utf-8")
    recipe = RECIPES / "grpo_qwen2.5_32b.toml"
    for options in (["32"], ["256", "--up-to", "0", "--top", "6"]):
        code, out, _ = call(capsys, recipe, "--gpu", "h100", "--gpus", *options)
        assert code == 0 and f"```\n{out}```\n" in page, out


def test_the_command_prints_everything_as_json(capsys):
    code, out, _ = call(capsys, SMALL, "--gpus", "4", "--up-to", "0", "--json")
    found = json.loads(out)
    assert code == 0 and found["gpus"] == 4 and found["scaling"] == []
    assert found["own"]["layout"] == "DP4 & 4 x TP1"
    assert found["own"] in found["layouts"]
    seconds = found["own"]["seconds"]
    phases = sum(value for name, value in seconds.items() if name != "step")
    assert seconds["step"] == pytest.approx(phases)
    assert found["own"]["metrics"]["time/step"] == seconds["step"]
    assert found["constants"]["gemm"] == 0.5 and found["gpu"]["name"] == "h100"


def test_a_faster_network_is_taken_from_the_option(capsys):
    recipe = RECIPES / "grpo_qwen2.5_32b.toml"
    options = ["--gpus", "32", "--up-to", "0", "--json", "--network-gbps", "500"]
    _, out, _ = call(capsys, recipe, *options)
    assert json.loads(out)["gpu"]["network"] == 500e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "4", "--gpu", "tpu"], "--gpu tpu is not in the table; known: a100-80, h100"),
        (["--gpus", "4", "--gpu", "b200"], "quant.scheme=int8 has no kernels on b200"),
        (["quant.scheme=fp8", "--gpus", "4", "--gpu", "a100-80"], "fp8 has no kernels on a100-80"),
        (["--gpus", "0"], "--gpus must be 1 or more, got 0"),
        (["--gpus", "12"], "--gpus 12 is no multiple of --gpus-per-node 8"),
        (["--gpus", "4", "--mean-tokens", "9999"], "must lie between 1 and rollout.max_new_tokens"),
        (["rollout.backend=embedded", "rollout.colocate=false", "rollout.engine_args=[]"]
         + ["--gpus", "4"], "set rollout.backend=sglang"),
        (["--gpus", "4", "--config", "nowhere"], "--config nowhere is neither"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(arguments, message, capsys):
    code, _, err = call(capsys, SMALL, *arguments)
    assert code == 2 and message in err and len(err.splitlines()) == 1


def test_where_nothing_fits_the_nearest_layout_is_named(capsys):
    code, _, err = call(capsys, RECIPES / "grpo_qwen2.5_32b.toml", "--gpus", "8")
    assert code == 2
    assert "no layout fits on 8 h100: the nearest, TP" in err and "of 78 that may be filled" in err


def test_a_layout_of_the_recipe_that_cannot_be_scaled_is_said(capsys):
    code, out, _ = call(capsys, SMALL, "--gpus", "7", "--up-to", "0")
    assert code == 0 and "The recipe's own layout is not among those of 7 GPUs." in out


def choice_of_one() -> Choice:
    return Choice(
        tensor=1,
        pipeline=1,
        context=1,
        data=1,
        engines=2,
        engine_tensor=1,
        colocated=False,
        recompute=True,
    )


def test_labels_leave_sizes_of_one_out():
    assert choice_of_one().label() == "1 rank recompute + 2 x TP1"
    shared = replace(choice_of_one(), tensor=2, data=4, colocated=True, recompute=False)
    assert shared.label() == "TP2 DP4 & 2 x TP1"
