"""UAQ beside a layer-wise learning rate, in float64, with the project's own fold."""

import json
from pathlib import Path

import pytest

from benchmarks.folding import (
    PLAIN_STEPS,
    RECORD,
    Setting,
    codes_that_differ,
    compare,
    initial_weights,
    layerwise,
    table,
    train,
)
from qurl_megatron.checkpoints.uaq import fold_uaq
from qurl_megatron.tensors.table import is_quantized, uaq_role

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
ADAM = Setting("Adam alone")


def test_the_rates_are_s_for_what_reads_a_norm_and_its_reverse_for_the_norm():
    layer = "model.layers.0."
    readers = [f"{layer}self_attn.{part}_proj.weight" for part in "qkv"]
    readers += [f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"]
    norms = [f"{layer}{norm}_layernorm.weight" for norm in ("input", "post_attention")]
    for name in initial_weights():
        if name.startswith(layer):
            expected = 1.5 if name in readers else 1 / 1.5 if name in norms else 1.0
            assert layerwise(name, 1.5) == pytest.approx(expected, rel=1e-15), name
    assert layerwise("model.norm.weight", 1.5) == layerwise("lm_head.weight", 1.5) == 1.0


def test_under_adam_alone_folding_is_a_layer_wise_learning_rate():
    found = compare(ADAM, 1.5, steps=60)
    assert found.largest < 1e-14 and found.weights < 1e-11  # of log-probs of about -4
    assert found.codes == 0


def test_with_plain_gradient_steps_the_rates_are_squared():
    """The s² of the paper's Eq. 12, as a learning rate; not squared, it is another training."""
    found = compare(PLAIN_STEPS, 1.5, steps=60)
    assert found.largest < 1e-13 and found.weights < 1e-11 and found.codes == 0
    assert compare(PLAIN_STEPS, 1.5, instead=1.5, steps=4).weights > 0.03
    assert compare(PLAIN_STEPS, 2.0, steps=4).weights == 0


@pytest.mark.parametrize(("setting", "farther"), [(ADAM, 1.5), (PLAIN_STEPS, 1.5**2)])
def test_the_first_step_goes_s_or_s_squared_times_as_far_beside_a_weight(setting, farther):
    start, config = initial_weights(), {"model_type": "qwen2"}
    name, relative = "model.layers.0.mlp.up_proj.weight", []
    for weights in (start, fold_uaq(start, config, 1.5)):
        after = train(weights, setting, dict.fromkeys(start, 1e-6), 1, unit=1.0)
        relative.append((after[name] - weights[name]).norm() / weights[name].norm())
    assert relative[1] / relative[0] == pytest.approx(farther, rel=1e-6)


def test_a_power_of_two_is_so_to_the_last_bit():
    found = compare(ADAM, 2.0, steps=4)
    assert found.weights == found.function == found.codes == 0


def test_one_learning_rate_for_all_layers_is_another_training():
    for factor in (1.0, 1.33, 1.5):
        found = compare(ADAM, 1.5, instead=factor, steps=4)
        assert found.weights > 0.03 and found.function > 0.03 and found.codes > 1e-3


@pytest.mark.parametrize(
    "setting",
    [
        Setting("eps", eps=1e-8, gradient=1e-6),
        Setting("decay", decay=0.1),
        Setting("clip", clip=1.0),
        Setting("BF16", bf16=True),
    ],
    ids=lambda setting: setting.label,
)
def test_what_looks_at_sizes_parts_them(setting):
    assert compare(setting, 1.5, steps=4).weights > 1e-5


def test_a_third_more_codes_change_since_two_thirds_of_the_weights_take_part():
    weights, config = initial_weights(), {"model_type": "qwen2"}
    linear = {name: weight.numel() for name, weight in weights.items() if is_quantized(name)}
    share = sum(linear[name] for name in filter(uaq_role, linear)) / sum(linear.values())
    assert share == 0.7
    flips = []
    for start in (weights, fold_uaq(weights, config, 1.5)):
        after = train(start, ADAM, dict.fromkeys(start, 1e-4), 1, unit=1.0)
        flips.append(codes_that_differ(start, after))
    assert flips[1] / flips[0] == pytest.approx(1 + 0.5 * share, rel=0.05)


SHAPES = sorted((ROOT / "launch/models").glob("*/config.json"))
OF_THE_PAPER = [path for path in SHAPES if not path.parent.name.startswith("Qwen3")]


@pytest.mark.parametrize("path", OF_THE_PAPER, ids=str)
def test_in_the_papers_models_two_thirds_of_the_linear_weights_take_part(path):
    config = json.loads(path.read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    part, rest = hidden * (hidden + 2 * kv + 2 * inner), hidden * (hidden + inner)
    assert part / (part + rest) == pytest.approx(2 / 3, abs=0.02)


def test_the_page_has_the_table_of_the_record():
    assert table(json.loads(RECORD.read_text())) in PAGE
