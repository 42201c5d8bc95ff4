"""The report in a real browser, on a desk's screen and a telephone's: no text overlaps or is cut.

Needs Chromium, which is looked for on PATH; ``apt-get install chromium`` brings it on Debian.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from qurl_megatron.observe.report import write_report
from tests.support.observe_fake_run import write_fake_run

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
WIDTHS = (1280, 420)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    not BROWSER, reason="no chromium, chromium-browser or google-chrome on PATH"
)


def measured(page: str, folder: Path) -> list[dict]:
    """What ``measure_layout.js`` says of the page, at each of ``WIDTHS``."""
    frames = "".join(
        f'<iframe width="{width}" height="900" style="border: 0" srcdoc="{html.escape(page)}">'
        "</iframe>"
        for width in WIDTHS
    )
    script = Path(__file__).with_name("measure_layout.js").read_text()
    frame_page = folder / "frames.html"
    frame_page.write_text(
        f'<!doctype html><meta charset="utf-8"><pre id="flaws"></pre>{frames}'
        f"<script>{script}</script>"
    )
    done = subprocess.run(
        [
            BROWSER,
            *QUIET,
            f"--user-data-dir={folder / 'profile'}",
            "--dump-dom",
            f"file://{frame_page}",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = re.search('<pre id="flaws">(.+?)</pre>', done.stdout)
    assert found, done.stderr
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """Of a run with everything that a report shows, long words and long events among it."""
    run_dir = write_fake_run(tmp_path_factory.mktemp("runs") / ("int8-acr" * 8), 40)
    spans = [
        ("trainer", "rollout", 39, 0, 2), ("trainer", "train", 39, 2, 3),
        ("engines", "batch", 39, 0, 2), ("trainer", "train", 40, 3, 4),
        ("update", "publish", 40, 4, 5), ("trainer", "publish", 40, 4, 5),
        ("fleet", "engine-0 failed: " + "/a/long/path" * 20, 3, 6, 6),
        ("guard", "halted: reward/mean = 0.01 is below guard.reward_below = 0.05", 9, 7, 7),
    ]  # fmt: skip
    names = ("lane", "name", "step", "start", "end")
    lines = [json.dumps(dict(zip(names, span, strict=True))) + "\n" for span in spans]
    (run_dir / "timeline.jsonl").write_text("".join(lines))
    example = {
        "step": 40, "of": "train", "index": 7, "prompt": "word " * 200 + "x" * 200, "answer": "4",
        "response": "", "tokens": 1, "finish": "stop", "reward": 0.0, "advantage": -0.5,
    }  # fmt: skip
    (run_dir / "samples.jsonl").write_text(json.dumps(example) + "\n")
    return write_report(run_dir).read_text()


def test_no_text_of_a_report_overlaps_or_is_cut(page, tmp_path):
    for width, seen in zip(WIDTHS, measured(page, tmp_path), strict=True):
        assert (seen["width"], seen["flaws"]) == (width, [])
        assert seen["texts"] > 500


def test_a_broken_page_is_noticed(page, tmp_path):
    """What the test above would say of text that is too wide, or moved onto other text."""
    broken = page.replace(
        "</style>",
        ".facts { white-space: nowrap; font-size: 60px } figcaption { margin-top: -40px }</style>",
    )
    for seen in measured(broken, tmp_path):
        kinds = {flaw.partition(":")[0] for flaw in seen["flaws"]}
        assert kinds == {"the page scrolls sideways", "cut", "overlap"}
