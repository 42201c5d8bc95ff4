"""``qurl bench rollout`` against a real engine that it starts."""

from benchmarks.harness import read
from tests.support.runs import qurl


def test_an_engine_that_it_starts_is_published_to_in_the_middle_of_its_load(tmp_path):
    load = ["--model", "tiny", "--prompts", "3", "4", "--samples", "2", "--mean", "600"]
    load += ["--max", "2400", "--schemes", "int8", "--repeats", "2", "--publish", "2"]
    done = qurl("bench", "rollout", *load, "--out", tmp_path)
    assert "tokens/s" in done.stdout
    case, larger = read(tmp_path / "rollout.json").cases
    assert case.reasons == larger.reasons == []
    assert (case.keys["tokens"], larger.keys["tokens"]) == (6 * 600, 8 * 600)
    assert larger.name == "embedded int8, 8 responses"
    assert case.figure("paused to publish").median > 0
    assert len(case.figure("tokens/s").repeats) == 2
    assert case.notes["identity"]["scheme"] == "int8"
