"""Forwards requests to a vLLM server, by its completions over token ids.

In: requests of policies with the engine's base. A LoRA version is loaded when it is first asked
for, under a name of its own from a copy of its files, and unloaded when others need its place. A
full version is loaded by a receiver: the engine samples for the version that its receiver says it
serves. Nothing is asked twice: a caller that gets UNAVAILABLE asks again. Read against vLLM 0.26.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx

from ratoon.config import SamplingEngineConfig
from ratoon.errors import ErrorCode, RatoonError, shown, unsupported
from ratoon.log import get_logger
from ratoon.sampler.port import Weights, check_waiting
from ratoon.stream.files import link_or_copy
from ratoon_proto.types import (
    LoraTuning,
    ReceiverInfo,
    SampledSequence,
    SampleResult,
    SamplingParams,
    StopReason,
)

_LOG = get_logger("sampler")
_CALL_S, _LOAD_S = 30.0, 300.0
# Key in `details` of the engine's own status, and the status for a model that it does not have.
_STATUS, _UNKNOWN = "engine_status", "404"
_SHOWN_CHARACTERS = 300
_NO_TARGETS = "none: the engine knows log-probs of the prompt's own and the most likely tokens"
_NAME = re.compile(r"ratoon\..+\.v\d+\.[0-9a-f]{8}")
# Names the receivers of a policy, as they last acknowledged.
Receivers = Callable[[str], Awaitable[tuple[ReceiverInfo, ...]]]


@dataclass(slots=True, eq=False)
class _Adapter:
    """A version that the engine has, or is to have; `users`: requests that are under way."""

    name: str
    users: int = 0
    is_loaded: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class EngineSampler:
    """A `port.Sampler`, on one event loop."""

    def __init__(
        self, config: SamplingEngineConfig, *, receivers: Receivers, copies: Path, max_waiting: int
    ) -> None:
        """`copies`: a folder, which the engine sees too, for the files of adapters that it has.
        `max_waiting`: requests, beyond which others are refused."""
        self._config, self._receivers = config, receivers
        self._copies, self._max_waiting = copies, max_waiting
        self._num_waiting = 0
        self._turns = asyncio.Semaphore(config.max_in_flight)
        # By name, the one that was asked for the longest ago first.
        self._adapters: dict[str, _Adapter] = {}
        self._base_name = ""
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        # A connection that is kept may end just as it is used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=config.url, headers=headers, trust_env=False, limits=limits
        )

    async def sample(
        self, weights: Weights, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> SampleResult:
        """See `port.Sampler`. Raises INVALID_ARGUMENT too, with what the engine says to refuse."""
        if sampling.target_tokens:
            raise unsupported("sampling.target_tokens", "some", _NO_TARGETS)
        check_waiting(self._num_waiting, self._max_waiting, "engine")
        self._num_waiting += 1
        try:
            async with self._turns, self._model(weights) as name:
                body = request_of(name, prompt, sampling)
                answer = await self._post("/v1/completions", body, timeout_s=None)
        finally:
            self._num_waiting -= 1
        try:
            return result_of(answer, prompt, sampling, weights.version)
        except (KeyError, TypeError, ValueError, IndexError) as err:
            raise self._away(f"an answer that is none: {err!r}") from err

    async def close(self) -> None:
        """Adapters are unloaded; those of a process that is killed are found by the next one."""
        await self._make_room(keeps=0)
        await self._http.aclose()

    @asynccontextmanager
    async def _model(self, weights: Weights) -> AsyncIterator[str]:
        """What the engine calls the weights, which it has within the context."""
        is_lora = isinstance(weights.model.tuning, LoraTuning)
        if weights.version is None and (is_lora or self._config.receiver_id is None):
            yield await self._base()
            return
        if is_lora:
            async with self._adapter(weights) as name:
                yield name
            return
        if weights.version is None:
            text = "base: the engine has a version of this policy in its place"
            expected = "a policy with an adapter, or one that no engine samples for"
            raise unsupported("base", "true", expected, text)
        await self._check_served(weights)
        yield await self._base()
        # A request that was under way while weights changed would be of neither version.
        await self._check_served(weights)

    async def _base(self) -> str:
        if not self._base_name:
            for model in await self._models():
                if model.get("parent") is None:
                    self._base_name = str(model["id"])
        if not self._base_name:
            raise self._away("it names no model")
        return self._base_name

    async def _check_served(self, weights: Weights) -> None:
        receiver_id = self._config.receiver_id
        if receiver_id is None:
            text = "the sampling engine of this base has no `receiver_id`: it samples for adapters"
            raise RatoonError(ErrorCode.UNSUPPORTED, text, field="policy_id")
        known = {each.receiver_id: each for each in await self._receivers(weights.policy_id)}
        served = known.get(receiver_id)
        if served is None:
            raise self._away(f"no receiver {shown(receiver_id)} of the policy has answered yet")
        is_changing = served.holds_version not in (None, served.version)
        if is_changing or served.version != weights.version:
            raise self._away(f"it serves version {served.version}, not {weights.version}")

    @asynccontextmanager
    async def _adapter(self, weights: Weights) -> AsyncIterator[str]:
        name = f"ratoon.{weights.policy_id}.v{weights.version}.{weights.digest[:8]}"
        await self._know()
        adapter = self._adapters.pop(name, None) or _Adapter(name)
        self._adapters[name] = adapter
        adapter.users += 1
        try:
            async with adapter.turn:
                if not adapter.is_loaded:
                    await self._make_room(self._config.max_adapters - 1)
                    await self._load(adapter, weights)
            yield name
        except RatoonError as err:
            # An engine that was started anew knows no such model.
            if err.details.get(_STATUS) == _UNKNOWN:
                adapter.is_loaded = False
            raise
        finally:
            adapter.users -= 1
            if not (adapter.is_loaded or adapter.users):
                self._adapters.pop(name, None)

    async def _know(self) -> None:
        """Learn which versions the engine has since before this process began."""
        if self._base_name:
            return
        for model in await self._models():
            name = str(model.get("id"))
            if _NAME.fullmatch(name):
                self._adapters.setdefault(name, _Adapter(name, is_loaded=True))
        await self._base()

    async def _make_room(self, keeps: int) -> None:
        """Unload what was asked for the longest ago, and is not in use, but for `keeps`."""
        loaded = [each for each in self._adapters.values() if each.is_loaded]
        unused = [each for each in loaded if not each.users]
        for adapter in unused[: max(0, len(loaded) - keeps)]:
            del self._adapters[adapter.name]
            # An engine that was started anew does not have it.
            with suppress(RatoonError):
                await self._post("/v1/unload_lora_adapter", {"lora_name": adapter.name})
            await asyncio.to_thread(shutil.rmtree, self._copies / adapter.name, True)

    async def _load(self, adapter: _Adapter, weights: Weights) -> None:
        assert weights.folder is not None, "a version has files"
        place = self._copies / adapter.name
        try:
            await asyncio.to_thread(_copy, weights.folder, place)
        except OSError as err:
            text = f"version {weights.version} cannot be read any more, or not yet"
            raise RatoonError(ErrorCode.UNAVAILABLE, text) from err
        body = {"lora_name": adapter.name, "lora_path": str(place)}
        try:
            await self._post("/v1/load_lora_adapter", body, timeout_s=_LOAD_S)
        except RatoonError as err:
            # What was loaded before a call that was lost is there under its name.
            names = [str(model.get("id")) for model in await self._models()]
            if adapter.name not in names:
                raise self._away(f"it does not load version {weights.version}: {err}") from err
        adapter.is_loaded = True
        _LOG.info("adapter loaded", name=adapter.name)

    async def _models(self) -> list[dict[str, Any]]:
        answer = await self._call("GET", "/v1/models", None, _CALL_S)
        return cast("list[dict[str, Any]]", answer.get("data") or [])

    async def _post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = _CALL_S
    ) -> dict[str, Any]:
        return await self._call("POST", path, body, timeout_s)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> dict[str, Any]:
        """Raises UNAVAILABLE, and INVALID_ARGUMENT where the engine says that the call is wrong."""
        timeout = httpx.Timeout(timeout_s, connect=_CALL_S)
        try:
            answer = await self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as err:
            raise self._away(f"no answer to {path}: {err!r}") from err
        text = answer.text[:_SHOWN_CHARACTERS]
        if answer.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
            raise RatoonError(ErrorCode.INVALID_ARGUMENT, f"the engine refuses: {text}")
        if not answer.is_success:
            status = str(answer.status_code)
            raise self._away(f"{path} answered {status}: {text}", {_STATUS: status})
        try:
            said: object = answer.json()
        except ValueError:
            return {}
        return cast("dict[str, Any]", said) if isinstance(said, dict) else {}

    def _away(self, what: str, details: Mapping[str, str] | None = None) -> RatoonError:
        return RatoonError(ErrorCode.UNAVAILABLE, f"the sampling engine: {what}", details=details)


def request_of(name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> dict[str, Any]:
    """The body of vLLM's /v1/completions. Pure."""
    body: dict[str, Any] = {
        "model": name,
        "prompt": [*prompt],
        "n": sampling.num_samples,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "stop_token_ids": [*sampling.stop_token_ids],
        "stop": [*sampling.stop],
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
        "return_token_ids": True,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.prompt_logprobs or sampling.topk_prompt_logprobs:
        body["prompt_logprobs"] = sampling.topk_prompt_logprobs
    return body


def result_of(
    answer: Mapping[str, Any],
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    version: int | None,
) -> SampleResult:
    """What vLLM has answered to `request_of`. Pure; raises whatever a malformed answer causes."""
    choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
    if len(choices) != sampling.num_samples:
        raise ValueError(f"{len(choices)} sequences")
    sequences = tuple(_sequence(choice) for choice in choices)
    own, top_tokens, top_logprobs = list[float](), list[int](), list[float]()
    k = sampling.topk_prompt_logprobs
    if sampling.prompt_logprobs or k:
        places: list[dict[str, Any] | None] = choices[0]["prompt_logprobs"]
        if len(places) != len(prompt):
            raise ValueError(f"{len(places)} log-probs of the prompt")
        for token, place in zip(prompt, places, strict=True):
            known = {} if place is None else place
            own.append(float(known[str(token)]["logprob"]) if known else math.nan)
            ranked = sorted(known.items(), key=lambda item: int(item[1]["rank"]))[:k]
            top_tokens += [int(one) for one, _ in ranked] if known else [0] * k
            found = [float(said["logprob"]) for _, said in ranked]
            top_logprobs += found if known else [math.nan] * k
    return SampleResult(
        sequences=sequences,
        version=version,
        prompt_logprobs=tuple(own) if sampling.prompt_logprobs else (),
        topk_prompt_tokens=tuple(top_tokens),
        topk_prompt_logprobs=tuple(top_logprobs),
        target_logprobs=(),
    )


def _sequence(choice: Mapping[str, Any]) -> SampledSequence:
    tokens = tuple(int(token) for token in choice["token_ids"])
    logprobs = tuple(float(value) for value in choice["logprobs"]["token_logprobs"])
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(logprobs)} log-probs of {len(tokens)} tokens")
    # An abort, and whatever else there may be, is no sequence.
    reason = StopReason(choice["finish_reason"])
    return SampledSequence(tokens=tokens, logprobs=logprobs, stop_reason=reason)


def _copy(folder: Path, place: Path) -> None:
    """The files of a version at `place`, which stay when the version goes."""
    making = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(folder, making, copy_function=link_or_copy)
    shutil.rmtree(place, ignore_errors=True)
    making.rename(place)
