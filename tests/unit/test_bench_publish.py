from qurl_megatron.bench.publish import case_of
from qurl_megatron.bench.repeats import Repeats


def turn(seconds: float, paused_s: float) -> dict[str, float]:
    return {
        "seconds": seconds,
        "bytes": 2e9,
        "paused_s": paused_s,
        "work_s": 2 * seconds,
        "copy_gb_s": 2.0,
    }


def test_a_case_has_every_turn_and_the_limit_of_a_copy():
    repeats = Repeats(results=[turn(2.0, 0.5), turn(1.0, 0.7)], yardsticks=[0.01, 0.01])
    case = case_of("int8", 1, "memory", repeats, model="0.5B", bucket_mb=64.0)
    assert case.name == "int8, engine TP1, memory"
    seconds = case.figure("seconds")
    assert (seconds.repeats, seconds.limit) == ([2.0, 1.0], 1.0)  # 2 GB at 2 GB/s
    assert case.figure("work").repeats == [4.0, 2.0]
    assert case.figure("paused").repeats == [0.5, 0.7]
    assert case.yardsticks == [0.01, 0.01] and case.notes == {"bytes": 2e9}
    assert case.keys["scheme"] == "int8" and case.keys["bucket_mb"] == 64.0
