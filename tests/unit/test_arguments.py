"""Settings of the recipe stand anywhere on a command line."""

import pytest

from qurl_megatron.cli import _parser
from qurl_megatron.config.arguments import parse
from qurl_megatron.torchrun import command

GIVEN = ["train.steps=2", "quant.scheme=fp8"]


@pytest.mark.parametrize(
    "line",
    [
        "show R {0} --dry-run {1}",
        "show R --dry-run {0} {1}",
        "show --dry-run R {0} --config D {1}",
        "train R {0} --fork N {1}",
        "train --fork N R {0} {1}",
        "plan R --gpus 8 {0} --gpu h100 {1}",
        "study R --out O {0} --jobs 2 {1}",
    ],
)
def test_settings_stand_before_behind_and_among_the_options(line):
    arguments = parse(_parser(), line.format(*GIVEN).split())
    assert arguments.overrides == GIVEN
    assert str(getattr(arguments, "recipe", None) or arguments.study) == "R"


def test_the_words_of_a_batch_job_too():
    line = "slurm submit R {} --cluster C {}".format(*GIVEN).split()
    assert parse(_parser(), line).words == ["R", *GIVEN]


def test_launch_torchrun_too():
    line = "--nproc-per-node 2 R {} --nnodes 2 {}".format(*GIVEN).split()
    assert parse(command.parser(), line).overrides == GIVEN


@pytest.mark.parametrize(
    "line",
    ["show R --dryrun", "train R --frok N train.steps=2", "report RUN more", "serve M a.b=1"],
)
def test_what_no_command_knows_is_refused(line, capsys):
    with pytest.raises(SystemExit) as left:
        parse(_parser(), line.split())
    assert left.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
