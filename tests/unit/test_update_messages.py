"""What goes to many engines is made JSON once, and says the same as if it were made for each."""

import json
from types import SimpleNamespace

from qurl_megatron.publish.publisher import _blobs_for
from qurl_megatron.wire.message import FORMAT, Blob, Message, Piece, encoded

PIECE = Piece("model.layers.0.mlp.up_proj.weight", "int8", (4, 8), 0, 12, 64, "0a1b")
BLOBS = (
    Blob({"path": "/dev/shm/ä", "offset": 128}, 96, (PIECE, PIECE)),
    Blob({"slot": 3, "cuda": None}, 96, (PIECE,)),
)
NOTHING = Blob({}, 0, ())


def message(blobs) -> Message:
    return Message("bucket", "v7-engine-0-01", 7, 2, {"kind": "files"}, blobs)


def test_a_message_says_the_same_whether_its_blobs_were_json_already():
    text = message(encoded(BLOBS)).to_json()
    assert Message.from_json(text) == message(BLOBS)
    assert text == message(BLOBS).to_json()
    assert json.loads(text)["format"] == FORMAT


def test_blobs_are_described_once_for_all_engines_of_a_size_and_empty_ones_left_out():
    whole = _blobs_for([{None: BLOBS[0]}, {None: NOTHING}, {None: BLOBS[1]}])
    cut = {
        (tp, rank): Blob({"slot": 10 * tp + rank}, 96, (PIECE,))
        for tp in (1, 2)
        for rank in range(tp)
    }
    by_rank = _blobs_for([cut, {(2, 1): BLOBS[0], (2, 0): NOTHING}])
    for tp, rank, expected in [
        (1, 0, (cut[1, 0],)),
        (2, 0, (cut[2, 0],)),
        (2, 1, (cut[2, 1], BLOBS[0])),
    ]:
        one, other = SimpleNamespace(tp=tp), SimpleNamespace(tp=tp)
        assert whole(one, rank) is whole(SimpleNamespace(tp=1), 0)
        assert Message.from_json(message(whole(one, rank)).to_json()) == message(BLOBS)
        assert by_rank(one, rank) is by_rank(other, rank)
        assert Message.from_json(message(by_rank(one, rank)).to_json()).blobs == expected
