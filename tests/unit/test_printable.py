"""Text from outside, as a terminal, a log and a page may take it."""

import base64
import html
import json
from urllib.parse import quote, quote_plus

import pytest

from qurl_megatron.fleet.answer import parsed
from qurl_megatron.kit.errors import ConfigError, keep_secret, printable, unscored
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


KEY = 'sk-Ab/9+xY==zQ"w\\e%7'


@pytest.fixture
def secret():
    keep_secret(KEY)


@pytest.mark.parametrize(
    "quoted",
    [
        quote(KEY, safe=""),
        quote_plus(KEY).lower().replace("sk-ab", "sk-Ab").replace("xy", "xY").replace("zq", "zQ"),
        json.dumps(KEY)[1:-1],
        json.dumps({"body": json.dumps(KEY)}),
        json.dumps(KEY)[1:-1].replace("/", "\\/"),
        repr({"header": KEY}),
        html.escape(KEY),
        f"{KEY[:9]}\n   {KEY[9:]}",
        f"{KEY[:9]}\r\n{KEY[9:]}",
        "\0".join(KEY),
    ],
)
def test_a_key_is_left_out_as_a_server_escapes_or_wraps_it(secret, quoted):
    for show in (printable, shortened, lambda text: unscored("refused", text).why):
        shown = show(f"bad token: {quoted}.")
        assert "***" in shown
        assert KEY[:5] not in shown and "e%7" not in shown and "e%257" not in shown


@pytest.mark.parametrize("before", ["", ":", "user:", "Bearer ", "a", "ab"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes])
def test_a_key_is_left_out_in_base64(secret, before, encode):
    shown = printable(f"Basic {encode((before + KEY).encode()).decode()}")
    assert "***" in shown
    assert len(shown.strip()) <= len(f"Basic {before * 2}***xxxx==")


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
