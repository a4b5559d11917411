"""Requests forwarded to a vLLM server, over real HTTP."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ratoon.config import SamplingEngineConfig
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.sampler.port import Weights
from ratoon.sampler.remote import EngineSampler
from ratoon_proto.types import (
    FullTuning,
    LoraTuning,
    ReceiverInfo,
    SampledSequence,
    SampleResult,
    SamplingParams,
    StopReason,
)
from tests.client.fake_engine import FakeEngine, serving_engine
from tests.until import until

LORA = ModelSpec(
    base=PresetBase(name="tiny"),
    tuning=LoraTuning(rank=2, alpha=4.0),
    dtype=ModelDtype.FLOAT32,
    seed=0,
)
FULL = replace(LORA, tuning=FullTuning())
PROMPT = (5, 6, 7)


class CompletingEngine(FakeEngine):
    """Its tokens tell the bytes of the adapter that answers; `hold` keeps answers back.

    As vLLM, it reads an adapter's files again at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.broken: dict[str, Any] = {}
        # With which the next completions fail.
        self.statuses: list[int] = []

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path != "/v1/completions":
            return super().answer(path, body)
        with self.lock:
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        self.go_on.wait(30)
        with self.lock:
            self.running -= 1
            self.bodies.append(body)
            if self.statuses:
                return self.statuses.pop(0), {"error": "as told"}
            if body["model"] not in ("m", *self.loras):
                return 404, {"error": "no such model"}
            folder = self.loras.get(body["model"])
            data = b"b" if folder is None else (Path(folder) / "adapter").read_bytes()
        choices = [self._choice(index, [*data], body) for index in range(body["n"])]
        return 200, {"choices": choices[::-1]}

    def _choice(self, index: int, tokens: list[int], body: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": index,
            "token_ids": [*tokens, index],
            "logprobs": {"token_logprobs": [-0.5] * len(tokens) + [-0.25 * index]},
            "finish_reason": "stop" if index else "length",
        }
        if "prompt_logprobs" in body:
            # The likeliest tokens, and the prompt's own behind them.
            best = {"9": {"logprob": -0.1, "rank": 1}, "8": {"logprob": -0.2, "rank": 2}}
            places = [
                {str(token): {"logprob": -token / 8, "rank": 40}, **best}
                for token in body["prompt"][1:]
            ]
            choice["prompt_logprobs"] = [None, *places]
        return choice | self.broken


@pytest.fixture(name="engine")
def engine_fixture() -> Iterator[CompletingEngine]:
    engine = CompletingEngine()
    yield engine
    engine.go_on.set()


@asynccontextmanager
async def sampler_of(
    engine: CompletingEngine, folder: Path, *, max_waiting: int = 100, **config: Any
) -> AsyncIterator[tuple[EngineSampler, list[ReceiverInfo]]]:
    """A sampler, and the receivers that it is told of."""
    receivers: list[ReceiverInfo] = []

    async def known(policy_id: str) -> tuple[ReceiverInfo, ...]:
        assert policy_id == "p"
        return tuple(receivers)

    with serving_engine(engine) as url:
        sampler = EngineSampler(
            SamplingEngineConfig(url=url, base="tiny", **config),
            receivers=known,
            copies=folder / "copies",
            max_waiting=max_waiting,
        )
        yield sampler, receivers
        await sampler.close()


def adapter(folder: Path, version: int, data: bytes | None = None) -> Weights:
    """A published version, whose one file has `data`; its number otherwise."""
    place = folder / f"{version:08d}"
    place.mkdir(exist_ok=True)
    data = bytes([100 + version]) if data is None else data
    (place / "adapter").unlink(missing_ok=True)
    (place / "adapter").write_bytes(data)
    return Weights(
        policy_id="p",
        base="tiny",
        model=LORA,
        version=version,
        folder=place,
        digest=data.hex().ljust(32, "0"),
    )


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, **changes})


def first_token(result: SampleResult) -> int:
    return result.sequences[0].tokens[0]


async def code_of(call: Any) -> ErrorCode:
    with pytest.raises(RatoonError) as caught:
        await call
    return caught.value.code


async def test_a_request_and_its_answer(engine: CompletingEngine, tmp_path: Path) -> None:
    wanted = params(
        num_samples=2,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        seed=4,
        stop_token_ids=(1,),
        stop=("x",),
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
    )
    weights = adapter(tmp_path, 1)
    async with sampler_of(engine, tmp_path) as (sampler, _):
        result = await sampler.sample(weights, PROMPT, wanted)
        (body,) = engine.bodies
        assert body == {
            "model": body["model"],
            "prompt": [5, 6, 7],
            "n": 2,
            "max_tokens": 4,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "seed": 4,
            "stop_token_ids": [1],
            "stop": ["x"],
            "ignore_eos": False,
            "logprobs": 0,
            "return_token_ids": True,
            "prompt_logprobs": 2,
        }
        ends = ((0, StopReason.LENGTH), (1, StopReason.STOP))
        assert result.sequences == tuple(
            SampledSequence(tokens=(101, i), logprobs=(-0.5, -0.25 * i), stop_reason=reason)
            for i, reason in ends
        ), "in order, though they came in another"
        assert math.isnan(result.prompt_logprobs[0])
        assert result.prompt_logprobs[1:] == (-0.75, -0.875)
        assert result.topk_prompt_tokens == (0, 0, 9, 8, 9, 8)
        assert result.topk_prompt_logprobs[2:] == (-0.1, -0.2) * 2
        assert result.version == 1
        await sampler.sample(replace(weights, version=None, folder=None), PROMPT, params())
        assert engine.bodies[1]["model"] == "m", "the base"
        assert {"seed", "prompt_logprobs"}.isdisjoint(engine.bodies[1])


async def test_versions_are_loaded_once_and_make_room(
    engine: CompletingEngine, tmp_path: Path
) -> None:
    """A version keeps its name and its files, whatever comes to its folder."""
    async with sampler_of(engine, tmp_path, max_adapters=2) as (sampler, _):
        one, two, three = (adapter(tmp_path, version) for version in (1, 2, 3))
        both = await asyncio.gather(*(sampler.sample(one, PROMPT, params()) for _ in range(4)))
        assert {first_token(each) for each in both} == {101}
        assert engine.paths().count("/v1/load_lora_adapter") == 1
        again = adapter(tmp_path, 1, b"\x07")
        assert first_token(await sampler.sample(again, PROMPT, params())) == 7
        assert first_token(await sampler.sample(one, PROMPT, params())) == 101
        assert first_token(await sampler.sample(two, PROMPT, params())) == 102
        # The one of another state has gone: it was asked for the longest ago.
        assert [name.split(".")[2:] for name in engine.loras] == [
            ["v1", "65000000"],
            ["v2", "66000000"],
        ]
        engine.go_on.clear()
        held = [asyncio.create_task(sampler.sample(w, PROMPT, params())) for w in (one, two)]
        await until(lambda: engine.running >= 2)
        third = asyncio.create_task(sampler.sample(three, PROMPT, params()))
        await until(lambda: engine.running >= 3)
        assert len(engine.loras) == 3, "what is in use stays"
        engine.go_on.set()
        assert [first_token(r) for r in await asyncio.gather(*held, third)] == [101, 102, 103]
        places = [Path(place) for place in engine.loras.values()]
    assert not engine.loras, "unloaded at the end"
    assert not any(place.exists() for place in places)


async def test_a_later_process_finds_what_is_loaded(
    engine: CompletingEngine, tmp_path: Path
) -> None:
    """The one before was killed: it has unloaded nothing."""
    one = adapter(tmp_path, 1)
    engine.loras["ratoon.p.v1.65000000"] = str(one.folder)
    engine.loras["somebody's"] = "elsewhere"
    async with sampler_of(engine, tmp_path, max_adapters=1) as (sampler, _):
        assert first_token(await sampler.sample(one, PROMPT, params())) == 101
        assert "/v1/load_lora_adapter" not in engine.paths()
        assert first_token(await sampler.sample(adapter(tmp_path, 2), PROMPT, params())) == 102
        assert [*engine.loras] == ["somebody's", "ratoon.p.v2.66000000"]


async def test_an_engine_that_is_lost_is_away_until_it_is_back(
    engine: CompletingEngine, tmp_path: Path
) -> None:
    one = adapter(tmp_path, 1)
    async with sampler_of(engine, tmp_path) as (sampler, _):
        engine.faults = {"/v1/load_lora_adapter": [500]}
        assert await code_of(sampler.sample(one, PROMPT, params())) is ErrorCode.UNAVAILABLE
        assert not engine.bodies
        assert first_token(await sampler.sample(one, PROMPT, params())) == 101
        engine.statuses = [503]
        assert await code_of(sampler.sample(one, PROMPT, params())) is ErrorCode.UNAVAILABLE
        assert len(engine.bodies) == 2, "nothing is asked twice"
        engine.statuses = [400]
        assert await code_of(sampler.sample(one, PROMPT, params())) is ErrorCode.INVALID_ARGUMENT
        engine.start()  # Anew, without adapters.
        assert await code_of(sampler.sample(one, PROMPT, params())) is ErrorCode.UNAVAILABLE
        assert first_token(await sampler.sample(one, PROMPT, params())) == 101
        broken: tuple[dict[str, Any], ...] = (
            {"finish_reason": "abort"},
            {"token_ids": [1]},
            {"logprobs": None},
        )
        for engine.broken in broken:
            assert await code_of(sampler.sample(one, PROMPT, params())) is ErrorCode.UNAVAILABLE
    assert await code_of(sampler_closed(sampler, one)) is ErrorCode.UNAVAILABLE


async def sampler_closed(sampler: EngineSampler, weights: Weights) -> None:
    """One whose engine is gone for good."""
    gone = EngineSampler(
        SamplingEngineConfig(url="http://127.0.0.1:9", base="tiny"),
        receivers=sampler._receivers,
        copies=Path("/nonexistent"),
        max_waiting=1,
    )
    await gone.sample(weights, PROMPT, params())


async def test_requests_are_bounded(engine: CompletingEngine, tmp_path: Path) -> None:
    one = adapter(tmp_path, 1)
    async with sampler_of(engine, tmp_path, max_waiting=5, max_in_flight=2) as (sampler, _):
        engine.go_on.clear()
        asked = [asyncio.create_task(sampler.sample(one, PROMPT, params())) for _ in range(5)]
        await until(lambda: engine.running >= 2)
        refused = sampler.sample(one, PROMPT, params())
        assert await code_of(refused) is ErrorCode.RESOURCE_EXHAUSTED
        asked[4].cancel()
        await asyncio.gather(asked[4], return_exceptions=True)
        asked.append(asyncio.create_task(sampler.sample(one, PROMPT, params())))
        engine.go_on.set()
        done = await asyncio.gather(*asked[:4], asked[5])
        assert {first_token(each) for each in done} == {101}
        assert engine.most_running == 2


async def test_a_full_version_is_the_one_that_its_receiver_serves(
    engine: CompletingEngine, tmp_path: Path
) -> None:
    full = replace(adapter(tmp_path, 4), model=FULL)

    def says(version: int | None, holds: int | None = None, name: str = "r") -> ReceiverInfo:
        return ReceiverInfo(
            receiver_id=name,
            version=version,
            holds_version=holds,
            last_seen=datetime.now(UTC),
        )

    async with sampler_of(engine, tmp_path, receiver_id="r") as (sampler, receivers):
        for said in ([], [says(4, name="other")], [says(3)], [says(4, 5)], [says(None, 4)]):
            receivers[:] = said
            assert await code_of(sampler.sample(full, PROMPT, params())) is ErrorCode.UNAVAILABLE
        assert not engine.bodies
        for said in ([says(4)], [says(4, 4)]):
            receivers[:] = said
            assert (await sampler.sample(full, PROMPT, params())).version == 4
        engine.go_on.clear()
        asked = asyncio.create_task(sampler.sample(full, PROMPT, params()))
        await until(lambda: engine.running)
        receivers[:] = [says(4, 5)]
        engine.go_on.set()
        assert await code_of(asked) is ErrorCode.UNAVAILABLE, "weights changed meanwhile"
        base = replace(full, version=None, folder=None)
        assert await code_of(sampler.sample(base, PROMPT, params())) is ErrorCode.UNSUPPORTED
    # An engine that no receiver writes to has the base.
    async with sampler_of(engine, tmp_path) as (sampler, _):
        await sampler.sample(replace(base, policy_id=""), PROMPT, params())
    assert engine.bodies[-1]["model"] == "m"
    async with sampler_of(engine, tmp_path) as (sampler, _):
        assert await code_of(sampler.sample(full, PROMPT, params())) is ErrorCode.UNSUPPORTED
        scored = sampler.sample(full, PROMPT, params(target_places=(1,), target_tokens=(1,)))
        with pytest.raises(RatoonError, match="target_tokens"):
            await scored
