"""One client for SGLang's HTTP protocol: embedded engines and real SGLang servers alike."""

from collections.abc import Sequence
from pathlib import Path

import httpx

CONTROL_TIMEOUT_S = 60.0  # pause, abort, info: answered between two decode steps


class EngineError(RuntimeError):
    """An engine did not do what it was asked: which one, at which endpoint, with what answer."""


class EngineClient:
    """Blocking and thread-safe. Every failure is an EngineError that names the engine."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # trust_env=False: a proxy configured for the internet must not get traffic for 127.0.0.1.
        limits = httpx.Limits(
            max_keepalive_connections=0
        )  # a restarted engine leaves no dead socket
        self._http = httpx.Client(
            base_url=self.url, timeout=timeout_s, headers=headers, trust_env=False, limits=limits
        )

    def close(self) -> None:
        self._http.close()

    def healthy(self, timeout_s: float = 5.0) -> bool:
        try:
            return self._http.get("/health", timeout=timeout_s).status_code == 200
        except httpx.HTTPError:  # not up yet, or gone: that is the answer
            return False

    def server_info(self) -> dict:
        return self._request("GET", "/get_server_info", timeout_s=CONTROL_TIMEOUT_S).json()

    def weight_version(self) -> str:
        version = self.server_info().get("weight_version")
        if version is None:  # SGLang releases differ in where they tell it
            version = (
                self._request("GET", "/get_model_info", timeout_s=CONTROL_TIMEOUT_S)
                .json()
                .get("weight_version")
            )
        if version is None:
            raise EngineError(f"{self.url} reports no weight_version; this server is too old")
        return str(version)

    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: dict | Sequence[dict],
        *,
        rid: Sequence[str] | None = None,
    ) -> list[dict]:
        """Responses with log-probs, in the order of the prompts, then of their samples."""
        params = sampling_params if isinstance(sampling_params, dict) else list(sampling_params)
        body = {
            "input_ids": [list(ids) for ids in input_ids],
            "sampling_params": params,
            "return_logprob": True,
        }
        if rid is not None:
            body["rid"] = list(rid)
        answer = self._request("POST", "/generate", body).json()
        if not isinstance(answer, list):
            raise EngineError(f"{self.url}/generate answered a batch with {type(answer).__name__}")
        return answer

    def pause(self, mode: str = "retract") -> None:
        self._request("POST", "/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_S)

    def resume(self) -> None:
        self._request("POST", "/continue_generation", {}, CONTROL_TIMEOUT_S)

    def flush(self) -> None:
        self._request("POST", "/flush_cache", {}, CONTROL_TIMEOUT_S)

    def update_weights_from_disk(
        self, folder: Path | str, version: int | str, *, flush_cache: bool = True
    ) -> None:
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": flush_cache,
        }
        answer = self._request("POST", "/update_weights_from_disk", body).json()
        if not answer.get("success"):
            raise EngineError(
                f"{self.url}/update_weights_from_disk failed: {answer.get('message')}"
            )

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort the requests whose id starts with ``rid``, or all of them."""
        body = {"rid": rid, "abort_all": everything}
        self._request("POST", "/abort_request", body, CONTROL_TIMEOUT_S)

    def _request(
        self, method: str, endpoint: str, body: dict | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        try:
            response = self._http.request(method, endpoint, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise EngineError(f"{self.url}{endpoint} did not answer: {reason}") from error
        if response.status_code != 200:
            message = _message(response)
            raise EngineError(f"{self.url}{endpoint} answered {response.status_code}: {message}")
        return response


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    if not isinstance(body, dict):
        return response.text[:500]
    error = body.get("error")
    return str(error.get("message") if isinstance(error, dict) else body.get("message", body))
