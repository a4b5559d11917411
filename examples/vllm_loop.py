"""GRPO with a vLLM server as the sampler; docs/vllm_loop.md has the commands and the columns.

The next batch is sampled while the trainer updates, and versions come into vLLM as they are
published. The task is the demo's: copy the word that is marked in the prompt. A byte is a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import httpx
import numpy as np

from ratoon.demo.task import WORD_LENGTH, CopyTask, Query, reward, tokens
from ratoon_client import (
    Adapter,
    DeltaAdapter,
    Group,
    Loss,
    Optim,
    RatoonClient,
    Received,
    ReceiverEvent,
    StagedVllmAdapter,
    Staleness,
    VllmAdapter,
    VllmNcclAdapter,
    WeightManifest,
    group,
    rollout,
)

REQUEST_S = 600.0
RECEIVE_S = 600.0
T = TypeVar("T")
# How versions come into the engine.
BACKENDS = {"reload": VllmAdapter, "ratoon": StagedVllmAdapter, "nccl": VllmNcclAdapter}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Response token ids [R] and their log-probs [R] at the sampling temperature."""

    response: list[int]
    logprobs: list[float]
    truncated: bool


class Engine:
    """Token ids in, token ids and log-probs out; for any number of threads."""

    def __init__(self, url: str, *, temperature: float, max_tokens: int) -> None:
        self._temperature = temperature
        self._max_tokens = max_tokens
        # A connection kept since the last batch may end just as it is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, timeout=REQUEST_S, limits=limits, trust_env=False)

    def sample(
        self, prompt: Sequence[int], count: int, *, seed: int | None = None, max_tokens: int = 0
    ) -> list[Sample]:
        """`max_tokens` 0: the loop's. Raises httpx.HTTPError."""
        body = {
            "prompt": list(prompt),
            "n": count,
            "max_tokens": max_tokens or self._max_tokens,
            "temperature": self._temperature,
            "top_p": 1.0,
            "top_k": 0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = self._http.post("/v1/completions", json=body).raise_for_status().json()
        return [
            Sample(
                response=choice["token_ids"],
                logprobs=choice["logprobs"]["token_logprobs"],
                truncated=choice["finish_reason"] == "length",
            )
            for choice in answer["choices"]
        ]

    def close(self) -> None:
        self._http.close()


class Served(NamedTuple):
    """What the engine samples with; an odd number of changes: a change is under way."""

    version: int
    changes: int


class Commit(NamedTuple):
    """Monotonic seconds of one version: staging begins, the engine is told to go on, it sampled.

    `is_delta`: it came as a delta, before its files were here.
    """

    begun: float
    ended: float
    first_token: float | None
    is_delta: bool


class TimedAdapter:
    """An adapter that knows which version is served, and when each one was."""

    def __init__(self, adapter: Adapter, sample_token: Callable[[], object]) -> None:
        self._adapter = adapter
        self._sample_token = sample_token
        self.served = Served(-1, 0)
        self.commits: dict[int, Commit] = {}

    async def tag(self) -> str | None:
        return await self._adapter.tag()

    async def commit(
        self, folder: Path, manifest: WeightManifest, *, previous: Path | None
    ) -> float:
        pause_s = await self._timed(
            self._adapter.commit(folder, manifest, previous=previous), manifest, is_delta=False
        )
        assert pause_s is not None
        return pause_s

    async def commit_delta(
        self, delta: Path, manifest: WeightManifest, *, previous: Path
    ) -> float | None:
        if not isinstance(self._adapter, DeltaAdapter):
            return None
        commit = self._adapter.commit_delta(delta, manifest, previous=previous)
        return await self._timed(commit, manifest, is_delta=True)

    async def _timed(
        self, commit: Awaitable[float | None], manifest: WeightManifest, *, is_delta: bool
    ) -> float | None:
        begun = time.monotonic()
        version = self.served.version
        self._change(version)
        try:
            pause_s = await commit
            if pause_s is not None:
                version = manifest.version
        finally:
            self._change(version)
        if pause_s is None:
            return None
        ended, first_token = time.monotonic(), None
        with suppress(httpx.HTTPError):
            await asyncio.to_thread(self._sample_token)
            first_token = time.monotonic()
        self.commits[version] = Commit(begun, ended, first_token, is_delta)
        return pause_s

    def versioned(self, request: Callable[[], T]) -> tuple[T, int, bool]:
        """What it answers, the oldest version that may have made it, whether another may have."""
        before = self.served
        answer = request()
        return answer, before.version, before.changes % 2 == 1 or self.served != before

    def _change(self, version: int) -> None:
        self.served = Served(version, self.served.changes + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One prompt's samples; `version` is the oldest that may have made a token of them.

    `straddled`: the engine's version changed meanwhile, so some may be of the next one.
    """

    query: Query
    prompt: list[int]
    samples: list[Sample]
    version: int
    straddled: bool
    ended: float

    @property
    def rewards(self) -> list[float]:
        texts = (bytes(token for token in each.response if token < 256) for each in self.samples)
        return [reward(self.query, text) for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A batch on its way; monotonic seconds."""

    answers: list[Future[Answer]]
    begun: float


class Log:
    """A line on the terminal and a JSON object in a file for each thing that happened."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("w", encoding="utf-8")

    def write(self, event: str, line: str, **fields: Any) -> None:
        print(line, flush=True)
        if self._file is not None:
            print(json.dumps({"event": event, **fields}), file=self._file, flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Loop:
    """`pool` has the requests to the engine; versions come in by `receiver`."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self._arguments = arguments
        self._task = CopyTask.create(arguments.seed)
        # Repeatable, not secret.
        self._shuffle = random.Random(arguments.seed + 1)  # nosec B311
        self._log = Log(arguments.out)
        stack.callback(self._log.close)
        self._pool = stack.enter_context(ThreadPoolExecutor(arguments.concurrency + 1))
        self._engine = Engine(
            arguments.vllm, temperature=arguments.temperature, max_tokens=arguments.max_tokens
        )
        stack.callback(self._engine.close)
        options = {"device": arguments.device} if arguments.vllm_backend == "nccl" else {}
        backend = BACKENDS[arguments.vllm_backend]
        vllm = stack.enter_context(backend(arguments.vllm, **options))
        first = self._prompt(self._task.evaluation[0])
        self._adapter = TimedAdapter(vllm, lambda: self._engine.sample(first, 1, max_tokens=1))
        # A new one: what the engine has now is not known, so it is given the newest version.
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix=f"{arguments.policy}-", dir=arguments.root)
        )
        # Closed first: it ends the receiver, which waits in the pool.
        client = stack.enter_context(RatoonClient(arguments.url))
        self._session = client.policy(arguments.policy)
        self.version = client.get_policy(arguments.policy).version
        self._events: SimpleQueue[ReceiverEvent] = SimpleQueue()
        receiver = client.weight_receiver(
            arguments.policy, folder, self._adapter, on_event=self._events.put
        )
        self._receiver = self._pool.submit(receiver.follow)
        # When the step of each version was answered.
        self._stepped: dict[int, float] = {}
        self._received = -1
        # The first evaluation: its version, and what that sampled.
        self._first: tuple[int, list[Group]] | None = None
        self._num_groups = 0

    def run(self) -> tuple[float, float]:
        """Held-out rewards of the first and the last version."""
        last = self.version + self._arguments.versions
        first_reward = held_out = self.evaluate()
        pending = deque(self._submit() for _ in range(self._arguments.batches_ahead))
        while self.version < last:
            batch = pending.popleft()
            waited = time.monotonic()
            answers = [each.result() for each in batch.answers]
            wait_s = time.monotonic() - waited
            pending.append(self._submit())
            before = self.version
            self._update(batch, answers, wait_s)
            is_due = self.version % self._arguments.evaluate_every == 0 or self.version == last
            if self.version > before and is_due:
                held_out = self.evaluate()
        return first_reward, held_out

    def evaluate(self) -> float:
        """Mean reward over the held-out prompts, one sample each, once the engine is up to date.

        Log-probs of the sampler are compared with those of the trainer's Forward: of the version
        that sampled, and for the samples of the first evaluation, of a version that did not.
        """
        self._wait_until_served()
        queries = self._task.evaluation[: self._arguments.held_out]
        answers = [
            each.result()
            for each in [
                self._pool.submit(self._ask, query, 1, seed) for seed, query in enumerate(queries)
            ]
        ]
        held_out = float(np.mean([answer.rewards for answer in answers]))
        groups = [self._group(answer, answer.rewards) for answer in answers]
        same, other = self._distance(groups), None
        line = f"held out at {self.version}: reward {held_out:.3f}, |sampler - trainer| {same:.5f}"
        if self._first is not None:
            other = self._distance(self._first[1])
            line += f", for samples of version {self._first[0]} {other:.5f}"
        self._log.write(
            "evaluation",
            line,
            version=self.version,
            reward=held_out,
            distance=same,
            other_version=None if self._first is None else self._first[0],
            other_distance=other,
        )
        self._first = self._first or (self.version, groups)
        return held_out

    def _distance(self, groups: Sequence[Group]) -> float:
        """Mean |log-prob of the sampler - of the trainer's newest version| over sampled tokens."""
        forward = self._session.forward(groups).result()
        sampled = [np.asarray(each.sampler_logprobs) for group in groups for each in group.rollouts]
        pairs = zip(forward.logprobs, sampled, strict=True)
        return float(np.mean(np.concatenate([np.abs(ours - theirs) for ours, theirs in pairs])))

    def _submit(self) -> Pending:
        queries = self._task.training_queries(self._arguments.prompts)
        count = self._arguments.responses
        return Pending(
            answers=[self._pool.submit(self._ask, query, count) for query in queries],
            begun=time.monotonic(),
        )

    def _ask(self, query: Query, count: int, seed: int | None = None) -> Answer:
        prompt = self._prompt(query)
        samples, version, straddled = self._adapter.versioned(
            lambda: self._engine.sample(prompt, count, seed=seed)
        )
        return Answer(
            query=query,
            prompt=prompt,
            samples=samples,
            version=version,
            straddled=straddled,
            ended=time.monotonic(),
        )

    def _prompt(self, query: Query) -> list[int]:
        return tokens(self._task.preamble + query.text)

    def _group(self, answer: Answer, rewards: Sequence[float]) -> Group:
        self._num_groups += 1
        rollouts = [
            rollout(
                response=sample.response,
                sampler_logprobs=sample.logprobs,
                sampler_logprobs_kind="processed",
                temperature=self._arguments.temperature,
                reward=value,
                policy_version=answer.version,
                truncated=sample.truncated,
            )
            for sample, value in zip(answer.samples, rewards, strict=True)
        ]
        return group(str(self._num_groups), answer.prompt, rollouts)

    def _update(self, batch: Pending, answers: Sequence[Answer], wait_s: float) -> None:
        arguments = self._arguments
        rewards = np.array([answer.rewards for answer in answers])
        given = rewards.ravel().tolist()
        if arguments.shuffled_rewards:
            self._shuffle.shuffle(given)
        rows = np.reshape(given, rewards.shape).tolist()
        groups = [self._group(answer, row) for answer, row in zip(answers, rows, strict=True)]
        loss = Loss(
            "grpo",
            entropy_coefficient=arguments.entropy_coefficient,
            staleness=Staleness(max_versions=arguments.max_staleness, action="drop"),
        )
        begun = time.monotonic()
        step = self._session.update(
            groups, loss=loss, optim=Optim(learning_rate=arguments.learning_rate)
        ).result()
        ended = time.monotonic()
        self.version = step.version
        self._stepped.setdefault(step.version, ended)
        report = step.report
        straddled = sum(answer.straddled for answer in answers)
        self._log.write(
            "update",
            f"{step}, update {ended - begun:.2f} s, waited {wait_s:.2f} s",
            version=step.version,
            skipped=report.skipped,
            reward=float(rewards.mean()),
            staleness_mean=report.staleness_mean,
            staleness_max=report.staleness_max,
            dropped_stale=report.dropped_stale,
            straddled_prompts=straddled,
            sampler_kl=report.sampler_kl,
            ratio_max=report.ratio_max,
            entropy=report.entropy,
            grad_norm=report.grad_norm,
            trained_tokens=report.trained_tokens,
            sample_s=max(answer.ended for answer in answers) - batch.begun,
            wait_s=wait_s,
            update_s=ended - begun,
        )
        self._report_received()

    def _wait_until_served(self) -> None:
        """Raises what ended the receiver, TimeoutError."""
        end = time.monotonic() + RECEIVE_S
        while self._received < self.version:
            if self._receiver.done():
                self._receiver.result()
            if time.monotonic() > end:
                raise TimeoutError(f"version {self.version} is not served after {RECEIVE_S:.0f} s")
            with suppress(Empty):
                self._report_event(self._events.get(timeout=0.5))

    def _report_received(self) -> None:
        with suppress(Empty):
            while True:
                self._report_event(self._events.get_nowait())

    def _report_event(self, event: ReceiverEvent) -> None:
        if isinstance(event, Received):
            self._received = event.version
            self._report_version(event)
        else:
            line = f"version {event.version} is not served: {event.error}"
            self._log.write("failure", line, version=event.version, error=str(event.error))

    def _report_version(self, event: Received) -> None:
        commit = self._adapter.commits[event.version]
        stepped = self._stepped.get(event.version)
        publish_s = first_token_s = None
        if stepped is not None:
            # A delta is fetched in it; the pull comes after.
            pull_s = 0.0 if commit.is_delta else event.fetch_s + event.verify_s
            publish_s = commit.begun - pull_s - stepped
            if commit.first_token is not None:
                first_token_s = commit.first_token - stepped
        self._log.write(
            "served",
            f"  served {event.version}: published {_seconds(publish_s)}, fetched"
            f" {event.fetch_s:.3f} s, verified {event.verify_s:.3f} s, committed"
            f" {commit.ended - commit.begun:.3f} s, paused {event.pause_s:.3f} s, first token"
            f" {_seconds(first_token_s)}",
            version=event.version,
            size_bytes=event.size_bytes,
            fetched_bytes=event.fetched_bytes,
            publish_s=publish_s,
            fetch_s=event.fetch_s,
            verify_s=event.verify_s,
            commit_s=commit.ended - commit.begun,
            pause_s=event.pause_s,
            first_token_s=first_token_s,
        )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="GRPO with a vLLM server as the sampler.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="grpc://127.0.0.1:8443", help="the service")
    add("--vllm", default="http://127.0.0.1:8100", help="the engine")
    add("--vllm-backend", choices=tuple(BACKENDS), default="reload", help="how it takes versions")
    add("--device", default="cuda:0", help="for nccl: a GPU that the engine has not")
    add("--policy", default="vllm-loop")
    add("--root", type=Path, default="/dev/shm", help="holds versions; the engine reads them there")
    add("--versions", type=int, default=200, help="how many to train")
    add("--prompts", type=int, default=16, help="per batch")
    add("--responses", type=int, default=16, help="per prompt")
    add("--max-tokens", type=int, default=WORD_LENGTH, help="per response")
    add("--temperature", type=float, default=1.0)
    add("--learning-rate", type=float, default=1e-4)
    add("--entropy-coefficient", type=float, default=0.02)
    add("--batches-ahead", type=int, default=1, help="sampled while the trainer updates")
    add("--max-staleness", type=int, default=4, help="older samples are dropped, in versions")
    add("--evaluate-every", type=int, default=10, help="versions")
    add("--held-out", type=int, default=256, help="prompts of an evaluation, at most 256")
    add("--concurrency", type=int, default=64, help="requests to the engine at a time")
    add("--shuffled-rewards", action="store_true", help="the control, which must not learn")
    add("--seed", type=int, default=0, help="of prompts and the shuffle")
    add("--out", type=Path, default=None, help="JSON lines")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with ExitStack() as stack:
        loop = Loop(parser().parse_args(argv), stack)
        first, last = loop.run()
        print(f"vllm_loop: held-out reward {first:.3f} -> {last:.3f}, version {loop.version}")


if __name__ == "__main__":
    main()
