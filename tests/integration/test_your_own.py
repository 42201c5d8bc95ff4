"""docs/your_own.md, from an empty folder to a model in plain transformers, as it stands there."""

import json
import os
import re
import subprocess
import sys

from tests.support.your_own_page import FILES, PAGE, blocks


def test_every_command_of_the_page_runs_from_an_empty_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    for name, text in zip(FILES, blocks("python", "toml"), strict=True):
        assert PAGE.index(f"`{name}`") < PAGE.index(text), f"{name} is named above its text"
        (tmp_path / name).write_text(text)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, runs in (("qurl", "-m qurl_megatron.cli"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {runs} "$@"\n')
        (commands / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    printed = {}
    for block in blocks("sh"):
        done = subprocess.run(
            ["sh", "-ec", block], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        printed[block.splitlines()[0]] = done.stdout
    trained, forked, looked, exported, asked, again = list(printed.values())[2:]
    assert "held-out" in trained and (tmp_path / "mine/run/report.html").is_file()
    assert "step 12 done" in forked and "step 14 done" in forked
    assert looked.count("reward ") >= 3 and (tmp_path / "mine/fp8/report.html").is_file()
    change = json.loads((tmp_path / "mine/run/eval/start_to_step_000012.json").read_text())
    assert change["benchmarks"]["held_out"]
    assert "held_out" in exported
    answers = r"mine/exported answers \d+\nmine/exported-int8 answers \d+\n"
    assert re.fullmatch(answers, asked), asked
    assert "step 2 done" in again
