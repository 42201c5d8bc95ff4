"""A study: from its file to cells, from cells to runs, from runs to tables and pictures."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from qurl_megatron.config import load, to_toml
from qurl_megatron.data.questions import held_out_questions
from qurl_megatron.evaluation import pictures, study
from qurl_megatron.evaluation.pictures import band
from qurl_megatron.evaluation.study import next_task, run
from qurl_megatron.evaluation.study_plan import read_study
from qurl_megatron.evaluation.study_results import (
    WINDOW,
    Result,
    collapse_step,
    groups,
    page,
    read_result,
    row,
    spread,
    table,
    to_json,
)
from qurl_megatron.kit.disk import claimed
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.metrics import History
from qurl_megatron.observe.sinks import Record
from tests.support.waiting import PATIENCE_S, wait_until

FAKE = (sys.executable, "-m", "tests.support.study_fake_train")
SHIPPED = sorted((Path(__file__).parents[2] / "launch/studies").glob("*.toml"))

RECIPE = """
[model]
path = "{root}/model"
[warmstart]
steps = 1
[data]
task = "chain_sum"
[train]
eval_prompts = 4
"""
STUDY = """
recipe = "recipe.toml"
overrides = ["train.steps=3", "quant.uaq_scale=1.0"]
schemes = ["int8", "int4"]
seeds = [0, 1]
[methods.bf16]
label = "BF16 RL"
overrides = ["algo.objective=proximal"]
schemes = ["none"]
[methods.acr]
overrides = ["quant.uaq_scale=1.5"]
"""
CELLS = [
    "bf16-none-seed-0", "acr-int8-seed-0", "acr-int4-seed-0",
    "bf16-none-seed-1", "acr-int8-seed-1", "acr-int4-seed-1",
]  # fmt: skip


@pytest.fixture
def drawing_root(tmp_path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(root=tmp_path))
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


@pytest.fixture
def root(drawing_root, monkeypatch) -> Path:
    """The same without pictures, which take a second each."""
    monkeypatch.setattr(pictures, "pictures", lambda _groups: {})
    return drawing_root


def qurl_study(root: Path, **arguments) -> int:
    usual = dict(study=root / "study.toml", out=root / "out", jobs=1, only="*", status=False)
    return run(Namespace(**{**usual, "overrides": (), **arguments}), FAKE)


def results_of(root: Path) -> list[Result]:
    return [read_result(cell, root / "out") for cell in read_study(root / "study.toml").cells]


def calls(root: Path) -> list[dict]:
    """How the fake was called, in the order of its starts."""
    return [json.loads(line) for line in (root / "calls.jsonl").read_text().splitlines()]


def reasons(root: Path) -> dict[str, str]:
    """Why cells have failed, by name."""
    return {result.cell.name: result.reason for result in results_of(root) if result.reason}


def behave(root: Path, **orders: dict) -> None:
    (root / "behaviour.json").write_text(json.dumps(orders))


def test_every_method_runs_under_every_scheme_and_seed_and_an_unquantized_one_once(root):
    cells = read_study(root / "study.toml").cells
    assert [cell.name for cell in cells] == CELLS
    cell = cells[1]
    # The study's own, then the scheme, then the method's: the later one wins.
    assert cell.overrides == (
        "train.steps=3", "quant.uaq_scale=1.0", "quant.scheme=int8", "quant.uaq_scale=1.5",
        "train.seed=0",
    )  # fmt: skip
    assert (cell.steps, cell.config.quant.uaq_scale) == (3, 1.5)
    assert cells[0].config.quant.scheme == "none"
    # Those of the command are stronger than the study's, and weaker than a method's.
    given = ("train.steps=7", "quant.uaq_scale=1.25")
    cells = read_study(root / "study.toml", given).cells
    assert {cell.steps for cell in cells} == {7}
    assert [cell.config.quant.uaq_scale for cell in cells[:2]] == [1.25, 1.5]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("recipe =", "recpie =", "unknown key recpie; did you mean recipe?"),
        ("label =", "lable =", "unknown key methods.bf16.lable; did you mean methods.bf16.label?"),
        ('"algo.obj', '"algo.bj', "methods.bf16: unknown key algo.bjective; did you mean"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "seeds must be different values"),
        ('schemes = ["none"]', "schemes = []", "methods.bf16.schemes is empty"),
        ('schemes = ["none"]', "seeds = []", "methods.bf16.seeds is empty"),
        ("[methods.acr]", '[methods."a,b"]', "methods.a,b: a method's name is of letters"),
        ("proximal", 'proximal", "quant.scheme=int8', "set quant.scheme=int8 where the study sets"),
        ('"recipe.toml"', '"other.toml"', "recipe other.toml is neither beside"),
    ],
)
def test_mistakes_are_found_before_the_first_run(root, old, new, message):
    assert old in STUDY
    (root / "study.toml").write_text(STUDY.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        qurl_study(root)
    assert message in str(error.value) and "\n" not in str(error.value)
    (root / "study.toml").write_text(STUDY)
    with pytest.raises(ConfigError, match="named like bf16-none-seed-0"):
        qurl_study(root, only="grpo*")
    assert not (root / "calls.jsonl").exists()


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_study_is_valid_and_has_updates_that_tell_acr_from_tis(file):
    study = read_study(file)
    assert study.cells
    assert study.resolved()["algo"]["minibatches"] > 1


@pytest.mark.parametrize(
    ("rewards", "first"),
    [
        # Means over five, from step 15 on: .8 .64 .48 .32 ...; the first below .4 is at step 18.
        ([0.8] * 6 + [0.0] * 6, 18),
        ([0.8] * 6 + [0.0] * 6 + [0.8, 0.0], 18),  # one good reward of ten does not end that
        ([0.8] * 6 + [0.0] * 6 + [0.5] * 5, None),  # it recovers
        # It recovers, and falls again: the second time counts. Means from step 27: .48 .36 .24.
        ([0.8] * 6 + [0.0] * 6 + [0.6] * 5 + [0.0] * 4, 28),
        ([0.8] * 9 + [0.0], None),  # one bad batch at the end
        ([0.0] * 9, None),
        ([-0.5] * 5 + [-1.0] * 5, None),
        ([], None),
        ([0.1] * 5 + [0.8] * 20, None),
    ],
)
def test_a_collapse_is_a_mean_reward_below_half_of_its_best_until_the_end(rewards, first):
    assert WINDOW == 5
    assert collapse_step(np.arange(10, 10 + len(rewards)), np.array(rewards)) == first


def test_the_spread_of_seeds_is_the_samples_own():
    found = spread([1.0, 2.0, None, 6.0])
    # (4 + 1 + 9) / 2 = 7
    assert (found["mean"], found["low"], found["high"]) == (3.0, 1.0, 6.0)
    assert found["std"] == pytest.approx(math.sqrt(7))
    assert spread([5.0])["std"] is None
    assert spread([None]) is None


def test_a_runs_finals_are_the_last_evaluation_and_the_last_tenth_of_the_noisy_ones():
    records = []
    for step in range(1, 21):
        metrics = {
            "rollout/kl_k3": 0.001 * step,
            "quant/update_passed": 0.9 if step % 2 else 1.1,
            "time/step": {1: 30.0, 2: 5.0}.get(step, 2.0),
        }
        records.append(Record(step, 0.0, metrics))
    found = Result(None, History(records)).finals
    expected = {"kl": 0.0195, "kl_largest": 0.02, "kl_mean": 0.0105, "update_passed": 1.0}
    expected |= {"update_passed_std": 0.1 * math.sqrt(20 / 19)}
    expected |= {"step_seconds": 2.0, "seconds": 71.0}  # the first step counts once
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["code_flip_rate"] is None  # unquantized runs have no codes
    assert Result(None, History(records[:1])).finals["update_passed_std"] is None


def test_a_band_takes_at_each_step_the_seeds_that_have_it():
    first = np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0])
    second = np.array([1, 3]), np.array([3.0, 4.0])
    steps, mean, low, high = band([first, second])
    assert steps.tolist() == [1, 2, 3]
    assert mean.tolist() == [2.0, 2.0, 3.5]
    assert low.tolist() == [1.0, 2.0, 3.0] and high.tolist() == [3.0, 2.0, 4.0]


def test_a_study_runs_its_cells_and_leaves_tables_numbers_and_pictures(drawing_root, capsys):
    root = drawing_root
    assert qurl_study(root) == 0
    assert [call["cell"] for call in calls(root)] == CELLS
    assert "acr-int4-seed-1: done" in capsys.readouterr().out
    out = root / "out"
    text = (out / "study.md").read_text()
    assert "6 of 6 runs are done. study.json has" in text
    pictures = re.findall(r"!\[[^]]*\]\((.*)\)", text)
    assert sorted(pictures) == [
        "training_int4.png", "training_int8.png", "updates_int4.png", "updates_int8.png",
    ]  # fmt: skip
    for name in pictures:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    told = json.loads((out / "study.json").read_text())
    assert told["recipe"]["train"]["steps"] == 3
    acr = told["groups"]["acr,int4"]
    assert (acr["planned"], acr["done"]) == (2, 2)
    assert acr["accuracy"]["mean"] == pytest.approx(0.505)
    assert acr["accuracy"]["values"] == [0.5, 0.51]
    run = told["runs"]["acr-int4-seed-1"]
    assert run["kl_largest"] == 0.03
    assert run["curves"] == {
        "reward/mean": {"steps": [1, 2, 3], "values": [0.1, 0.2, 0.3]},  # 0.30000000000000004
        "eval/accuracy": {"steps": [3], "values": [0.51]},
    }
    assert '"steps": [ 1, 2, 3 ]' in (out / "study.json").read_text()

    made = groups(read_study(root / "study.toml"), results_of(root))
    lines = []
    for line in table(made[::2]).splitlines():
        lines.append([cell.strip() for cell in line.split("|")[1:-1]])
    heads, rule, *rows = lines
    assert heads == [  # without columns that nobody has measured
        "Method", "Rollouts", "Accuracy, %", "Best, %", "Collapsed", "KL", "Max ρ", "Clipped",
        "Code flips", "Update, Eq. 13", "Error, Eq. 14", "Step, s", "Runs",
    ]  # fmt: skip
    assert not rule[0].endswith(":") and all(cell.endswith("-:") for cell in rule[2:])
    same = ["0 of 2", "0.0200", "6", "25.0 %", "12.5 %", "2·10⁻⁶", "0.00100", "2.50", "2"]
    assert rows == [
        ["BF16 RL", "BF16", *["75.5 ± 0.7"] * 2, *same],
        ["acr", "INT4, simulated", *["50.5 ± 0.7"] * 2, *same],
    ]


def test_a_method_may_have_seeds_of_its_own(root):
    (root / "study.toml").write_text(f"{STUDY}seeds = [1, 2]\nschemes = ['int4']\n")
    names = [cell.name for cell in read_study(root / "study.toml").cells]
    assert names == [CELLS[0], CELLS[3], CELLS[5], "acr-int4-seed-2"]


def test_finished_runs_are_left_alone_whoever_made_them(root, capsys):
    """A plain ``qurl train ... train.run_dir=OUT/runs/CELL`` counts."""
    for name in CELLS[:2]:
        given = ["train.steps=3", "train.seed=0", f"train.run_dir={root / 'out/runs' / name}"]
        subprocess.run([*FAKE, "train", "recipe", *given], check=True)
    for _ in range(2):
        assert qurl_study(root, only="*seed-0") == 0
        assert [call["cell"] for call in calls(root)] == CELLS[:3]
    assert "2 of 3 runs are done already" in capsys.readouterr().out
    assert qurl_study(root, status=True, only="*seed-?") == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == [CELLS[0], "done", "3/3", "reward", "0.300", "accuracy", "75.0", "%"]
    assert shown[3] == [CELLS[3], "waiting", "0/3"]


def test_a_longer_study_goes_on_with_its_runs_and_a_shorter_one_takes_their_beginning(root):
    longer = STUDY.replace("steps=3", "steps=5")
    for text in (STUDY, longer):
        (root / "study.toml").write_text(text)
        assert qurl_study(root, only="bf16*0") == 0
    assert [call["first"] for call in calls(root)] == [1, 4]
    for text, rho in ((longer, 10.0), (STUDY, 6.0)):
        (root / "study.toml").write_text(text)
        result = results_of(root)[0]
        assert result.state == "done" and result.finals["rho_max"] == rho


def test_a_failed_run_is_told_with_its_reason_others_go_on_and_it_is_tried_again(root, capsys):
    behave(root, **{CELLS[1]: {"fail_at": 2}})
    assert qurl_study(root) == 1
    assert len(calls(root)) == 6
    failed = f"{CELLS[1]}: failed after step 1: qurl: the disk is full"
    assert failed in capsys.readouterr().out
    assert qurl_study(root, status=True, only=CELLS[1]) == 0
    assert capsys.readouterr().out.split()[1:5] == ["failed", "1/3", "reward", "0.100"]
    study = read_study(root / "study.toml")
    results = results_of(root)
    assert reasons(root) == {CELLS[1]: "qurl: the disk is full"}
    text = page(study, results, groups(study, results), [])
    assert "5 of 6 runs are done, 1 failed" in text
    assert f"- `{CELLS[1]}`, after step 1: qurl: the disk is full" in text
    acr = next(group for group in groups(study, results) if group.scheme == "int8")
    assert row(acr)["Runs"] == "1 of 2" and row(acr)["Accuracy, %"] == "51.0"
    assert to_json(study, results)["groups"]["acr,int8"]["done"] == 1
    behave(root)
    assert qurl_study(root) == 0
    assert calls(root)[-1]["cell"] == CELLS[1] and calls(root)[-1]["first"] == 2  # resumed
    assert reasons(root) == {}


def test_a_run_that_has_failed_before_the_study_looks_is_told_with_its_reason(root, monkeypatch):
    start = subprocess.Popen

    def start_and_wait(*arguments, **options) -> subprocess.Popen:
        popen = start(*arguments, **options)
        popen.wait()
        return popen

    monkeypatch.setattr(subprocess, "Popen", start_and_wait)
    behave(root, **{CELLS[0]: {"fail_at": 1}})
    assert qurl_study(root, only=CELLS[0]) == 1
    assert reasons(root) == {CELLS[0]: "qurl: the disk is full"}


@pytest.mark.parametrize(
    "override, told",
    [
        ("optimizer.lr=1.0", "holds a run with other settings (optimizer.lr 1.0 -> 1e-06)"),
        ("train.seed=9", "holds another run (train.seed 9 -> 0)"),
        ("parallel.tensor=2", ""),
    ],
)
def test_a_folder_of_another_run_fails_instead_of_counting(root, override, told):
    """Also where ``qurl train`` would go on: a run with other settings is not this cell."""
    behave(root, **{CELLS[0]: {"checkpoint": True, "right": 1.0}})
    assert qurl_study(root, only=CELLS[0]) == 0
    cell = read_study(root / "study.toml").cells[0]
    other = load(root / "recipe.toml", [*cell.overrides, override])
    (root / "out/runs" / CELLS[0] / "config.toml").write_text(to_toml(other))
    result = results_of(root)[0]
    assert result.state == ("failed" if told else "done") and told in result.reason


def test_runs_at_once_overlap_share_the_cores_and_wait_for_the_one_that_makes_the_model(
    root, monkeypatch
):
    """The fake fails where it finds a model that another has made meanwhile."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    behave(root, **{name: {"meet": 3} for name in CELLS[1:3]})  # one alone would fail
    assert qurl_study(root, jobs=2, only="*seed-0") == 0
    assert [call["makes_model"] for call in calls(root)] == [True, False, False]
    assert {call["omp"] for call in calls(root)} == {str(max(1, os.cpu_count() // 2))}


def test_seeds_may_be_over_models_each_of_which_is_made_once_and_shared(root):
    """The fake fails where it finds a model that another has made meanwhile."""
    (root / "study.toml").write_text(f"warmstart_seeds = [3, 7]\n{STUDY}")
    study = read_study(root / "study.toml")
    expected = []
    for seed in (0, 1):
        for warm in (3, 7):
            for start in ("bf16-none", "acr-int8", "acr-int4"):
                expected.append(f"{start}-warm-{warm}-seed-{seed}")
    assert [cell.name for cell in study.cells] == expected
    config = study.cells[4].config
    assert config.model.path == f"{root}/model-warm-7"
    assert (config.warmstart.seed, config.train.seed) == (7, 0)

    assert qurl_study(root, jobs=2) == 0
    makers = {call["cell"] for call in calls(root) if call["makes_model"]}
    assert makers == {"bf16-none-warm-3-seed-0", "bf16-none-warm-7-seed-0"}
    assert {path.name for path in root.glob("model*")} == {"model-warm-3", "model-warm-7"}
    told = json.loads((root / "out/study.json").read_text())
    # A group's runs are of all models; what a run is paired by stands beside its numbers.
    assert told["groups"]["acr,int4"]["accuracy"]["values"] == [0.5, 0.5, 0.51, 0.51]
    run = told["runs"]["acr-int4-warm-7-seed-1"]
    place = ("method", "scheme", "warmstart_seed", "seed")
    assert [run[key] for key in place] == ["acr", "int4", 7, 1]

    (root / "study.toml").write_text(
        f"warmstart_seeds = [3, 7]\n{STUDY}".replace(
            "uaq_scale=1.0", 'uaq_scale=1", "warmstart.steps=0'
        )
    )
    with pytest.raises(ConfigError, match="warmstart_seeds needs warmstart.steps above 0"):
        read_study(root / "study.toml")


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_runs_save_and_the_study_goes_on_later(root, number):
    (root / "model").mkdir()
    behave(root, **{name: {"hold_at": 1} for name in CELLS[:2]})
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.unit.test_study import qurl_study\n"
        f"sys.exit(qurl_study(Path({str(root)!r}), jobs=2))"
    )
    study = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    runs = root / "out/runs"
    wait_until(lambda: len(list(runs.glob("*/metrics.jsonl"))) == 2 or study.poll() is not None)
    listed = results_of(root)
    assert [result.state for result in listed[:3]] == ["started", "started", "waiting"]
    study.send_signal(number)
    output, _ = study.communicate(timeout=PATIENCE_S)
    assert study.returncode == 128 + number, output
    assert len(calls(root)) == 2 and reasons(root) == {}
    for name in CELLS[:2]:
        assert (root / f"out/logs/{name}.log").read_text() == "saved\n"
    behave(root)
    assert qurl_study(root) == 0
    assert [call["first"] for call in calls(root)[2:4]] == [2, 2]  # not from the beginning


def test_one_study_works_in_a_folder_and_others_may_look(root):
    with claimed(root / "out", "a study"):
        with pytest.raises(ConfigError, match="a study is at work in .*out; wait for it"):
            qurl_study(root)
        assert qurl_study(root, status=True) == 0


def test_the_trained_policy_is_evaluated_unquantized_on_the_held_out_questions(root, capsys):
    orders = {"checkpoint": True}
    behave(root, **{CELLS[1]: orders | {"right": 0.875}, CELLS[4]: orders})
    assert qurl_study(root, only="acr-int8*") == 1
    called = [(call["cell"], "asked" in call) for call in calls(root)]
    assert called == [(CELLS[1], False), (CELLS[1], True), (CELLS[4], False), (CELLS[4], True)]
    evaluation = calls(root)[1]
    keys = ["data.prompt_key=prompt", "data.answer_key=answer"]  # whatever the recipe's are
    assert evaluation["given"] == ["--k", "1", *keys, "quant.scheme=none"]
    held_out = held_out_questions(load(root / "recipe.toml").data, 4)
    rows = [{**q.metadata, "prompt": q.text, "answer": q.answer} for q in held_out]
    assert evaluation["asked"] == rows
    failed = f"{CELLS[4]}: failed after step 3: qurl: no engine could be started"
    assert failed in capsys.readouterr().out

    study = read_study(root / "study.toml")
    results = results_of(root)
    group = next(group for group in groups(study, results) if group.name == "acr")
    assert row(group)["Trained policy, %"] == "87.5"
    assert row(group)["Runs"] == "2"  # one of them not evaluated
    assert f"- `{CELLS[4]}`, after step 3: qurl: no engine" in page(study, results, [group], [])
    runs = to_json(study, results)["runs"]
    assert [runs[name]["accuracy_trained"] for name in (CELLS[1], CELLS[4])] == [0.875, None]

    behave(root, **{CELLS[4]: {"right": 0.5}})  # it is asked again, not trained
    assert qurl_study(root, only="acr-int8*") == 0
    assert len(calls(root)) == 5 and "asked" in calls(root)[-1]
    assert reasons(root) == {}
    # A checkpoint of another step is not taken for the trained policy.
    metrics = root / "out/runs" / CELLS[1] / "metrics.jsonl"
    lines = metrics.read_text().replace('{"reward', '{"eval/accuracy": 0.5, "reward')
    metrics.write_text(lines)
    (root / "study.toml").write_text(STUDY.replace("steps=3", "steps=2"))
    study = read_study(root / "study.toml")
    assert results_of(root)[1].trained is None
    assert next_task(study.cells[1], root / "out") == ""


def test_the_trained_policy_may_be_asked_more_questions_than_a_run_asks_as_it_trains(root):
    behave(root, **{CELLS[0]: {"checkpoint": True, "right": 0.5}})
    assert qurl_study(root, only=CELLS[0]) == 0
    # Later, with more: the run is kept, and an accuracy on fewer questions does not count.
    (root / "study.toml").write_text(f"final_prompts = 9\n{STUDY}")
    behave(root, **{CELLS[0]: {"right": 0.75}})
    assert results_of(root)[0].trained is None
    assert qurl_study(root, only=CELLS[0]) == 0
    assert results_of(root)[0].trained == 0.75
    assert [len(call["asked"]) for call in calls(root) if "asked" in call] == [4, 9]
    # Or without any evaluation as it trains.
    given = ("train.eval_prompts=0",)
    cell = read_study(root / "study.toml", given).cells[0]
    assert (cell.config.train.eval_prompts, cell.final_questions) == (0, 9)


def test_a_study_that_asks_for_more_questions_than_there_are_does_not_begin(root):
    (root / "study.toml").write_text(f"final_prompts = 200\n{STUDY}")
    sums = "data.task_args={min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1}"
    with pytest.raises(ConfigError, match="^final_prompts=200: .* distinct held-out questions"):
        read_study(root / "study.toml", [sums])
    assert read_study(root / "study.toml").cells


@pytest.mark.parametrize("setting", ["model.path=other", "warmstart.seed=9"])
def test_a_method_cannot_name_the_model_that_warm_starts_name(root, setting):
    own = STUDY.replace("quant.uaq_scale=1.5", setting)
    (root / "study.toml").write_text(f"warmstart_seeds = [0]\n{own}")
    with pytest.raises(ConfigError, match="methods.acr.overrides: warmstart_seeds sets model.path"):
        read_study(root / "study.toml")
    (root / "study.toml").write_text(own)
    assert read_study(root / "study.toml").cells


def test_checkpoints_of_a_finished_run_are_deleted_where_the_study_says_so(root):
    (root / "study.toml").write_text(f"keep_checkpoints = false\n{STUDY}")
    checkpoints = root / "out/runs" / CELLS[0] / "checkpoints"
    behave(root, **{CELLS[0]: {"checkpoint": True}})
    assert qurl_study(root, only=CELLS[0]) == 1
    assert (checkpoints / "step_000003/weights").exists()  # not evaluated yet
    behave(root, **{CELLS[0]: {"right": 1.0}})
    for _ in range(2):  # done all the same
        assert qurl_study(root, only=CELLS[0]) == 0 and len(calls(root)) == 3
    assert not checkpoints.exists() and results_of(root)[0].trained == 1.0


def test_study_json_names_the_machine_of_the_runs_not_of_the_drawing(root, monkeypatch):
    def recorded(commit: str, only: str) -> dict:
        monkeypatch.setattr(study, "environment", lambda: {"commit": commit})
        assert qurl_study(root, only=only) == 0
        return json.loads((root / "out/study.json").read_text())["environment"]

    assert recorded("a", CELLS[0]) == {"commit": "a"}
    assert recorded("b", CELLS[0]) == {"commit": "a"}
    assert recorded("d", CELLS[1]) == {"commit": "d"}
