import argparse
from pathlib import Path

import pytest

from qurl_megatron.bench import versions
from qurl_megatron.bench.repeats import Repeats
from qurl_megatron.bench.scale import case_of, row
from qurl_megatron.bench.versions import case_of as version_case
from qurl_megatron.errors import ConfigError
from qurl_megatron.training.state import RECIPE

ROOT = Path(__file__).parents[2]


def test_seconds_of_a_part_are_those_of_the_whole_step_and_every_round_counts():
    rounds = [
        {"parse": row((8.0, 4.0), (2.0, seconds), 0.25, 8, json_bytes=7)} for seconds in (1.0, 1.5)
    ]
    case = case_of("parse", "ours", Repeats([9.0, 9.0], rounds, [0.01, 0.01]), factor=8)
    work = case.figure("work")
    assert (work.repeats, work.limit) == ([8.0, 12.0], 2.0)
    assert case.figure("seconds").repeats == [16.0, 16.0] and case.notes == {"json_bytes": 7}


def test_a_served_version_stands_beside_the_control():
    case = version_case(3, [1e-7, 3e-7], [0.1, 0.3])
    assert case.figure("mean difference").median == 2e-7
    assert case.figure("largest difference").median == 3e-7
    assert case.notes["against_the_version_before"] == {"mean": 0.2, "max": 0.3}
    assert version_case(1, [1e-7], []).notes["against_the_version_before"] is None


def test_versions_whose_codes_were_drawn_are_not_compared_with_rounded_ones(tmp_path):
    recipe = (ROOT / "launch/recipes/quickstart.toml").read_text()
    drawn = recipe.replace("uaq_scale = 1.5", 'uaq_scale = 1.5\nrounding = "stochastic"')
    (tmp_path / RECIPE).write_text(drawn)
    with pytest.raises(ConfigError, match="quant.rounding=stochastic.*qurl rescore"):
        versions.run(argparse.Namespace(run_dir=tmp_path, responses=4))
