"""``make gpu-hour`` rehearsed on an emulated GPU, and its way with parts that fail."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks.gpu_hour import Hour
from benchmarks.gpu_hour_parts import PARTS, Part
from tests.emulated.conftest import ROOT


@pytest.mark.timeout(1800)  # a minute and a half of work, on whatever the machine has left
def test_every_part_is_rehearsed_or_says_why_not(gpus, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_hour", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for part in PARTS:
        record = json.loads((tmp_path / f"{part.name}.json").read_text())
        assert record["state"] == ("rehearsed" if part.rehearsal else "not rehearsed"), record
        assert bool(record["reason"]) == (not part.rehearsal) == bool(part.unrehearsed)
        assert record["versions"]["trainer"]["torch"] and record["versions"]["differ"]
        if record["state"] == "rehearsed" and part.name != "quickstart":
            assert record["cases"] and all(case["figures"] for case in record["cases"])
    specs = json.loads((tmp_path / "transformer-engine.json").read_text())["cases"]
    assert [case["notes"]["resumes bit for bit"] for case in specs] == [True, True]
    assert not any(case["reasons"] for case in specs)  # no loss is far from the local one
    assert "tiny, 4 responses: tokens/s bf16" in done.stdout


def test_a_part_that_fails_stops_no_other_and_what_is_done_is_not_done_again(tmp_path):
    says = 'python -c \'print(open("{out}/../count", "a").write("x"))\''
    parts = [
        Part("fails", ["python -c 'raise SystemExit(\"qurl: no room\")'", says], 60),
        Part("hangs", ["python -c 'import time; time.sleep(600)'"], 1),
        Part("lacks", [says], 60, needs=["sglang", "no_such_module"]),
        Part("works", [says], 60),
        Part("long", [says], 10**9),
    ]
    hour = Hour(tmp_path, sglang="", env={}, rehearsal=False, facts={"commit": "abc"})
    for _ in range(2):
        hour.go(parts, until=time.monotonic() + 10_000)
    records = {part.name: hour.record(part.name) for part in parts}
    assert {name: record.get("state") for name, record in records.items()} == {
        **{"fails": "failed", "hangs": "out of time", "lacks": "not run", "works": "done"},
        "long": None,  # it may take longer than there is time
    }
    assert records["fails"]["reason"] == "code 1: qurl: no room"
    assert records["hangs"]["reason"] == "over 1 s; it said: nothing"
    assert records["lacks"]["reason"] == "sglang and no_such_module: not installed"
    assert (tmp_path / "count").read_text() == "x"
