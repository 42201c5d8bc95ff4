"""Terminal, report and pictures read one catalogue of metrics."""

import math
import random

from qurl_megatron.kit.errors import CAUSES
from qurl_megatron.observe.catalogue import METRICS, known
from qurl_megatron.observe.drawing import SECTIONS
from qurl_megatron.observe.progress import FIELDS
from qurl_megatron.observe.text import reading
from qurl_megatron.training.groups import Draft
from qurl_megatron.training.guard import THRESHOLDS
from tests.support.observe_fake_run import fake_metrics


def test_what_is_drawn_counted_and_watched_is_known():
    drawn = [one for section in SECTIONS.values() for one in section.values()]
    names = {line.metric for one in drawn for line in one.lines}
    names |= {f"reward/{cause}" for cause in CAUSES} | {f"guard/{one.name}" for one in THRESHOLDS}
    names |= {name for one in THRESHOLDS for name in one.metrics} | FIELDS.keys()
    names |= Draft((), group_count=1, max_refills=0).metrics().keys()
    names |= fake_metrics(1, 2, random.Random(0)).keys()
    assert [name for name in sorted(names) if not known(name).says] == []


def test_names_near_a_metric_are_unknown():
    names = ("reward/mixed", "reward", "mine/own", "time/mix/x")
    assert {known(name).says for name in names} == {""}


def test_values_read_alike_wherever_they_are_shares():
    shares = ("critic/clip_fraction", "train/padding_fraction", "policy/clip_fraction")
    assert {reading(name, 0.25) for name in shares} == {"25\u202f%"}
    assert {known(name).unit for name in METRICS if name.endswith("fraction")} == {"share"}
    assert {name for name, show in FIELDS.items() if "%" in show(0.5)} == {
        name for name in FIELDS if known(name).unit == "share"
    }
    assert reading("sync/bytes", 1234) == "1\u202f234"
    assert reading("rollout/rho_geometric_max", 3e9) == "3·10⁹"
    assert reading("sync/load_s", 75) == "1m15s"
    assert reading("sync/version", math.nan) == reading("policy/ratio_mean", math.nan) == "nan"
