"""One new version on its way into the engines of a fleet, driven by the leading rank.

    pause -> "updating-7@run" -> begin -> bucket, ... -> check -> finish, end, flush -> "7@run"
    -> go on

In between, an engine calls its weights "updating-7@run", so that an answer from mixed weights would
show. Every engine rank leaves a receipt. An engine gets the new name and traffic only if all its
ranks have every tensor, exactly once and undamaged. An engine that fails stays paused and is named,
and the others continue without it.
"""

import functools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from qurl_megatron.config.sections import SyncConfig
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.fleet import EngineRecord, Fleet
from qurl_megatron.observe.metrics import Max, Metric, Sum
from qurl_megatron.wire.message import Action, Message, Receipt, Turn, payload
from qurl_megatron.wire.transport import Failures

BlobsFor = Callable[[EngineRecord, int], bytes]
"""(engine, its rank) -> the training ranks' blobs for it in one bucket, ``encoded``."""


class Update:
    """Make one per version. All methods are called from one thread.

    A bucket loads in the background while the caller prepares the next.
    """

    def __init__(
        self,
        fleet: Fleet,
        engines: Sequence[EngineRecord],
        version: int,
        config: SyncConfig,
        describe: Callable[[str, int], dict[str, Any]],
        *,
        stage: bool = False,
    ) -> None:
        """
        Args:
            engines: those that take part.
            describe: ``Sender.describe``.
            stage: load no bucket before ``commit``.
        """
        self.fleet, self.version, self.config = fleet, version, config
        self.engines = list(engines)  # still taking part
        self._describe = describe
        self.turns: Mapping[str, Turn] = {}  # ``Sender.arrange``'s
        self._settled = {engine.name for engine in engines if engine.state == "serving"}
        token = secrets.token_hex(4)
        self._session = {engine.name: f"v{version}-{engine.name}-{token}" for engine in engines}
        self._stage = stage
        self._staged: list[BlobsFor] = []
        self._buckets = 0
        self._started_at: float | None = None
        self._committed = False
        self._background = ThreadPoolExecutor(1, thread_name_prefix="update")
        self._loading: Future | None = None

    def __enter__(self) -> "Update":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._background.shutdown()
        if self._started_at is not None and not self._committed:
            # They are paused, with weights of both versions: nobody may wait for their answers.
            for engine in self.engines:
                if engine.state == "serving":
                    self.fleet.fail(engine, f"version {self.version} was given up: {error}")

    @property
    def sizes(self) -> dict[str, int]:
        """Tensor-parallel sizes of the engines that still take part."""
        return {engine.name: engine.tp for engine in self.engines}

    def drop(self, failures: Iterable[Failures]) -> None:
        """Continue without the engines that a training rank cannot reach."""
        for unreached in filter(None, failures):
            for engine in self.engines:
                if engine.name in unreached:
                    self.fleet.fail(engine, unreached[engine.name])
            self.engines = [engine for engine in self.engines if engine.name not in unreached]

    def begin(self) -> None:
        """Pause the engines; those that fail take no part."""
        if self._started_at is None:
            self._started_at = time.monotonic()
            self._each(self._begin, "beginning")

    def connect(self) -> None:
        """Have the engines open their ends of the transport while the ranks open theirs."""
        self._start(lambda engine: self._call(engine, "connect", 0), "connecting")

    def bucket(self, blobs: BlobsFor) -> None:
        """Have the engines load one more bucket once they are done with the last one.

        Raises:
            EngineError: no engine is left.
        """
        if self._stage:
            self._staged.append(blobs)
            return
        self.wait()
        index, self._buckets = self._buckets, self._buckets + 1
        self._start(lambda engine: self._call(engine, "bucket", index, blobs), "loading")

    def wait(self) -> None:
        """Wait until the engines are done with the last bucket."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()

    def commit(self, receipts: Callable[[str, int], list[Receipt]]) -> dict[str, Metric]:
        """Have every engine that has all of the version serve it.

        Args:
            receipts: ``Sender.receipts``.

        Returns:
            Seconds in the loader, of the slowest engine rank; seconds from the first pause until
            the last engine resumed; bytes copied into live parameters, over all engine ranks.

        Raises:
            EngineError: no engine has all of it; names the missing tensors of each.
        """
        self._stage = False
        for blobs in self._staged:
            self.bucket(blobs)
        self.wait()
        receipts_by_engine: dict[str, list[Receipt]] = {}
        failures: dict[str, int] = {}

        def commit(engine: EngineRecord) -> None:
            self._call(engine, "check", self._buckets)
            receipts_by_engine[engine.name] = receipts(self._session[engine.name], engine.tp)
            self._approve(engine, receipts_by_engine[engine.name])
            self._call(engine, "finish", self._buckets)
            self._approve(engine, receipts(self._session[engine.name], engine.tp))
            client = engine.api
            client.end_weight_update()
            if self.config.pause == "retract":
                client.flush()
            name = self.fleet.names.of(self.version)
            client.set_weight_version(name)
            served = client.weight_version()
            if served != name:
                raise EngineError(f"{engine.url} serves version {served!r} after the update")
            failures[engine.name] = engine.failures
            client.resume()

        self._each(commit, "committing")
        assert self._started_at is not None, "a bucket has come"
        with self.fleet.lock:
            # An engine may have failed a request while others were still committing.
            self.engines = [e for e in self.engines if e.failures == failures[e.name]]
            if not self.engines:
                raise EngineError(f"version {self.version} is not served: {self.fleet.why_not()}")
            self.fleet.confirm(self.engines, self.version)
        self._committed = True
        receipts_left: list[Receipt] = []
        for engine in self.engines:
            receipts_left += receipts_by_engine[engine.name]
        return {
            "sync/load_s": Max(max(receipt.seconds for receipt in receipts_left)),
            "sync/paused_s": Max(time.monotonic() - self._started_at),
            "sync/loaded_bytes": Sum(sum(receipt.bytes for receipt in receipts_left)),
        }

    def _start(self, act: Callable[[EngineRecord], object], doing: str) -> None:
        def begin_and_act() -> None:
            self.begin()
            self._each(act, doing)

        self._loading = self._background.submit(begin_and_act)

    def _begin(self, engine: EngineRecord) -> None:
        engine.api.pause(self.config.pause)
        engine.api.set_weight_version(self.fleet.names.updating(self.version))
        engine.api.begin_weight_update()

    def _call(
        self, engine: EngineRecord, action: Action, index: int, blobs: BlobsFor | None = None
    ) -> None:
        session, transport = self._session[engine.name], self._describe(engine.name, engine.tp)
        turn = self.turns.get(engine.name, (0, 1))
        message = Message(action, session, index, transport, turn=turn)
        # Where all ranks get the same blobs, their payload is made once.
        payload_of = functools.cache(functools.partial(payload, message))
        payloads = [payload_of(blobs(engine, rank) if blobs else b"") for rank in range(engine.tp)]
        engine.api.update_weights_from_tensor(payloads)

    def _approve(self, engine: EngineRecord, receipts: Sequence[Receipt]) -> None:
        """Raise EngineError unless every rank has everything, at unchanged addresses."""
        errors = [f"rank {r.rank}: {r.error}" for r in receipts if r.error is not None]
        if errors:
            raise EngineError(f"{engine.url} rejects version {self.version}: {'; '.join(errors)}")
        pointers = tuple(receipt.pointers for receipt in receipts)
        # An engine of ours still has the same process. An adopted one that did not serve may have
        # been started again.
        same = engine.process is not None or engine.name in self._settled
        if same and engine.pointers not in ((), pointers):
            raise EngineError(
                f"{engine.url} moved its parameters; captured CUDA graphs would read old weights",
                faulty=True,
            )
        engine.pointers = pointers

    def _each(self, act: Callable[[EngineRecord], object], doing: str) -> None:
        purpose = f"{doing} version {self.version}"
        succeeded = self.fleet.each(act, purpose, self.engines)
        self.engines = [engine for engine in self.engines if engine in succeeded]
