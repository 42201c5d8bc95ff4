"""docs/mismatch.md: its tables are those of the records, and it leaves no answer out."""

import json
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from benchmarks.mismatch_page import BEGIN, PAGE, kept, page, record, rendered
from qurl_megatron.algo.objective import OBJECTIVES
from qurl_megatron.config import load
from qurl_megatron.config.sections import QuantConfig, TrainConfig
from qurl_megatron.evaluation.study_plan import read_study
from qurl_megatron.evaluation.study_results import read_result, run_dir, to_json
from qurl_megatron.kit.errors import ConfigError

STUDIES = Path(__file__).parents[2] / "launch/studies"
MACHINE = {"cpu": "some CPU", "cores": 2, "commit": "abc"}
ELSEWHERE = {"cpu": "another CPU", "cores": 8, "commit": "def"}

STUDY = """
title = "A model"
recipe = "recipe.toml"
overrides = ["train.steps=3", "train.eval_prompts=0"]
schemes = ["int8", "int4"]
[methods.none]
label = "nothing to answer"
schemes = ["none"]
[methods.tis]
label = "TIS"
overrides = ["algo.objective=tis"]
[methods.acr]
label = "ACR"
[methods.uaq]
label = "UAQ"
overrides = ["quant.uaq_scale=1.5"]
"""


@pytest.fixture
def root(tmp_path) -> Path:
    recipe = '[model]\npath = "model"\n[data]\ntask = "chain_sum"\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


def measure(root: Path, cell: str, kl: float, **others: float) -> None:
    """What a run of the study leaves: three steps, of which the first takes ten times as long."""
    study = read_study(root / "study.toml")
    folder = run_dir(root / "out", next(one for one in study.cells if one.name == cell))
    folder.mkdir(parents=True)
    lines = []
    for step in (1, 2, 3):
        metrics = {"rollout/kl_k3": kl * step, "rollout/rho_max": 1.0 + step, **others}
        if "quant/update_passed" in metrics:
            metrics["quant/update_passed"] += 0.0625 * (step - 2)
        metrics["time/step"] = 20.0 if step == 1 else 2.0
        lines.append(json.dumps({"step": step, "time": 1.0, "metrics": metrics}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_the_tables_of_the_page_are_made_of_the_records():
    """``python -m benchmarks.mismatch_page`` writes them again."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text, rendered(kept()))


@pytest.mark.parametrize("study", ["mismatch_quickstart", "mismatch_smollm2"])
def test_the_page_and_its_studies_have_every_answer(study):
    """Every objective and a rejection at INT8, every rounding and every alignment."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    made = read_study(STUDIES / f"{study}.toml")
    cells = [cell for cell in made.cells if cell.scheme == "int8"]
    configs = {cell.method: load(made.recipe, cell.overrides) for cell in cells}
    for name in OBJECTIVES:  # a method is called like its objective
        assert configs[name].algo.objective == name and not configs[name].correction.rejects
        assert f"`{name}`" in text
    assert configs["rejection"].correction.rejects and "`correction.reject_low`" in text
    overrides = {override for method in made.methods.values() for override in method.overrides}
    for section, key in ((QuantConfig, "quant.rounding"), (TrainConfig, "train.align")):
        off, *values = get_args(get_type_hints(section)[key.partition(".")[2]])
        assert off in ("nearest", "none")
        for value in values:
            setting = f"{key}={value}"
            assert setting in overrides
            assert f"`{value}`" in text or f"`{setting}`" in text


def test_a_record_has_a_row_for_each_method_and_scheme_of_the_table(root):
    measure(root, "none-none-seed-0", 1e-12)
    measured = {"quant/update_passed": 0.75, "quant/code_flip_rate": 0.01}
    measured |= {"policy/routes_differ_fraction": 0.004, "reward/mean": 0.5}
    measure(root, "uaq-int4-seed-0", 0.1, **measured)
    study = read_study(root / "study.toml")
    results = [read_result(cell, root / "out") for cell in study.cells]
    told = to_json(study, results) | {"environment": MACHINE}
    made = record(told, ELSEWHERE)
    assert (made["title"], made["cpu"], made["cores"], made["steps"]) == (
        "A model", "some CPU", 2, 3,
    )  # fmt: skip
    assert [(one["scheme"], one["label"]) for one in made["rows"]] == [
        ("none", "nothing to answer"),
        ("int8", "TIS"), ("int8", "ACR"), ("int8", "UAQ"),
        ("int4", "TIS"), ("int4", "ACR"), ("int4", "UAQ"),
    ]  # fmt: skip
    assert made["rows"][-1] == {
        "scheme": "int4", "family": "Shape the weights", "label": "UAQ", "runs": 1,
        "kl_mean": 0.2, "rho_max": 4.0, "code_flip_rate": 0.01, "update_passed": 0.75,
        "step_seconds": 2.0, "update_passed_std": 0.0625, "reward": 0.5, "routes_differ": 0.004,
    }  # fmt: skip
    assert made["rows"][1]["runs"] == 0 and made["rows"][1]["kl_mean"] is None

    # Seconds of runs made alone, in another folder of the study, take the place of these.
    times = {"name": "study", "recipe": {"train": {"steps": 9}}}
    times["environment"] = MACHINE | {"load_before": 0.04}
    groups = {"none,none": 0.5, "uaq,int4": 0.75}
    times["groups"] = {name: {"step_seconds": {"mean": s}} for name, s in groups.items()}
    alone = record(told, ELSEWHERE, times)
    assert [one["step_seconds"] for one in alone["rows"] if one["runs"]] == [0.5, 0.75]
    del times["groups"]["uaq,int4"]
    with pytest.raises(ConfigError, match="--times: no run of uaq,int4 is done among those of stu"):
        record(told, ELSEWHERE, times)
