"""The same load through GuideLLM, an independent load generator, for figures to stand beside ours.

It is started as a process of its own, from an environment of its own, with a file of prompts and
lengths; what it reports of each request is read into a ``TimedAnswer``, so that one arithmetic
serves both. It reports when a response's first and last token came, not those between, and sends
text to ``/v1/completions``. Its report has every body that it sent, and those are held against what
it was asked to send.
"""

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qurl_megatron.bench.load.drive import LOOK_S, Looking
from qurl_megatron.bench.load.outcome import LoadOutcome, Look, TimedAnswer
from qurl_megatron.bench.load.requests import Ask, Clients
from qurl_megatron.errors import ConfigError
from qurl_megatron.fleet.client import EngineClient, EngineError, Session
from qurl_megatron.observe.clock import now
from qurl_megatron.runtime.event_loop import run

VERSION = "0.8.1"  # whose scenario files and reports these are
AROUND_S = 300.0  # to start, to find the engine and to write its report, on a busy machine

Texts = Callable[[Sequence[int]], str]


def program(given: str) -> str:
    """Its executable.

    Args:
        given: a path, or a name to look up.

    Raises:
        ConfigError: there is none.
    """
    found = shutil.which(given)
    if found is None:
        raise ConfigError(
            f"--guidellm {given} is not a program; install it in an environment of its own "
            f"(python3 -m venv DIR && DIR/bin/pip install guidellm=={VERSION}) and give "
            "--guidellm DIR/bin/guidellm"
        )
    return found


class GuideLLM:
    """One load on one engine."""

    def __init__(self, program: str, client: EngineClient, look: Looking, texts: Texts) -> None:
        """
        Args:
            texts: what the engine reads as these ids.
        """
        self._program, self._client, self._look, self._texts = program, client, look, texts
        self._looks: list[Look] = []

    def drive(self, asks: Sequence[Ask], clients: Clients) -> LoadOutcome:
        """
        Raises:
            ConfigError: it did not come to an end, or its report cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="qurl-guidellm-") as work:
            folder = Path(work)  # only we may read it, the engine's key too
            asked = [(self._texts(ask.prompt), ask) for ask in asks]
            rows = [{"prompt": text, "output_tokens_count": ask.tokens} for text, ask in asked]
            data = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "asks.jsonl").write_text(data, encoding="utf-8")
            spec = scenario(self._client, len(asks), clients, folder)
            (folder / "scenario.json").write_text(json.dumps(spec), encoding="utf-8")
            run(self._run(folder, patience(clients, len(asks), self._client.timeout_s)))
            try:
                report = json.loads((folder / "report.json").read_bytes())
                return read_report(report, asked, self._looks)
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise ConfigError(
                    f"--guidellm {self._program}: its report cannot be read ({error!r}); version "
                    f"{VERSION} is known to work"
                ) from None

    async def _run(self, folder: Path, limit_s: float) -> None:
        process = await asyncio.create_subprocess_exec(
            *(self._program, "run", "--config", "scenario.json"),
            *("--disable-console-interactive",),
            cwd=folder,
            env=_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        said = None
        try:
            async with self._client.session() as session:
                watching = asyncio.create_task(self._watch(session))
                async with asyncio.timeout(limit_s):
                    said, _ = await process.communicate()
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        except TimeoutError:
            raise ConfigError(
                f"--guidellm {self._program} did not end within {limit_s:g} s; see whether "
                f"{self._client.url} still answers, or give a longer --timeout"
            ) from None
        finally:
            if said is None:  # we are ending early: its workers go with it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
            raise ConfigError(
                f"--guidellm {self._program} ended with status {process.returncode}: "
                f"{lines[-1].strip() if lines else 'it said nothing'}"
            )

    async def _watch(self, session: Session) -> None:
        while True:
            # One that is busy may not answer now, and one that cannot be read was reported before.
            with contextlib.suppress(EngineError, LookupError, TypeError, ValueError):
                self._looks.append(await self._look(session, now()))
            await asyncio.sleep(LOOK_S)


def _environment() -> dict[str, str]:
    """Of the process: without this side's packages, and with no way to the internet."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    offline = {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*"}
    # Ten processes by default: on few cores they would take the engine's.
    workers = {"GUIDELLM__MAX_WORKER_PROCESSES": str(max(1, (os.cpu_count() or 1) // 2))}
    return {**workers, **kept, **offline}


def patience(clients: Clients, count: int, timeout_s: float) -> float:
    """Seconds in which ``count`` requests have ended, however slow the engine is.

    Its own limit is of a wait for bytes: an engine that sends one now and then never reaches it.
    """
    in_turn = math.ceil(count / (clients.at_once or count))
    # Arrivals at random may take longer than their rate says.
    arriving = 0.0 if clients.rate is None else 2 * count / clients.rate
    return AROUND_S + arriving + in_turn * timeout_s


def scenario(client: EngineClient, count: int, clients: Clients, folder: Path) -> dict[str, Any]:
    """Its configuration file, for the requests in ``folder``.

    Args:
        count: of the requests.
    """
    if clients.rate is not None:
        profile: dict[str, Any] = {"kind": "poisson", "rate": [clients.rate]}
    elif clients.at_once is not None:
        profile = {"kind": "concurrent", "streams": [clients.at_once]}
    else:
        profile = {"kind": "throughput", "max_concurrency": count}
    backend = {
        "kind": "openai_http",
        "target": client.url,
        "timeout": client.timeout_s,
        "request_format": "/v1/completions",
        "extras": {"body": {"temperature": 1.0}},
    }
    spec = {
        "backend": backend | ({} if client.api_key is None else {"api_key": client.api_key}),
        "profile": profile,
        "constraints": [{"kind": "max_requests", "count": count}],
        "data": [{"kind": "json_file", "path": str(folder / "asks.jsonl")}],
        "outputs": [{"kind": "json", "path": str(folder / "report.json")}],
    }
    return {"spec": spec}


def read_report(
    report: Mapping[str, Any], asked: Sequence[tuple[str, Ask]], looks: Sequence[Look] = ()
) -> LoadOutcome:
    """What came of a load, by its report.

    Args:
        asked: what it was asked to send, each with its prompt's text.
        looks: at the engine meanwhile, by the wall clock.

    Raises:
        LookupError, TypeError, ValueError: it is not a report of ``VERSION``.
    """
    (benchmark,) = report["benchmarks"]
    left: dict[tuple[str, int], list[Ask]] = defaultdict(list)
    for text, ask in reversed(asked):  # the first are taken first
        left[text, ask.tokens].append(ask)
    sent, unasked, odd, unnamed = [], 0, [], []
    for kind in ("successful", "errored", "incomplete"):
        for found in benchmark["requests"][kind]:
            if found["request_args"] is None:  # of those that got no answer
                if found["info"]["timings"]["request_start"] is not None:
                    unnamed.append((kind, found))
                continue
            body = json.loads(found["request_args"]).get("body") or {}
            waiting = left.get((body.get("prompt", ""), body.get("max_tokens", 0)))
            if not waiting or body.get("ignore_eos") is not True:
                unasked += 1
                continue
            ask = waiting.pop()
            sent.append((kind, found, ask))
            if kind == "successful" and found["prompt_tokens"] != len(ask.prompt):
                odd.append((found["prompt_tokens"], len(ask.prompt)))
    rest = (ask for waiting in left.values() for ask in waiting)
    sent += [(kind, found, ask) for (kind, found), ask in zip(unnamed, rest, strict=False)]
    if not sent:
        raise ValueError("it holds none of the requests")
    start = min(found["info"]["timings"]["request_start"] for _, found, _ in sent)
    answers = [_answer(kind, found, ask, start) for kind, found, ask in sent]
    over = start + max(answer.over for answer in answers)
    return LoadOutcome(
        answers,
        looks=[look for look in looks if start <= look.at <= over],
        client=None,
        sender=f"GuideLLM {report['metadata']['guidellm_version']}",
        unasked=_told(len(asked), len(sent), unasked, odd),
    )


def _told(asked: int, sent: int, unasked: int, odd: Sequence[tuple[int, int]]) -> str:
    told = []
    if sent < asked:
        told.append(f"{asked - sent} of {asked} requests were not sent")
    if unasked:
        told.append(f"{unasked} were sent that nobody asked for")
    if odd:
        read, were = odd[0]
        told.append(
            f"{len(odd)} prompts were read as others (the first: {read} tokens, not {were})"
        )
    return "; ".join(told)


def _answer(kind: str, found: Mapping[str, Any], ask: Ask, start: float) -> TimedAnswer:
    timings = found["info"]["timings"]
    due = None if ask.due is None else timings["targeted_start"]
    answer = TimedAnswer(ask, began=(due or timings["request_start"]) - start)
    ended = timings["request_end"]
    answer.ended = (timings["resolve_end"] if ended is None else ended) - start
    answer.cached = found.get("cached_tokens")
    if kind != "successful":
        answer.failure = str(found["info"].get("error") or "it was given up")
        return answer
    # Of the moments between it gives the number alone.
    answer.came(1, timings["first_token_iteration"] - start)
    answer.came(found["output_tokens"], timings["last_token_iteration"] - start)
    return answer
