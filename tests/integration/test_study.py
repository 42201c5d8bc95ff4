"""A whole study with the real command line: two runs of a tiny model, and what is left of them."""

import json

import pytest

from tests.support.runs import RECIPE, qurl

STUDY = """
recipe = "recipe.toml"
overrides = ["train.steps=2", "train.eval_prompts=8", "rollout.engines=1", "quant.uaq_scale=1.0"]
schemes = ["int4"]
[methods.bf16]
label = "RL, unquantized"
schemes = ["none"]
[methods.acr]
label = "QuRL"
"""


@pytest.mark.thorough
def test_two_cells_run_and_are_drawn_and_a_second_start_finds_them_done(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE.format(root=tmp_path))
    (tmp_path / "study.toml").write_text(STUDY)
    out = tmp_path / "out"
    study = ("study", tmp_path / "study.toml", "--out", out)
    qurl(*study, "--jobs", "2")

    told = json.loads((out / "study.json").read_text())
    plain, coarse = (told["runs"][f"{name}-seed-0"] for name in ("bf16-none", "acr-int4"))
    assert plain["state"] == coarse["state"] == "done"
    assert None not in (coarse["accuracy"], coarse["weight_update"], coarse["weight_error"])
    # What the study is about: at four bits the two policies differ, unquantized they are one.
    assert plain["kl"] < 1e-6 < 1e-4 < coarse["kl"]
    assert {path.name for path in out.glob("*.png")} == {"training_int4.png", "updates_int4.png"}
    text = " ".join((out / "study.md").read_text().split())
    assert "| RL, unquantized | FP32 |" in text and "| QuRL | INT4, simulated |" in text

    again = qurl(*study)
    assert "2 of 2 runs are done already" in again.stdout
