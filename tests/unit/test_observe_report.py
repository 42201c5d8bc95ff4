import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from qurl_megatron.observe.drawing import SECTIONS, draw, smooth
from qurl_megatron.observe.metrics import History
from qurl_megatron.observe.report import write_report
from qurl_megatron.observe.sinks import read_metrics
from qurl_megatron.observe.text import number
from tests.support.observe_fake_run import write_fake_run

# A warning from matplotlib is a flaw in the picture.
pytestmark = pytest.mark.filterwarnings("error")

PAPER = "https://arxiv.org/abs/2602.13953"
KEYS = {key for section in SECTIONS.values() for key in section}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return write_fake_run(tmp_path_factory.mktemp("runs") / "int8-acr", 12, planned=20)


@pytest.fixture(scope="module")
def page(finished):
    return write_report(finished).read_text()


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    """The page of a run with odd names and numbers, a broken recipe, and a guard that acted."""
    run_dir = write_fake_run(tmp_path_factory.mktemp("runs") / "run", 6)
    evil = {"evil/\x1b[2J\u202e\u2028\ud800</script><img src=x>": 1.0}
    with (run_dir / "metrics.jsonl").open("a") as file:
        for metrics in (evil, {"policy/loss": "NaN", "rollout/rho_max": "Infinity"}):
            file.write(json.dumps({"step": 6, "time": 2e9, "metrics": metrics}) + "\n")
    (run_dir / "config.toml").write_text("not [ toml <script>")
    events = (
        (1, "guard", "halted: it <b>broke</b>"),
        (2, "guard", "warning: policy/entropy = 0.1 is below guard.entropy_below = 0.5"),
        (3, "fleet", "engine-1 died: <killed>"),
        (6, "guard", "halted: reward/mean = 0.01 is below guard.reward_below = 0.05"),
    )
    with (run_dir / "timeline.jsonl").open("w") as file:
        for step, lane, name in events:
            span = {"lane": lane, "name": name, "step": step, "start": 1.8e9, "end": 1.8e9}
            file.write(json.dumps(span) + "\n")
    return write_report(run_dir).read_text()


def _pictures(page: str) -> set[str]:
    return set(re.findall(r'<figure id="(\w+)"', page))


def _without(run_dir, *prefixes):
    """Rewrite a run's metrics as if some had never been measured."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["metrics"] = {k: v for k, v in line["metrics"].items() if not k.startswith(prefixes)}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_report_shows_every_picture_of_a_full_run(page):
    assert _pictures(page) == KEYS
    for section in SECTIONS.values():
        for picture in section.values():
            assert picture.title in page and picture.caption in page


def test_the_page_has_no_character_that_steers_what_shows_it(troubled):
    assert "<pre>not [ toml &lt;script&gt;</pre>" in troubled and "<script" not in troubled
    assert "evil/?[2J???&lt;/script&gt;&lt;img src=x&gt;" in troubled


def test_pictures_whose_metrics_are_absent_are_left_out(tmp_path):
    run_dir = write_fake_run(tmp_path, 3)
    _without(run_dir, "acr/", "quant/", "time/", "policy/entropy")
    page = write_report(run_dir).read_text()
    assert _pictures(page) == KEYS - {"flips", "weight_change", "phases", "entropy"}
    assert "Training time" not in page


def test_the_report_loads_nothing_from_elsewhere(page):
    class Loads(HTMLParser):
        found = []

        def handle_starttag(self, tag, attrs):
            for name, value in attrs:
                inside = value.startswith(("#", "data:image/svg+xml;base64,"))
                if name in ("src", "href", "xlink:href", "srcset", "data") and not inside:
                    self.found.append((tag, name, value))

    parser = Loads()
    parser.feed(page)
    assert parser.found == [("a", "href", PAPER)]  # followed only where a reader asks for it
    assert not re.search(r"https?://|@import|<script|<link", page.replace(PAPER, ""))
    assert not re.findall(r"url\((?!#)", page)
    assert len(page) < 1_000_000


def test_headline_compares_the_end_with_the_beginning(page):
    text = re.sub(r"<[^>]+>|\s", "", page)
    assert "Held-outaccuracy11%→" in text
    assert "12of20steps" in text
    assert "INT8ACR" in text and "UAQs=1.5" in text
    assert page.index("ACR acted: a wider clip range for") < page.index("<h2")


def test_held_out_scores_that_are_no_accuracies_have_no_percentage(tmp_path):
    run_dir = write_fake_run(tmp_path / "run", 60)
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("eval/accuracy", "eval/reward"))
    text = re.sub(r"<[^>]+>|\s+", " ", write_report(run_dir).read_text())
    assert re.search(r"Held-out reward\s+0\.110\s+→\s+0\.\d{3} ", re.sub(r"\s+", " ", text))
    assert "Held-out accuracy" not in text and "held-out reward" in text


def test_a_run_of_one_step_is_drawn(tmp_path):
    run_dir = write_fake_run(tmp_path, 1)
    _without(run_dir, "eval/")
    assert _pictures(write_report(run_dir).read_text()) == KEYS


def test_pictures_are_drawn_as_svg_whose_text_is_text(page):
    urls = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)"', page)
    assert len(urls) == len(KEYS)
    for url in urls:
        drawing = base64.b64decode(url).decode()
        ElementTree.fromstring(drawing)
        assert re.search(r"<text[^>]*>\d", drawing)


def test_non_finite_values_are_left_out_and_reported(troubled):
    assert "<code>rollout/rho_max</code> at 1 step" in troubled
    assert _pictures(troubled) == KEYS


def _text(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_tile_legend_and_drawing_have_the_same_ends(finished, page):
    history = History(read_metrics(finished / "metrics.jsonl"))
    axes = Figure().add_subplot()
    draw(axes, SECTIONS["Learning"]["reward"], history)
    line = next(line for line in axes.lines if line.get_xdata()[0] == 1 and line.get_lw() == 1.9)
    first, last = (number(value) for value in line.get_ydata()[[0, -1]])
    (figure,) = re.findall(r'<figure id="reward".*?</figure>', page, flags=re.S)
    assert f" Reward {first} → {last} step 1 to step 12" in _text(page)
    assert f"rollout reward {last} " in _text(figure)


def test_the_contents_lead_to_every_section(page):
    contents = re.search("<nav.*?</nav>", page, flags=re.S)[0]
    titles = re.findall(r'<section id="([\w-]+)">\s*<h2>(.*?)</h2>', page)
    assert re.findall(r'<a href="#([\w-]+)">(.*?)</a>', contents) == titles
    assert [title for _, title in titles] == [*SECTIONS, "Details"]


def test_what_the_guard_did_stands_at_the_head_of_the_page(troubled):
    banners = re.findall(r'<p class="warning alarm">(.*?)</p>', troubled)
    assert banners == [
        "<strong>Halted at step 1, and started again.</strong> it &lt;b&gt;broke&lt;/b&gt;",
        "<strong>Halted at step 6.</strong> reward/mean = 0.01 is below guard.reward_below = 0.05",
    ]
    assert troubled.index("Halted") < troubled.index("<h2>")
    assert "<td>guard: warning: policy/entropy = 0.1 is below" in troubled
    assert "<td>engine-1 died: &lt;killed&gt;" in troubled


def test_the_same_run_gives_the_same_page(finished, page):
    assert write_report(finished).read_text() == page


def test_it_says_what_a_metric_is_in_the_order_of_the_catalogue(page):
    assert '<code title="positions that hold padding">train/padding_fraction</code>' in page
    groups = re.findall(r'<th scope="rowgroup">(\w+)</th>', page)
    assert groups[:3] == ["reward", "eval", "response"] and groups[-1] == "sampling"


def test_smoothing_keeps_a_constant_and_a_slope_in_the_middle():
    np.testing.assert_allclose(smooth(np.full(50, 3.0)), 3.0)
    slope = np.arange(200.0)
    np.testing.assert_allclose(smooth(slope)[50:150], slope[50:150])
    np.testing.assert_allclose(smooth(np.full(50, 3.0), log=True), 3.0)
