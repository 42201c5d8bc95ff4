"""docs/mismatch.md: its tables are those of the records, and it leaves no answer out."""

import json
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from benchmarks import mismatch_page
from benchmarks.mismatch_page import (
    BEGIN,
    END,
    LOSS,
    PAGE,
    kept,
    page,
    plus_minus,
    record,
    rendered,
)
from qurl_megatron.algo.objective import OBJECTIVES
from qurl_megatron.config import load
from qurl_megatron.config.sections import QuantConfig, TrainConfig
from qurl_megatron.evaluation.plan import read_study
from qurl_megatron.evaluation.study_results import read_results, run_dir, to_json
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
schemes = false
[methods.tis]
label = "TIS"
overrides = ["algo.objective=tis"]
[methods.acr]
label = "ACR"
[methods.uaq]
label = "UAQ"
overrides = ["quant.uaq_scale=1.5"]
"""


def row(scheme: str, family: str, label: str, **measured: float) -> dict:
    numbers = ("kl_mean", "rho_max", "code_flip_rate", "update_passed", "step_seconds")
    numbers += ("update_passed_std",)
    runs = int(bool(measured))
    found = {"scheme": scheme, "family": family, "label": label, "runs": runs}
    return found | dict.fromkeys(numbers) | measured


def passed(mean: float, std: float) -> dict:
    return {"kl_mean": 3e-5, "update_passed": mean, "update_passed_std": std}


def hand_made(*rows: dict) -> dict:
    about = {"title": "A model", "steps": 3, "prompts": 4, "responses": 2, "tokens": 32}
    about["timed"] = None
    return about | MACHINE | {"measured_there": True, "rows": list(rows)}


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
def test_the_page_and_its_studies_have_every_objective_and_a_rejection_at_int8(study):
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    made = read_study(STUDIES / f"{study}.toml")
    cells = [cell for cell in made.cells if cell.scheme == "int8"]
    configs = {cell.method: load(made.recipe, cell.overrides) for cell in cells}
    for name in OBJECTIVES:  # a method is called like its objective
        assert configs[name].algo.objective == name and not configs[name].correction.rejects
        assert f"`{name}`" in text
    assert configs["rejection"].correction.rejects and "`correction.reject_low`" in text


@pytest.mark.parametrize("study", ["mismatch_quickstart", "mismatch_smollm2"])
@pytest.mark.parametrize(
    "section, name, off",
    [(QuantConfig, "quant.rounding", "nearest"), (TrainConfig, "train.align", "none")],
)
def test_the_page_and_its_studies_have_every_rounding_and_alignment(study, section, name, off):
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    given = {*re.findall(r"`([^`]+)`", text)}
    methods = read_study(STUDIES / f"{study}.toml").methods.values()
    overrides = {override for method in methods for override in method.overrides}
    values = get_args(get_type_hints(section)[name.partition(".")[2]])
    assert off in values
    for value in {*values} - {off}:
        setting = f"{name}={value}"
        assert setting in overrides and {value, setting} & given


def test_a_record_has_a_row_for_each_method_and_scheme_of_the_table(root):
    measure(root, "none-none-seed-0", 1e-12)
    passed = {"quant/update_passed": 0.75, "quant/code_flip_rate": 0.01}
    measure(root, "uaq-int4-seed-0", 0.1, **passed)
    study = read_study(root / "study.toml")
    results = read_results(study, root / "out")
    made = record(to_json(study, results) | {"environment": MACHINE}, ELSEWHERE)
    assert (made["title"], made["cpu"], made["cores"], made["steps"]) == (
        "A model", "some CPU", 2, 3,
    )  # fmt: skip
    assert [(one["scheme"], one["label"]) for one in made["rows"]] == [
        ("none", "nothing to answer"),
        ("int8", "TIS"), ("int8", "ACR"), ("int8", "UAQ"),
        ("int4", "TIS"), ("int4", "ACR"), ("int4", "UAQ"),
    ]  # fmt: skip
    assert made["rows"][-1] == row(
        "int4", "Shape the weights", "UAQ",
        kl_mean=0.2, rho_max=4.0, code_flip_rate=0.01, update_passed=0.75, step_seconds=2.0,
        update_passed_std=0.0625,
    )  # fmt: skip
    assert made["rows"][1]["runs"] == 0 and made["rows"][1]["kl_mean"] is None


def test_corrections_of_the_loss_share_one_row_and_have_their_own_below():
    made = hand_made(
        row("none", "", "nothing to answer", kl_mean=1e-11, rho_max=1.0, step_seconds=2.0),
        row("int8", LOSS, "TIS", rho_max=1.2, step_seconds=2.0, **passed(1.0092, 0.0021)),
        row("int8", LOSS, "ACR", rho_max=1.25, step_seconds=2.5, **passed(0.9921, 0.067)),
        row("int8", "Shape the weights", "UAQ", kl_mean=4e-5, rho_max=1.2, code_flip_rate=0.002),
        row("int8", "Align the forward", "weights"),
    )
    lines = rendered({"mismatch_x.json": made}).splitlines()
    assert lines[0] == "### A model"
    assert lines[2] == (
        "3 steps of 4 prompts x 2 responses of up to 32 tokens; some CPU, 2 cores; "
        "[mismatch_x.json](results/mismatch_x.json). – in a whole row: not run. Seconds are of the "
        "same runs, beside which other work may have run."
    )
    assert lines[4:] == [
        "| Rollouts | Setting | KL | Largest ρ | Flips | Update passed | Step, s |",
        "|---|---|---:|---:|---:|---:|---:|",
        "| unquantized | nothing to answer | 10⁻¹¹ | 1 | – | – | 2 |",
        "| INT8 | Correct the loss: all 2 | 3·10⁻⁵ | 1.20 to 1.25 | – | 0.99 to 1.01 ± 0.07 "
        "| 2 to 2.50 |",
        "| INT8 | Shape the weights: UAQ | 4·10⁻⁵ | 1.20 | 0.2 % | – | – |",
        "| INT8 | Align the forward: weights | – | – | – | – | – |",
        "",
        "Correct the loss, one by one:",
        "",
        "| Rollouts | Setting | KL | Largest ρ | Flips | Update passed | Step, s |",
        "|---|---|---:|---:|---:|---:|---:|",
        "| INT8 | TIS | 3·10⁻⁵ | 1.20 | – | 1.009 ± 0.002 | 2 |",
        "| INT8 | ACR | 3·10⁻⁵ | 1.25 | – | 0.99 ± 0.07 | 2.50 |",
    ]


def test_a_mean_is_not_rounded_further_than_its_spread_allows():
    assert plus_minus(0.5282, 0.5282, 1.0776) == "0.5 ± 1.1"
    assert plus_minus(0.98, 1.02, 0.067) == "0.98 to 1.02 ± 0.07"


def timed(root: Path, **seconds: float) -> dict:
    """What another folder of the study tells: as many steps as it likes, and only their seconds."""
    recipe = {"train": {"steps": 9}}
    groups = {f"{name},int8": {"step_seconds": {"mean": s}} for name, s in seconds.items()}
    told = {"name": "study", "recipe": recipe, "groups": groups}
    return told | {"environment": MACHINE | {"load_before": 0.04}}


def test_seconds_of_a_step_are_those_of_runs_made_alone_where_there_are_some(root):
    measure(root, "tis-int8-seed-0", 0.1)
    measure(root, "acr-int8-seed-0", 0.2)
    study = read_study(root / "study.toml")
    told = to_json(study, read_results(study, root / "out"))
    made = record(told | {"environment": MACHINE}, ELSEWHERE, timed(root, tis=0.5, acr=0.75))
    found = {one["label"]: one for one in made["rows"] if one["runs"]}
    assert [found[label]["step_seconds"] for label in ("TIS", "ACR")] == [0.5, 0.75]
    assert [found[label]["kl_mean"] for label in ("TIS", "ACR")] == [0.2, 0.4]
    assert (
        "Seconds are of runs of 9 steps made one after another, alone (some CPU, 2 cores; load of "
        "0.04 before)."
    ) in rendered({"mismatch_x.json": made})

    with pytest.raises(ConfigError) as error:
        record(told, ELSEWHERE, timed(root, tis=0.5))
    assert str(error.value) == (
        "--times: no run of acr,int8 is done among those of study; run them all, with qurl study, "
        "or leave --times out"
    )


def test_only_the_text_between_the_marks_is_written_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mismatch_page, "DOCS", tmp_path)
    monkeypatch.setattr(mismatch_page, "PAGE", tmp_path / "mismatch.md")
    monkeypatch.setattr(mismatch_page, "RESULTS", tmp_path)
    (tmp_path / "mismatch.md").write_text(f"# Words\n\n{BEGIN}old\n{END}\nMore words\n")
    out = tmp_path / "runs/short"
    out.mkdir(parents=True)
    told = {
        "study": "Tiny", "name": "mismatch_tiny", "version": "1", "groups": {}, "methods": {},
        "environment": MACHINE,
        "recipe": {
            "train": {"steps": 3}, "data": {"prompts_per_step": 4},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 32},
        },
    }  # fmt: skip
    (out / "study.json").write_text(json.dumps(told))
    assert mismatch_page.main([str(out)]) == 0
    text = (tmp_path / "mismatch.md").read_text()
    assert text.startswith(f"# Words\n\n{BEGIN}\n### Tiny\n\n3 steps")
    assert text.endswith(f"\n{END}\nMore words\n") and "old" not in text
    assert json.loads((tmp_path / "mismatch_tiny.json").read_text())["rows"] == []
    assert text == page(text, rendered(kept()))

    (tmp_path / "mismatch.md").write_text("# Words\n")
    assert mismatch_page.main([]) == 2
    assert "lacks the lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    "told, message",
    [
        (None, "study.json is missing"),
        ({"name": "tiny", "groups": {}}, "only those named like mismatch_*"),
        ({"name": "mismatch_tiny", "groups": {"acr,int8": {}}}, "lacks update_passed_std"),
    ],
)
def test_a_folder_that_is_no_study_of_this_is_named(told, message, tmp_path, capsys):
    if told is not None:
        (tmp_path / "study.json").write_text(json.dumps(told))
    assert mismatch_page.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
