"""JSON from outside becomes a typed record, or one Malformed that names the field."""

import pytest

from qurl_megatron.kit.record import Count, Malformed, Record, Seconds, convert, decode


class Answer(Record, frozen=True):
    tokens: Count
    took_s: Seconds = 0.0
    label: str | None = None


def test_a_record_is_read_from_json_and_from_parsed_json():
    assert decode(Answer, b'{"tokens":3,"took_s":2}') == Answer(3, 2.0)
    assert convert(Answer, {"tokens": 3, "label": "x"}) == Answer(3, label="x")


@pytest.mark.parametrize(
    ("content", "culprit"),
    [
        ("", "truncated"),
        ("nonsense", "malformed"),
        (b"\xff", "malformed"),
        ('{"\ud800": 1}', "utf-8"),
        ("[" * 100_000, "array"),
        ('{"label":"\\ud800","tokens":1}', "label|truncated|malformed"),
        ("[]", "array"),
        ("{}", "tokens"),
        ('{"tokens":1,"more":2}', "more"),
        ('{"tokens":true}', "tokens"),
        ('{"tokens":1.0}', "tokens"),
        ('{"tokens":-1}', "tokens"),
        ('{"tokens":' + "9" * 5000 + "}", "tokens"),
        ('{"tokens":1,"took_s":1e400}', "took_s"),
        ('{"tokens":1,"took_s":NaN}', "malformed"),
        ('{"tokens":1,"took_s":false}', "took_s"),
        ('{"tokens":1,"took_s":-1}', "took_s"),
        ('{"tokens":1,"label":7}', "label"),
    ],
)
def test_anything_else_is_one_short_error(content, culprit):
    with pytest.raises(Malformed, match=f"(?i){culprit}") as error:
        decode(Answer, content)
    assert len(str(error.value)) <= 200
