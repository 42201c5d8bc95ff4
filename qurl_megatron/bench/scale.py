"""What the leading rank's Python does for one step of a 32B model: parse, hand over, describe.

A step has 2048 responses of 8192 tokens, and a version goes to 16 engines of 8 ranks. Each part is
timed once as it is and once in the straightforward way (``benchmarks/peers/tuples.py``), beside
its limit: a copy in memory of the same bytes, or XXH3 over them in one run. The samples and the
bytes of the weights are ``--factor`` times fewer, and the times grow with their number; the
messages are all there. CPU seconds are for machines that others use too; of what one process does,
they are also the time that it keeps Python's lock.
"""

import argparse
import gc
import json
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist
import xxhash

from qurl_megatron.bench.peer import peer
from qurl_megatron.bench.random_model import config_of
from qurl_megatron.bench.record import Case, Figure
from qurl_megatron.bench.repeats import Repeats, interleaved, progress
from qurl_megatron.config import ParallelConfig
from qurl_megatron.data.pack import pack_samples
from qurl_megatron.data.responses import Responses, Summary
from qurl_megatron.fleet.answer import Asked, Part, Rules, read_answers, uncollected
from qurl_megatron.planning.publish_model import tensors
from qurl_megatron.publish import routes
from qurl_megatron.runtime.launch import launch
from qurl_megatron.tensors.arch import read_arch
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.tensors.table import hf_tensor
from qurl_megatron.types import Prompt, Sample
from qurl_megatron.wire.message import Blob, Message, Piece, encoded, fill, lay_out, payload
from qurl_megatron.wire.naming import Names

RESPONSES, TOKENS, PROMPT_TOKENS, GROUP = 2048, 8192, 256, 16
ENGINES, ENGINE_RANKS, TRAINER_RANKS, BUCKET_MB = 16, 8, 8, 256
VOCABULARY = 152064
MIB = 1 << 20
PARALLEL = ParallelConfig(tensor=2, data=2)  # of the ranks that samples are handed to
tuples = peer("tuples")  # at once: a rank that unpickles its samples must be able to import it


def timed(act: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, CPU seconds of this process, and what came of it."""
    gc.collect()
    start, work = time.perf_counter(), time.process_time()
    result = act()
    return time.perf_counter() - start, time.process_time() - work, result


def copied(size: int) -> float:
    """CPU seconds of a plain copy of so many bytes, page faults left out."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return min(timed(lambda: np.copyto(target, source))[1] for _ in range(3))


Seconds = Sequence[float] | np.ndarray
"""Of the clock and of a CPU; what follows does not matter."""


def row(old: Seconds, new: Seconds, limit_s: float, factor: float, **numbers: float) -> dict:
    """One part; seconds are those of the whole step."""
    return {
        "tuples": {"seconds": factor * old[0], "work": factor * old[1]},
        "ours": {"seconds": factor * new[0], "work": factor * new[1]},
        "limit": factor * limit_s,
        "numbers": numbers,
    }


def answers(count: int, seed: int) -> bytes:
    """What SGLang answers to one group."""
    draw = np.random.default_rng(seed)
    found = []
    for index in range(count):
        ids = draw.integers(0, VOCABULARY, TOKENS).tolist()
        log_probs = (-draw.exponential(1, TOKENS)).astype(np.float32).tolist()
        meta = {
            "id": f"{index}",
            "finish_reason": {"type": "length", "length": TOKENS},
            "weight_versions": [{"version": "7@0", "start": 0, "end": TOKENS}],
            "output_token_logprobs": [[p, i, None] for p, i in zip(log_probs, ids, strict=True)],
        }
        found.append({"text": "", "output_ids": ids, "meta_info": meta})
    return orjson.dumps(found)


def parse(prompts: list[Prompt], content: bytes) -> list[Sample]:
    """As ``fleet.collect`` does it."""
    with uncollected():
        asked = [Asked(f"{index}", TOKENS) for index in range(len(prompts))]
        read = read_answers(content, asked, Rules(VOCABULARY, Names("0"), 7, 7))
        parts = [part for part in read if isinstance(part, Part)]
    return [
        Sample(prompt, part.ids, part.log_probs, part.finish, part.versions)
        for prompt, part in zip(prompts, parts, strict=True)
    ]


def parsing(factor: int) -> tuple[dict, list, list]:
    """Engines' answers into samples; also the samples in both forms."""
    draw = np.random.default_rng(0)
    old_samples: list[Any] = []
    new_samples: list[Sample] = []
    size = 0
    old, new = np.zeros(2), np.zeros(2)
    for index in range(RESPONSES // factor // GROUP):
        prompt = Prompt(index, tuple(draw.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()), "", "")
        content, prompts = answers(GROUP, index), [prompt] * GROUP
        size += len(content)
        *seconds, samples = timed(partial(tuples.parse, prompts, content))
        old, old_samples = old + seconds, old_samples + samples
        *seconds, samples = timed(partial(parse, prompts, content))
        new, new_samples = new + seconds, new_samples + samples
    return (
        row(old, new, copied(size), factor, json_bytes=factor * size),
        old_samples,
        new_samples,
    )


def halves(summary: Summary) -> list[list[int]]:
    """Every other response to each of two data-parallel ranks."""
    return [list(range(rank, len(summary), PARALLEL.data)) for rank in range(PARALLEL.data)]


def hand_over(folder: Path, factor: int) -> int:
    """On every rank: the leading one has the samples, then all have what they train on."""
    from qurl_megatron.runtime.megatron import megatron_runtime
    from qurl_megatron.training.delivery import deliver

    with megatron_runtime(PARALLEL) as ranks:
        read = folder / "samples.pickle"
        old_samples, new_samples = pickle.loads(read.read_bytes()) if ranks.leads else (None, None)
        dist.barrier()

        def pickled() -> None:
            box = [old_samples]
            dist.broadcast_object_list(box, src=0)
            dist.barrier()

        def delivered() -> Responses:
            whole = None if new_samples is None else Responses.of(new_samples)
            share = deliver(ranks, whole, halves)
            dist.barrier()
            return share

        *old, _ = timed(pickled)
        *new, share = timed(delivered)
        work = torch.tensor([old[1], new[1]])
        dist.all_reduce(work)  # CPU seconds of all ranks: they share the machine's cores
        old[1], new[1] = work.tolist()
        if ranks.leads:
            size = sum(x.nbytes for x in (share.tokens, share.behaviour)) * ranks.data.size
            numbers = {
                "old_bytes": factor * len(pickle.dumps(old_samples)),
                "new_bytes": factor * size,
            }
            found = row(old, new, copied(size), factor, **numbers)
            (folder / "handed.json").write_text(json.dumps(found))
    return 0


def handing(folder: Path, old_samples: list, new_samples: list, factor: int) -> dict:
    """The samples to four ranks over gloo, TP2 x DP2, two of which train on the same half."""
    (folder / "samples.pickle").write_bytes(pickle.dumps((old_samples, new_samples)))
    if launch(hand_over, (folder, factor), PARALLEL.world_size):
        raise RuntimeError("a rank failed; see above")
    return json.loads((folder / "handed.json").read_text())


def packing(old_samples: list, new_samples: list, factor: int) -> dict:
    """One microbatch after another into tensors, of all data ranks together."""
    whole = Responses.of(new_samples)
    pairs = [(i, i + 1) for i in range(0, len(whole), 2)]
    old = timed(lambda: [tuples.tensors([old_samples[i] for i in pair]) for pair in pairs])
    weights = [0.5, 0.5]
    new = timed(lambda: [pack_samples(whole, weights, indices=pair) for pair in pairs])
    for (ids, log_probs), batch in zip(old[2], new[2], strict=True):
        assert torch.equal(ids, batch.input_ids[0]) and torch.equal(log_probs, batch.behaviour)
    size = sum(x.nbytes for pair in old[2] for x in pair)
    return row(old, new, copied(size), factor, bytes=factor * size)


def bucket_blobs() -> list[list[Blob]]:
    """What eight training ranks say of every bucket of an INT8 version of 32B, as files."""
    arch = read_arch(config_of("32B"))
    version = tensors(arch, "int8")
    layout = routes.Layout(tensor=TRAINER_RANKS)
    blobs: list[list[Blob]] = [[] for _ in range(TRAINER_RANKS)]
    for rank in range(TRAINER_RANKS):
        parts, sizes = [], []
        for name, (shape, element) in version.items():
            tensor = hf_tensor(arch, name)
            part = routes.trainer_part(arch, tensor, shape, layout, 0, rank)
            if part is None:
                continue
            dim = tensor.split_dim
            start = 0 if dim is None else part.starts[dim]
            dtype = {1: "int8", 2: "bfloat16", 4: "float32"}[element]
            digest = xxhash.xxh3_128_hexdigest(f"{rank}/{name}".encode())
            parts.append(Piece(name, dtype, part.sizes, dim, start, 0, digest))
            sizes.append(parts[-1].bytes)
        for index, run in enumerate(routes.buckets(sizes, BUCKET_MB * MIB)):
            where = {"path": f"/dev/shm/qurl/v7/tp{rank}-{index:05d}.safetensors", "offset": 4096}
            blob = Blob(where, sum(sizes[i] for i in run), tuple(parts[i] for i in run))
            blobs[rank].append(blob)
    rounds = max(map(len, blobs))
    return [[each[index] for each in blobs if index < len(each)] for index in range(rounds)]


def messages(buckets: list[list[Blob]], factor: int) -> dict:
    """The bodies of all calls that bring one version to all engines."""

    def message(engine: int, index: int, blobs: Any) -> Message:
        transport = {"kind": "files", "receipts": "/dev/shm/qurl/receipts"}
        return Message("bucket", f"v7-engine-{engine}-0123abcd", 7, index, transport, blobs)

    def straightforward() -> int:
        return sum(
            len(tuples.message_body(message(engine, index, tuple(blobs)), ENGINE_RANKS))
            for index, blobs in enumerate(buckets)
            for engine in range(ENGINES // factor)
        )

    def ours() -> int:
        size = 0
        for index, blobs in enumerate(buckets):
            shared = encoded(blobs)
            for engine in range(ENGINES):
                rows = payload([message(engine, index, shared)] * ENGINE_RANKS)
                size += len(orjson.dumps({"serialized_named_tensors": rows}))
        return size

    seconds, work, size = timed(straightforward)
    new = timed(ours)
    old = (factor * seconds, factor * work)
    return row(
        old,
        new,
        copied(new[2] // 8) * 8,
        1,
        old_bytes=factor * size,
        new_bytes=new[2],
        pieces=sum(len(blob.pieces) for blobs in buckets for blob in blobs),
    )


def hashing(size: int, factor: int) -> dict:
    """One training rank's pieces into a blob with their checksums; it has only ever been so."""
    weights = [torch.randint(-127, 128, (4 * MIB,), dtype=torch.int8) for _ in range(16)]
    weights *= max(1, size // (factor * TRAINER_RANKS * 64 * MIB))
    pieces, total = lay_out(Shard.whole(f"w{i}", w) for i, w in enumerate(weights))
    blob = torch.ones(total, dtype=torch.uint8)
    seconds = timed(lambda: fill(blob, pieces, weights))
    limit = copied(total) + timed(lambda: xxhash.xxh3_128_digest(blob.numpy().data))[1]
    return row(seconds, seconds, limit, size / TRAINER_RANKS / total, bytes=size // TRAINER_RANKS)


def parts(factor: int) -> dict[str, dict]:
    """Every part once."""
    buckets = bucket_blobs()
    found = {
        "messages": messages(buckets, min(factor, ENGINES)),
        "hash": hashing(sum(b.bytes for blobs in buckets for b in blobs), factor),
    }
    found["parse"], old_samples, new_samples = parsing(factor)
    found["pack"] = packing(old_samples, new_samples, factor)
    with tempfile.TemporaryDirectory(prefix="qurl-scale-") as folder:
        found["hand over"] = handing(Path(folder), old_samples, new_samples, factor)
    return found


def run(options: argparse.Namespace) -> list[Case]:
    """A case per part and way."""
    calls = {"step": lambda: parts(options.factor)}
    rounds = interleaved(
        calls,
        repeats=options.repeats,
        warm_up=0,
        seen=lambda _, found: progress(f"parse: {found['parse']['ours']['work']:.2f} CPU s"),
    )["step"]
    return [
        case_of(part, way, rounds, options.factor)
        for part in rounds.results[0]
        for way in ("ours", "tuples")
        if (part, way) != ("hash", "tuples")  # it has only ever been so
    ]


def case_of(part: str, way: str, rounds: Repeats[dict], factor: int) -> Case:
    found = [each[part] for each in rounds.results]
    return Case(
        name=f"{part}, {way}",
        keys={"part": part, "way": way, "factor": factor},
        figures=[
            Figure(
                name="work",
                unit="CPU s",
                better="lower",
                repeats=[each[way]["work"] for each in found],
                limit=min(each["limit"] for each in found),
                limit_of="XXH3 and a copy" if part == "hash" else "a copy",
            ),
            Figure(
                name="seconds",
                unit="s",
                better="lower",
                repeats=[each[way]["seconds"] for each in found],
            ),
        ],
        yardsticks=rounds.yardsticks,
        reasons=rounds.reasons,
        notes=found[0]["numbers"],
    )
