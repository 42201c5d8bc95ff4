import itertools

import msgspec
import pytest
import torch

from qurl_megatron.engines.sglang.loader import SGLangWeights
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Shard, Slice
from qurl_megatron.wire.message import Blob, Message, checksum, lay_out, piece_of
from qurl_megatron.wire.session import UpdateEnd, pointers
from tests.support.sglang_lookalikes import Qwen2ForCausalLM, targets, whole_tensors
from tests.support.shards import shard

O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.norm.weight"


class Wire:
    """The outside: blobs by number, receipts in a list."""

    def __init__(self) -> None:
        self.blobs: list[torch.Tensor] = []
        self.fetched: list[int] = []
        self.receipts = []
        self.opened = self.closed = 0

    def open(self, transport: dict, rank: int) -> "Wire":
        self.opened += 1
        self.transport = transport
        return self

    def follow(self, transport: dict) -> bool:
        return transport == self.transport

    def put(self, parts: list[Shard]) -> Blob:
        pieces, size = lay_out(parts)
        data = torch.zeros(size, dtype=torch.uint8)
        for index, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
            piece_of(data, piece).copy_(part.value)
            pieces[index] = msgspec.structs.replace(piece, checksum=checksum(part.value))
        self.blobs.append(data)
        return Blob({"number": len(self.blobs) - 1}, size, tuple(pieces))

    def fetch(self, blob: Blob) -> torch.Tensor:
        self.fetched.append(blob.where["number"])
        data = self.blobs[blob.where["number"]]
        if isinstance(data, Exception):
            raise data
        return data

    def report(self, receipt) -> None:
        self.receipts.append(receipt)

    def close(self) -> None:
        self.closed += 1


class Engine:
    """One rank, and a trainer that talks to it."""

    def __init__(self, wire: Wire | None = None, **model) -> None:
        self.model, self.wire = Qwen2ForCausalLM(**model), wire or Wire()
        self.end = UpdateEnd(SGLangWeights(self.model), self.wire.open)
        self.session, self.index = "one", 0

    def say(self, action: str, index: int = 0, blobs: tuple = (), turn=(0, 1), **transport) -> None:
        told = {"kind": "test", **transport}
        message = Message(action, self.session, index, told, blobs, turn=turn)
        self.end.handle(Message.from_json(message.to_json()))

    def bucket(self, *blobs: Blob) -> None:
        self.say("bucket", self.index, blobs)
        self.index += 1

    def check(self):
        self.say("check", self.index)
        return self.wire.receipts[-1]

    def next(self, session: str) -> None:
        self.session, self.index = session, 0


def parts(tensors: dict, ranks: int = 1) -> list[list[Shard]]:
    """What each of ``ranks`` training ranks holds of whole tensors."""
    made: list[list] = [[] for _ in range(ranks)]
    for name, value in tensors.items():
        row_parallel = "o_proj" in name or "down_proj" in name
        if "norm" in name or ".gate." in name or (row_parallel and name.endswith("scale")):
            made[0].append(Shard.whole(name, value))
            continue
        dim, start = (1 if row_parallel else 0), 0
        for rank, part in enumerate(value.tensor_split(ranks, dim)):
            made[rank].append(Shard(name, part.contiguous(), value.shape, dim, start))
            start += part.shape[dim]
    return made


def test_an_engine_fetches_first_what_other_engines_do_not():
    whole, turns = whole_tensors(), []
    for turn, rank in itertools.product(((0, 2), (1, 2)), range(2)):
        engine = Engine(rank=rank, tp=2)
        blobs = [engine.wire.put(part) for part in parts(whole, 4)]
        engine.say("bucket", 0, tuple(blobs), turn=turn)
        engine.index = 1
        assert engine.check().error is None
        turns.append(engine.wire.fetched)
    # The second blob has nothing for the second rank.
    assert turns == [[0, 1, 2, 3], [0, 2, 3], [2, 3, 0, 1], [2, 3, 0]]


@pytest.mark.parametrize("tp, ep", [(1, 0), (2, 0), (4, 0), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_ends_with_its_part_of_every_tensor(ranks, tp, ep):
    whole = whole_tensors(experts=ep > 0)
    for rank in range(tp):
        engine = Engine(rank=rank, tp=tp, ep=ep)
        before = pointers(targets(engine.model))
        names = sorted(whole)
        for bucket in range(3):
            some = {name: whole[name] for name in names[bucket::3]}
            engine.bucket(*[engine.wire.put(part) for part in parts(some, ranks)])
        receipt = engine.check()
        assert receipt.error is None
        assert receipt.rank == rank
        assert receipt.pointers == before
        found = targets(engine.model)
        assert receipt.bytes == sum(target.value.nbytes for target in found.values())
        for name, target in found.items():
            held = target.part.narrow(whole[name], Slice.whole(target.shape))
            assert torch.equal(target.value, held), name


def test_finish_leaves_what_a_fresh_load_leaves_and_the_next_update_finds_it():
    engine, whole = Engine(), whole_tensors()
    engine.bucket(engine.wire.put(parts(whole)[0]))
    engine.say("finish")
    weight = engine.model.model.layers[0].self_attn.o_proj.weight
    assert torch.equal(weight, whole[O_PROJ])  # square: only the strides can tell
    assert not torch.equal(weight.t(), whole[O_PROJ])
    # The trainer dies before SGLang transposes.
    doubled = {name: value * 2 for name, value in whole.items()}
    engine.next("two")
    engine.bucket(engine.wire.put(parts(doubled)[0]))
    assert engine.check().error is None
    assert torch.equal(engine.model.model.layers[0].self_attn.o_proj.weight, doubled[O_PROJ])


def failed(engine: Engine, *rounds: list[Shard]) -> str:
    for one in rounds:
        engine.bucket(engine.wire.put(one))
    return engine.check().error


def half_of_a_projection() -> list[Shard]:
    first, second = parts(whole_tensors(), ranks=2)
    return [*first, *(part for part in second if part.name != O_PROJ)]


def overlapping() -> list[Shard]:
    tensors = whole_tensors()
    columns = tensors[O_PROJ][:, 3:5].contiguous()
    return [*parts(tensors)[0], shard(O_PROJ, columns, 1, 3)]


@pytest.mark.parametrize(
    "pieces, message",
    [
        (
            lambda: [p for p in parts(whole_tensors())[0] if p.name != NORM],
            f"{NORM} (none of it arrived)",
        ),
        (half_of_a_projection, f"{O_PROJ} (a part only of it arrived)"),
        (overlapping, f"{O_PROJ} columns [3, 5) came twice"),
        (lambda: [shard("model.extra", torch.ones(2))], "model.extra is not a tensor"),
        (lambda: [shard(NORM, torch.ones(16).bfloat16())], f"{NORM} came as bfloat16, the engine "),
        (lambda: [shard(NORM, torch.ones(15))], NORM),
        (lambda: [shard(NORM, torch.ones(16, 1))], NORM),
        (lambda: [shard(O_PROJ, torch.ones(16, 8, dtype=torch.int8), 1, 9)], O_PROJ),
        (lambda: [shard(O_PROJ, torch.ones(15, 8, dtype=torch.int8), 1, 0)], O_PROJ),
    ],
)
def test_a_wrong_set_of_pieces_is_named(pieces, message):
    assert message in failed(Engine(), pieces())


def test_a_damaged_piece_is_named_and_not_written():
    engine = Engine()
    blob = engine.wire.put([shard(NORM, torch.ones(16))])
    engine.wire.blobs[0][5] ^= 1
    engine.bucket(blob)
    assert "damaged" in engine.check().error and NORM in engine.check().error
    assert not engine.model.model.norm.weight.any()


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_no_quantizer_makes_is_named_and_not_written(value):
    engine, whole = Engine(), whole_tensors()
    whole[f"{O_PROJ}_scale"][3] = value
    engine.bucket(engine.wire.put(parts(whole)[0]))
    assert f"{O_PROJ}_scale holds scales that are not positive" in engine.check().error
    assert not engine.model.model.layers[0].self_attn.o_proj.weight_scale.any()


def test_the_first_error_is_told_and_the_rest_is_fetched_but_not_written():
    engine = Engine()
    whole = parts(whole_tensors())[0]
    error = failed(engine, [shard("model.extra", torch.ones(2))], whole)
    assert "model.extra" in error
    assert engine.wire.fetched == [0, 1]
    assert not engine.model.model.norm.weight.any()


@pytest.mark.parametrize(
    "error", [ConfigError("the blob is gone"), RuntimeError("the network is down")]
)
def test_a_bucket_that_does_not_come_is_told_and_no_other_waited_for(error):
    engine = Engine()
    blob = engine.wire.put(parts(whole_tensors())[0])
    engine.wire.blobs[0] = error
    engine.bucket(blob, blob)
    assert str(error) in engine.check().error
    assert engine.wire.fetched == [0]


def test_a_bucket_that_never_came_is_an_error():
    engine = Engine()
    engine.bucket(engine.wire.put(parts(whole_tensors())[0]))
    engine.index += 1
    assert engine.check().error == "bucket 1 of 2 did not arrive"


def test_a_new_session_forgets_the_errors_and_the_coverage_of_the_last():
    engine = Engine()
    failed(engine, parts(whole_tensors())[0], [shard("model.extra", torch.ones(2))])
    engine.next("two")
    assert failed(engine, parts(whole_tensors())[0]) is None


def test_the_transport_stays_open_until_it_changes_or_fails():
    engine = Engine()
    engine.say("connect")
    engine.next("two")
    engine.say("connect")
    assert (engine.wire.opened, engine.wire.closed) == (1, 0)
    engine.next("three")
    engine.say("connect", port=2)
    assert (engine.wire.opened, engine.wire.closed) == (2, 1)


def test_a_model_that_is_not_understood_goes_into_the_receipt():
    engine = Engine()
    engine.model.model.extra = torch.nn.Linear(2, 2)
    assert "model.extra.weight" in failed(engine, parts(whole_tensors())[0])
