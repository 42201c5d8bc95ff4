"""Bytes from outside that are read beside engines' answers: a value, or the one error.

Each parser gets true messages with one value exchanged for any other, and bytes of all kinds.
"""

import json
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl_megatron.engines.starting import Launch
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.process import EngineProcess, port_file
from qurl_megatron.fleet.tenancy import Member, read_members
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.publish.publisher import _blobs_for
from qurl_megatron.wire import message
from qurl_megatron.wire.link import Hello, LinkError, read_hello
from qurl_megatron.wire.message import Blob, Message, Piece, Receipt, message_in, payload
from qurl_megatron.wire.transport import received
from tests.support.fuzz import damaged, examples

QUICK = examples(300)
NOISE = [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe\x00", b""]


def almost(true: str | bytes) -> st.SearchStrategy[bytes]:
    """A true message, damaged; or noise."""
    return damaged(json.loads(true)) | st.binary(max_size=80) | st.sampled_from(NOISE)


PIECE = Piece("w", "int8", (4, 8), 0, 12, 64, "0a1b")
MESSAGE = Message(
    "bucket", "v7-engine-0-01", 2, {"kind": "files"}, (Blob({"path": "/x"}, 96, (PIECE,)),)
)
RECEIPT = Receipt("v7-engine-0-01", 0, None, 100, 0.5, "ab")
HELLO = Hello("link", "refusal")


def test_an_engine_rank_is_told_of_its_blobs_and_of_no_empty_ones():
    first, second, nothing = (Blob({"slot": i}, 96, (PIECE,) * (i < 2)) for i in range(3))
    whole = _blobs_for([{None: first}, {None: nothing}, {None: second}])
    by_host = _blobs_for([{"a": first, "b": nothing}, {"a": second, "b": nothing}])
    by_rank = _blobs_for([{(1, 0): first, (2, 1): first, (2, 0): nothing}, {(2, 1): second}])
    for blobs_for, tp, rank, expected in [
        (whole, 1, 0, (first, second)),
        (whole, 2, 1, (first, second)),
        (by_host, 1, 0, (first, second)),
        (by_rank, 1, 0, (first,)),
        (by_rank, 2, 0, ()),
        (by_rank, 2, 1, (first, second)),
    ]:
        found = blobs_for(SimpleNamespace(tp=tp, host="a"), rank)
        assert message_in(payload(MESSAGE, found)).blobs == expected
    with pytest.raises(EngineError, match="http://c:1 is on none of the trainer's machines"):
        by_host(SimpleNamespace(tp=1, host="c", url="http://c:1"), 0)


def one_line(error: Exception) -> None:
    assert 0 < len(str(error)) < 1000 and "\n" not in str(error)


@QUICK
@given(almost(MESSAGE.to_json()))
def test_a_weight_update_is_a_message_or_a_configerror(text):
    try:
        message = Message.from_json(text)
    except ConfigError as error:
        one_line(error)
        return
    assert message.action in ("connect", "bucket", "check", "finish") and message.index >= 0
    for blob in message.blobs:
        for piece in blob.pieces:
            assert 0 <= piece.offset <= piece.offset + piece.bytes <= blob.bytes
            assert piece.start >= 0 and piece.stop >= piece.start


@pytest.mark.parametrize(
    "change,message",
    [
        ({"offset": 72}, "w ends behind the end of its blob"),
        ({"dim": 2}, "w has no dimension 2"),
        ({"dtype": "float32", "shape": [1], "dim": None, "offset": 2}, "middle of a number"),
        ({"dtype": "Tensor"}, "dtype Tensor"),
        ({"shape": [-1, 8]}, "shape"),
        ({"shape": [2**40, 2**40]}, "shape"),
    ],
)
def test_a_piece_that_no_blob_can_hold_is_refused(change, message):
    update = json.loads(MESSAGE.to_json())
    update["blobs"][0]["pieces"][0] |= change
    with pytest.raises(ConfigError, match=f"the weight update is malformed: .*{message}"):
        Message.from_json(json.dumps(update))


@pytest.mark.parametrize("text", [None, b"[", b" " * 1000 + b"[]"])
def test_blobs_that_unpack_to_none_or_to_too_much_are_refused(text, monkeypatch):
    packed = zlib.compress(text) if text else b"?"
    monkeypatch.setattr(message, "BLOBS_BYTES", 1000)
    with pytest.raises(ConfigError, match="^the weight update is malformed: "):
        message_in(payload(MESSAGE, packed))


def test_an_update_of_another_format_is_refused_with_the_fix():
    update = json.loads(MESSAGE.to_json()) | {"format": "qurl-update-0"}
    with pytest.raises(ConfigError, match="qurl-update-0.*format.*install the same version"):
        Message.from_json(json.dumps(update))


@QUICK
@given(almost(msgspec.json.encode(RECEIPT)))
def test_a_receipt_is_its_ranks_own_or_says_what_is_wrong(text):
    receipt = received(text, "v7-engine-0-01", 0)
    assert (receipt.session, receipt.rank) == ("v7-engine-0-01", 0)
    assert receipt.error is None or receipt.error or text
    assert type(receipt.bytes) is int and receipt.seconds >= 0 and isinstance(receipt.pointers, str)


@QUICK
@given(almost(msgspec.json.encode(HELLO)))
def test_a_line_of_a_meeting_is_one_or_a_link_error(text):
    try:
        hello = read_hello(text)
    except LinkError as error:
        one_line(error)
        return
    assert isinstance(hello.link, str) and isinstance(hello.refusal, str)


@QUICK
@given(almost('{"url": "http://a:1", "api_key_file": "key"}'))
def test_a_rendezvous_offers_engines_or_is_a_configerror(text):
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "engine.json").write_bytes(text)
        try:
            for url, member in read_members(folder, one_line).items():
                assert isinstance(member, Member) and url.startswith("http")
                key = member.api_key(folder)
                assert key is None or isinstance(key, str)
        except ConfigError as error:
            one_line(error)


def test_a_rendezvous_may_say_more_than_we_read(tmp_path):
    (tmp_path / "a.json").write_text('{"url": "http://a:1", "node": "n7"}')
    assert read_members(tmp_path, one_line) == {"http://a:1": Member("http://a:1")}


@QUICK
@given(st.one_of(st.binary(max_size=12), st.just(b"30000\n"), st.just(b"0"), st.just(b"99999999")))
def test_a_port_file_names_a_port_or_none_yet(text):
    with TemporaryDirectory() as folder:
        port_file(Path(folder), "e").write_bytes(text)
        port = EngineProcess("e", Launch((), {}), Path(folder)).port()
    assert port is None or 0 < port < 100_000
