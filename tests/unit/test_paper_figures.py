"""The commands for the paper's Figures 8 and 9; tests/integration has those of a real run."""

import json
from dataclasses import asdict

import pytest

from benchmarks import speedups, weight_changes
from qurl_megatron.bench.record import BenchRecord, Case, Figure


def record(folder, **rates: list[float]):
    """The rollout.json of a model with these tokens/s by scheme."""
    cases = []
    for scheme, repeats in rates.items():
        keys = {"model": "7B", "engine": "sglang", "scheme": scheme, "tensor": 2}
        keys |= {"prompts": 8, "samples": 4}
        speed = Figure(name="tokens/s", unit="1/s", better="higher", repeats=repeats)
        cases.append(Case(name=f"sglang {scheme}", keys=keys, figures=[speed]))
    document = BenchRecord(benchmark="rollout", command="", started="", environment={}, cases=cases)
    path = folder / "rollout.json"
    path.write_text(json.dumps(asdict(document)))
    return path


def test_a_speed_up_stands_under_its_model_and_load(tmp_path, capsys):
    path = record(tmp_path, bf16=[100.0, 200.0, 100.0], int8=[150.0, 280.0, 170.0])
    image = tmp_path / "speedups.png"
    assert speedups.main([str(path), "--out", str(image)]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == ["7B", "x", "2,", "sglang,", "32", "responses", "INT8", "1.50", "1.40", "1.70"]
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_record_without_bf16_is_refused_in_a_sentence(tmp_path, capsys):
    assert speedups.main([str(record(tmp_path, int8=[1.0]))]) == 2
    assert "measure with --schemes bf16 int8" in capsys.readouterr().err


def test_changes_are_drawn_and_kept(tmp_path, monkeypatch, capsys):
    change = weight_changes.Change(16, 32, update=2e-3, error=1e-2, flips=0.25)
    monkeypatch.setattr(weight_changes, "changes", lambda run_dir, scheme: [change])
    assert weight_changes.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == ["16", "to", "32", "0.00200", "0.0100", "0.200", "25.0", "%"]
    kept = json.loads((tmp_path / "out/weight_changes.json").read_text())
    assert kept == {"scheme": "int8", "changes": [asdict(change)]}
    assert (tmp_path / "out/weight_changes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("saved", [0, 1])
def test_a_run_with_fewer_than_two_checkpoints_is_refused(saved, tmp_path, capsys):
    for step in range(saved):
        folder = tmp_path / f"checkpoints/step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
    assert weight_changes.main([str(tmp_path)]) == 2
    words = "0 checkpoints" if not saved else "1 checkpoint,"
    assert words in (error := capsys.readouterr().err) and "checkpoint.every=16" in error
