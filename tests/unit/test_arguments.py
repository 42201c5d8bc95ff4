"""Settings of the recipe stand anywhere on a command line."""

import pytest

from qurl_megatron.cli import _parser
from qurl_megatron.config import load
from qurl_megatron.config.arguments import parse
from qurl_megatron.kit.errors import ConfigError

GIVEN = ["train.steps=2", "quant.scheme=fp8"]


@pytest.mark.parametrize(
    "line",
    [
        "show R {0} --dry-run {1}",
        "show R --dry-run {0} {1}",
        "train R {0} --fork N {1}",
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


def test_what_stands_behind_two_dashes_is_left_as_it_is():
    options = ["slurm", "submit", "--kind", "command", "--cluster", "C"]
    words = ["bench", "--dry_run", "--json"]
    assert parse(_parser(), [*options, "--", *words]).words == words


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trian R", "qurl: there is no command 'trian'; did you mean train?"),
        (
            "train --steps 3",
            "qurl train: there is no option --steps; a setting has no dashes: train.steps=3",
        ),
        ("show R --dryrun", "qurl show: there is no option --dryrun; did you mean --dry-run?"),
        ("report RUN more", "qurl: unexpected: more; `qurl report --help` says what it takes"),
        ("serve M a.b=1", "qurl: unexpected: a.b=1; `qurl serve --help` says what it takes"),
        ("serve M --scheme int9", "qurl serve: --scheme cannot be 'int9'; did you mean int8?"),
        ("train", "qurl train: missing: recipe; `qurl train --help` says what it takes"),
        ("bench stpe", "qurl bench: there is no benchmark 'stpe'; did you mean step?"),
        (
            "train R --quant.shceme=fp8",
            "qurl train: there is no option --quant.shceme; a setting has no dashes: "
            "quant.scheme=fp8",
        ),
        (
            "slurm render --kind command --cluster C diff --all",
            "qurl slurm render: there is no option --all; if it belongs to a --kind command, "
            "write `--` before that command",
        ),
    ],
)
def test_what_no_command_knows_is_refused_in_one_sentence(line, said, capsys):
    with pytest.raises(SystemExit) as left:
        parse(_parser(), line.split())
    assert left.value.code == 2
    assert capsys.readouterr().err == f"{said}\n"


def test_a_setting_without_its_section_is_guessed(tmp_path):
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(ConfigError, match=r"'lr=3' .*; did you mean optimizer.lr=3 or critic.lr=3"):
        load(tmp_path / "recipe.toml", ["lr=3"])
