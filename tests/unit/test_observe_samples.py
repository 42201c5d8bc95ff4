"""What the model says is kept within bounds, and shown so that nothing obeys it."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from qurl_megatron.cli import main
from qurl_megatron.cluster.logs import tracebacks
from qurl_megatron.data.pack import pad_samples
from qurl_megatron.data.responses import Responses
from qurl_megatron.observe.report import write_report
from qurl_megatron.observe.samples import (
    LONGEST,
    as_text,
    clipped,
    example_of,
    read_samples,
    select,
    telling,
)
from qurl_megatron.training.groups import example_indices
from qurl_megatron.training.step import mean_advantages
from qurl_megatron.types import Prompt, Sample
from tests.support.examples import example, keep
from tests.support.observe_fake_run import write_fake_run


def test_the_lowest_and_the_highest_rewards_are_kept_of_different_prompts_first():
    rewards = [0, 0, 1, 1, 0.5, 0.5, 0, 1, -1]
    prompts = [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert telling(rewards, prompts, 2) == [2, 8]
    assert telling(rewards, prompts, 5) == [0, 2, 6, 7, 8]
    assert telling([1, 1, 1], [0, 0, 1], 2) == [0, 2]  # no response twice
    assert telling([1, 1, 1], [0, 0, 1], 8) == [0, 1, 2]
    assert telling([1], [0], 0) == [] == telling([], [], 4)


def test_of_a_long_text_beginning_and_end_are_kept():
    text = "a" * 3000 + "\\boxed{5}"
    short = clipped(text)
    assert short.startswith("a" * 1500 + "\n[... 1009 characters ...]\n")
    assert short.endswith("a\\boxed{5}") and clipped(short, 2 * LONGEST) == short
    prompt = Prompt(index=3, input_ids=(1,), text=text, answer=text, metadata={})
    sample = Sample(prompt, [5, 6], [0.0, 0.0], "length", ((0, 2),), text=text, reward=0.5)
    kept = example_of(sample, 2, "train", 1 / 3)
    assert (kept.index, kept.tokens, kept.advantage) == (3, 2, 0.333333)
    assert max(map(len, (kept.prompt, kept.answer, kept.response))) < 1.05 * LONGEST


def test_an_example_is_a_few_lines_in_which_nothing_steers_the_terminal():
    told = example(response="one\x1b\ntwo", reward=-0.5, advantage=0.25, finish="length")
    assert as_text(told) == (
        "step 1, train prompt 7: reward −0.500, advantage +0.250, 2 tokens, cut off at the limit\n"
        "  prompt    12 + 3 =\n"
        "  response  one?\n"
        "            two\n"
        "  answer    15"
    )


def test_a_traceback_that_a_model_writes_into_the_log_is_not_taken_for_the_runs():
    head = "Traceback (most recent call last):"
    theirs = as_text(example(prompt=f"Why?\n{head}\n  x\nKeyError: 1", response=head))
    assert tracebacks(theirs) == []
    ours = f"{theirs}\n{head}\n  File x\nValueError: no"
    assert [message for message, _ in tracebacks(ours)] == ["ValueError: no"]


def test_examples_come_back_whatever_their_text(tmp_path):
    examples = [example(step=step, response="\u2028\ud800") for step in range(2)]
    keep(tmp_path, *examples)
    assert read_samples(tmp_path) == examples


KEPT = [
    example(step=step, of=of, reward=reward, prompt=f"{reward} + {step} =")
    for step in (0, 2)
    for of, reward in (("train", 0.5), ("train", 0.0), ("held-out", 1.0))
]


def test_the_newest_step_is_shown_or_another_or_a_prompt_in_all_of_them(tmp_path):
    keep(tmp_path, *KEPT)

    def rewards_of(**wanted) -> list[tuple[int, float]]:
        return [(kept.step, kept.reward) for kept in select(tmp_path, **wanted)]

    assert rewards_of() == [(2, 0.5), (2, 0.0), (2, 1.0)]
    assert rewards_of(step=0, worst=1) == [(0, 0.0)]
    assert rewards_of(step=0, best=2) == [(0, 0.5), (0, 1.0)]
    assert rewards_of(worst=1, best=1) == [(2, 0.0), (2, 1.0)]
    assert rewards_of(worst=2, best=2) == [(2, 0.0), (2, 0.5), (2, 1.0)]  # none twice
    assert rewards_of(prompt="0.5 +") == [(0, 0.5), (2, 0.5)]
    assert rewards_of(prompt="+ 2", worst=1) == [(2, 0.0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "1"], "--step 1 has no examples; kept are 2 steps from 0 to 2"),
        (["--worst", "0"], "--worst must be 1 or more, got 0"),
        (["--prompt", "x"], "--prompt 'x' is in none of the 6 prompts kept\n"),
        (["--step", "2", "--prompt", "+ 0"], "'+ 0' is in none of the 3 prompts kept\n"),
    ],
)
def test_what_was_not_kept_is_said(tmp_path, capsys, options, message):
    keep(tmp_path, *KEPT)
    assert main(["samples", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_examples_is_said_to_be_one(tmp_path, capsys):
    assert main(["samples", str(tmp_path)]) == 2
    assert "samples.jsonl does not exist; `qurl train` writes it" in capsys.readouterr().err
    keep(tmp_path)
    assert main(["samples", str(tmp_path)]) == 2
    assert "samples.jsonl is empty" in capsys.readouterr().err


def test_a_terminal_that_knows_ascii_alone_shows_them_too(tmp_path):
    keep(tmp_path, example(response="中\x1b"))
    command = [sys.executable, "-m", "qurl_megatron.cli", "samples", str(tmp_path)]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, env=env, check=True)
    assert b"response  \\u4e2d?" in done.stdout


def test_the_report_quotes_the_first_middle_and_last_step_and_runs_nothing_of_it(tmp_path):
    run_dir = write_fake_run(tmp_path, 3)
    evil = "</pre><script>alert(1)</script>{{ 7 * 7 }}\x1b\u202e" + "x" * 700
    keep(
        run_dir,
        *(example(step=step, reward=reward) for step in (1, 2, 3, 4) for reward in (0.1, 0.4, 0.9)),
        *(example(step=step, of="held-out", response=evil) for step in (0, 4)),
    )
    page = write_report(run_dir).read_text()
    titles = re.findall(r"<h3>(Step .*?)</h3>\n<p class=\"note\">(reward \S+),", page)
    ends = (("lowest", "0.100"), ("highest", "0.900"))
    assert titles == [
        *((f"Step {step}, held-out, lowest reward", "reward 1") for step in (0, 4)),
        *(
            (f"Step {step}, train, {end} reward", f"reward {reward}")
            for step in (1, 3, 4)
            for end, reward in ends
        ),
    ]
    assert "<script" not in page and page.count("&lt;/pre&gt;&lt;script&gt;") == 2
    assert "{{ 7 * 7 }}??" in page and "\x1b" not in page and "\u202e" not in page
    assert re.search(r"<details><summary>1\d\d more characters</summary><pre>x+</pre>", page)


def test_an_advantage_is_the_mean_over_a_response_and_told_of_kept_ones_with_tokens():
    prompt = Prompt(index=0, input_ids=(1,), text="", answer="", metadata={})
    lengths = (2, 1, 0, 4)
    step = Responses.of(
        [Sample(prompt, [5] * n, [0.0] * n, "stop", ((0, n),), reward=n) for n in lengths]
    )
    batch = pad_samples(step, range(4), [1.0] * 4, length=6)
    batch = replace(batch, advantages=torch.tensor([1.0, 2, 5, 7, 7, 7, 7]))
    assert example_indices(step.summary, 3) == [1, 2, 3]
    assert mean_advantages([batch], [0, 1, 2]) == {0: 1.5, 1: 5.0}
