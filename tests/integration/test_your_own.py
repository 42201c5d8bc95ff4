"""docs/your_own.md, from an empty folder to a report, as it stands there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/your_own.md").read_text(encoding="utf-8")
FILES = {"mine/make_data.py": "python", "mine/rewards.py": "python", "mine/recipe.toml": "toml"}


def blocks(*languages: str) -> list[str]:
    return re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", PAGE, re.DOTALL)


def test_every_command_of_the_page_runs_from_an_empty_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    for (name, _), text in zip(FILES.items(), blocks("python", "toml"), strict=True):
        assert PAGE.index(f"`{name}`") < PAGE.index(text), f"{name} is named above its text"
        (tmp_path / name).write_text(text)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, runs in (("qurl", "-m qurl_megatron.cli"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {runs} "$@"\n')
        (commands / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    said = []
    for block in blocks("sh"):
        done = subprocess.run(
            ["sh", "-ec", block], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    run = tmp_path / "mine/run"
    assert "held-out" in said[-3] and (run / "report.html").is_file()
    assert "step 9 done" in said[-2] and "step 12 done" in said[-2]
    change = json.loads((run / "eval/start_to_step_000009.json").read_text())
    assert change["benchmarks"]["held_out"]
    assert said[-1].count("reward ") >= 3 and (tmp_path / "mine/fp8/report.html").is_file()
