"""Text from outside, as a terminal, a log and a page may take it."""

import pytest

from qurl_megatron.fleet.answer import parsed
from qurl_megatron.kit.errors import ConfigError, keep_secret, printable
from qurl_megatron.kit.record import Malformed, shortened

HOSTILE = "\x1b]0;owned\x07 \x1b[2J \x9b31m \ud800 \u202eabc \r"


@pytest.mark.parametrize("show", [printable, shortened, lambda text: str(ConfigError(text))])
def test_nothing_from_outside_steers_a_terminal_or_stops_an_encoder(show):
    shown = show(f"it said {HOSTILE}")
    assert shown.startswith("it said ?]0;owned? ?[2J ?31m ? ?abc")
    shown.encode("utf-8")
    assert not set(shown) & set("\x1b\x07\x9b\r\u202e")


def test_ordinary_text_stays_as_it_is():
    text = "naïve 漢字 \U0001f469\u200d\U0001f680 a\u202fb\u00a0c\n\tand so on"
    assert printable(text) == text


def test_a_key_that_somebody_quotes_is_left_out():
    keep_secret("s3cr3t-key")
    keep_secret("ab")  # would take words along
    keep_secret(None)
    assert printable("bad token 'Bearer s3cr3t-key', abc") == "bad token 'Bearer ***', abc"


KEY = "sk-Ab9xYzQwe7-abcdefgh"


@pytest.fixture
def secret():
    keep_secret(KEY)


def test_a_key_is_recognized_before_what_holds_it_is_cut(secret):
    for before in range(0, 600, 7):
        text = "x" * before + KEY + "y" * 600
        with pytest.raises(Malformed) as error:
            parsed(text.encode())
        for shown in (shortened({"a": text}), shortened(text.encode()), str(error.value)):
            assert KEY[:6] not in shown


def test_a_key_that_another_begins_with_leaves_no_part_of_it():
    keep_secret("s3cr3t")
    keep_secret("s3cr3t-and-more")
    assert printable("s3cr3t-and-more, s3cr3t") == "***, ***"
