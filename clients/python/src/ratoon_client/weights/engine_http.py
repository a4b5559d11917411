"""Calls of an inference engine over HTTP, by one receiver of this user on this machine.

What an engine answers counts where it is a success that the body does not deny; all else is an
EngineError that names the engine, the call and what came.
"""

from __future__ import annotations

import ipaddress
import json
import os
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import httpx
import xxhash

from ratoon_client.config import lock_folder
from ratoon_client.errors import EngineError, InvalidArgumentError
from ratoon_client.weights.disk import own_folder, take

_MAX_ANSWER_BYTES = 16 * 2**20
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`text` is the whole body."""

    status: int
    text: str

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the JSON object that came; empty where something else did."""
        try:
            body = json.loads(self.text)
        except ValueError:
            return {}
        return cast("dict[str, Any]", body) if isinstance(body, dict) else {}


class EngineHttp:
    """Holds the engine at `url` from construction to `close`, or as a context manager.

    Each call is bounded by its seconds, `call_s` where it has none of its own. Raises EngineError
    where another receiver of this user on this machine has the engine, and InvalidArgumentError
    where other users could hold its lock.
    """

    def __init__(self, url: str, *, api_key: str | None, call_s: float) -> None:
        parts = httpx.URL(url)
        if parts.scheme not in ("http", "https") or not parts.host:
            raise InvalidArgumentError("url", repr(url), "http://host:port or https://host:port")
        self._url = url.rstrip("/")
        self._call_s = call_s
        self._lock: int | None = _lock(parts)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A connection kept since the last version may end just as it is used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(headers=headers, trust_env=False, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Another receiver may take the engine."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            self._client.close()

    def _get(self, path: str) -> Answer:
        return self._checked(path, self._call("GET", path, None, self._call_s))

    def _find(self, path: str) -> Answer | None:
        """None where the engine has no such route."""
        answer = self._call("GET", path, None, self._call_s)
        return None if answer.status == httpx.codes.NOT_FOUND.value else self._checked(path, answer)

    def _post(
        self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Answer:
        return self._checked(path, self._call("POST", path, body, timeout_s or self._call_s))

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> Answer:
        # httpx bounds each read: an answer that trickles in would have no end.
        deadline = time.monotonic() + timeout_s
        data = bytearray()
        try:
            with self._client.stream(
                method, f"{self._url}{path}", json=body, timeout=timeout_s
            ) as response:
                for part in response.iter_bytes():
                    data += part
                    if len(data) > _MAX_ANSWER_BYTES or time.monotonic() > deadline:
                        raise EngineError(f"{self._url}: the answer to {path} has no end")
        except httpx.HTTPError as err:
            raise EngineError(f"{self._url}: no answer to {path}: {err!r}") from err
        return Answer(status=response.status_code, text=data.decode(errors="replace"))

    def _checked(self, path: str, answer: Answer) -> Answer:
        if not httpx.codes.is_success(answer.status) or answer.fields.get("success") is False:
            text = answer.text[:_SHOWN_CHARACTERS]
            raise EngineError(f"{self._url}: {path} answered {answer.status}: {text}")
        return answer


def _lock(url: httpx.URL) -> int:
    """A lock named after host and port; all names of this machine are one."""
    port = url.port or (443 if url.scheme == "https" else 80)
    address = f"{'localhost' if _is_this_machine(url.host) else url.host}:{port}"
    name = f"engine-{xxhash.xxh3_128_hexdigest(address.encode())}.lock"
    try:
        return take(own_folder(lock_folder()) / name)
    except BlockingIOError:
        text = "another receiver of this user on this machine has this engine"
        raise EngineError(f"{url}: {text}") from None


def _is_this_machine(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified
