import sys

import pytest

from qurl_megatron.bench.convert import HASHED, SYNCED, Bench, ConversionRun, cases_of
from qurl_megatron.bench.repeats import Repeats
from qurl_megatron.errors import ConfigError


def runs(*seconds: float) -> Repeats[ConversionRun]:
    results = [
        ConversionRun(s, cpu_seconds=2 * s, peak_mib=100.0, bytes=10_000_000) for s in seconds
    ]
    return Repeats(seconds=list(seconds), results=results, yardsticks=[0.01] * len(results))


def test_a_converter_stands_beside_the_copy_that_does_as_much_and_a_peer_does_not():
    measured = {"ours": runs(4.0, 5.0, 9.0), "mbridge": runs(20.0), HASHED: runs(2.0, 2.5, 3.0)}
    ours, peer, copy = cases_of("0.5B", "hf_to_int8", measured, {"ours": runs(1.0)})
    seconds = ours.figure("seconds")
    assert (seconds.repeats, seconds.limit, seconds.share) == ([4.0, 5.0, 9.0], 2.5, 0.5)
    assert ours.notes == {"bytes": 10_000_000, "mb_per_s": 2.0, "start_up_s": 1.0}
    assert ours.figure("work").median == 10.0 and ours.figure("peak memory").median == 100.0
    assert seconds.limit_of == "a copy, sync and SHA-256"
    assert peer.figure("seconds").limit is None and copy.figure("seconds").limit is None


def test_the_limit_of_a_converter_without_checksums_is_a_copy_without_them():
    measured = {name: runs(2.0) for name in ("ours", "ours --no-checksums")}
    measured |= {SYNCED: runs(1.0), HASHED: runs(3.0)}
    cases = {
        case.keys["who"]: case.figure("seconds") for case in cases_of("0.5B", "a", measured, {})
    }
    found = cases["ours --no-checksums"]
    assert (found.limit, found.limit_of) == (1.0, "a copy and sync")
    assert cases["ours"].limit == 3.0


def test_a_process_is_timed_and_what_it_wrote_is_counted(tmp_path):
    code = (
        "import sys, pathlib; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / 'a').write_text('abc')"
    )
    out = tmp_path / "out"
    found = Bench(tmp_path, None, 1).child([sys.executable, "-S", "-c", code, str(out)], writes=out)
    assert found.bytes == 3 and found.seconds > 0 and found.peak_mib > 1


def test_a_converter_that_fails_is_one_sentence_with_its_last_word(tmp_path):
    code = "print('first'); raise SystemExit('no room')"
    with pytest.raises(ConfigError, match="bench convert: .* failed: no room"):
        Bench(tmp_path, None, 1).child([sys.executable, "-S", "-c", code])
