"""The demo's loop: sample, reward, Update over gRPC, pull the new weights, repeat.

Enters a seed, leaves a live table and one verdict line. Invariant: the policy's weights reach the
sampler only as verified bytes pulled through the public client.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ratoon import app
from ratoon.config import GrpcConfig, HttpConfig, RatoonConfig
from ratoon.demo.sampler import Sample, Sampler
from ratoon.demo.task import WORD_LENGTH, CopyTask, reward, tokens
from ratoon_client import (
    Group,
    Loss,
    Optim,
    PolicySession,
    RatoonClient,
    StepReport,
    group,
    rollout,
)

POLICY_ID = "demo"
NUM_PROMPTS = 16
NUM_RESPONSES = 16
RESPONSE_TOKENS = WORD_LENGTH
LEARNING_RATE = 2e-3
ENTROPY_COEFFICIENT = 0.02
MAX_GRAD_NORM = 1.0
MAX_UPDATES = 160
# Training stops early where the mean reward of the last updates has reached this.
GOOD_REWARD = 0.9
WINDOW_UPDATES = 6

MAX_FIRST_REWARD = 0.3
MIN_LAST_REWARD = 0.6
MIN_GAIN = 2.0
MIN_TOKEN_REDUCTION = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Rewards are means in [0, 1] over the held-out queries; time in seconds."""

    first_reward: float
    last_reward: float
    num_updates: int
    token_reduction: float
    version: int
    seconds: float

    @property
    def passed(self) -> bool:
        return (
            self.first_reward <= MAX_FIRST_REWARD
            and self.last_reward >= MIN_GAIN * self.first_reward
            and self.last_reward >= MIN_LAST_REWARD
            and self.token_reduction >= MIN_TOKEN_REDUCTION
        )

    def line(self) -> str:
        return (
            f"demo: reward {self.first_reward:.3f} -> {self.last_reward:.3f}"
            f" in {self.num_updates} updates, rho {self.token_reduction:.1f},"
            f" version {self.version}, {self.seconds:.0f} s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the live table."""

    update: int
    reward: float
    report: StepReport


def run_demo(*, seed: int, shuffle_rewards: bool, console: Console) -> bool:
    """Run the whole demo; True where the policy learned. Raises what the client raises."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ratoon-demo-") as folder:
        root = Path(folder)
        config = RatoonConfig(
            data_root=root / "data",
            models_root=root / "models",
            http=HttpConfig(port=0),
            grpc=GrpcConfig(gateway_port=0, serve_port=0),
        )
        console.print("starting the service on this machine ...")
        with app.running(config) as addresses:
            console.print(f"grpc {addresses.grpc}   http {addresses.http}")
            with RatoonClient(addresses.grpc) as client:
                client.create_policy(POLICY_ID, preset="tiny", seed=seed).result()
                loop = Loop(
                    client=client,
                    folder=root / "weights",
                    seed=seed,
                    shuffle_rewards=shuffle_rewards,
                    console=console,
                )
                verdict = loop.run(start)
    console.print(verdict.line(), highlight=False, soft_wrap=True)
    return verdict.passed


class Loop:
    """One GRPO run against one policy; owns the sampler and the session."""

    def __init__(
        self,
        *,
        client: RatoonClient,
        folder: Path,
        seed: int,
        shuffle_rewards: bool,
        console: Console,
    ) -> None:
        self._client = client
        self._folder = folder
        self._console = console
        self._task = CopyTask.create(seed)
        self._session: PolicySession = client.policy(POLICY_ID)
        self._sampler = Sampler(
            preamble=self._task.preamble, max_new_tokens=RESPONSE_TOKENS, seed=seed
        )
        # Repeatable, not secret.
        self._shuffle = random.Random(seed + 1) if shuffle_rewards else None  # nosec B311

    def run(self, start: float) -> Verdict:
        """Evaluate, train, evaluate again; `start` is the demo's monotonic start in seconds."""
        self._pull()
        first_reward = self._evaluate()
        rows: deque[Row] = deque(maxlen=12)
        recent: deque[float] = deque(maxlen=WINDOW_UPDATES)
        reductions: list[float] = []
        num_updates = 0
        with Live(_table(rows), console=self._console, auto_refresh=False) as live:
            while num_updates < MAX_UPDATES:
                row = self._update(num_updates + 1)
                num_updates += 1
                rows.append(row)
                recent.append(row.reward)
                reductions.append(row.report.token_reduction)
                live.update(_table(rows), refresh=True)
                if len(recent) == WINDOW_UPDATES and np.mean(recent) >= GOOD_REWARD:
                    break
        return Verdict(
            first_reward=first_reward,
            last_reward=self._evaluate(),
            num_updates=num_updates,
            token_reduction=float(np.mean(reductions)),
            version=self._sampler.version,
            seconds=time.monotonic() - start,
        )

    def _pull(self) -> None:
        pulled = self._client.pull_weights(POLICY_ID, self._folder)
        self._sampler.load(pulled.folder, pulled.version)

    def _evaluate(self) -> float:
        samples = self._sampler.sample(self._task.evaluation, 1)
        return float(np.mean([reward(s.query, s.text) for (s,) in samples]))

    def _update(self, number: int) -> Row:
        queries = self._task.training_queries(NUM_PROMPTS)
        samples = self._sampler.sample(queries, NUM_RESPONSES)
        rewards = [reward(s.query, s.text) for row in samples for s in row]
        mean_reward = float(np.mean(rewards))
        if self._shuffle is not None:
            self._shuffle.shuffle(rewards)
        groups = [
            self._group(
                f"{number}-{index}", row, rewards[index * len(row) : (index + 1) * len(row)]
            )
            for index, row in enumerate(samples)
        ]
        step = self._session.update(
            groups,
            loss=Loss("grpo", entropy_coefficient=ENTROPY_COEFFICIENT),
            optim=Optim(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM),
        ).result()
        self._pull()
        return Row(update=number, reward=mean_reward, report=step.report)

    def _group(self, group_id: str, samples: list[Sample], rewards: list[float]) -> Group:
        prompt = tokens(self._task.preamble + samples[0].query.text)
        rollouts = [
            rollout(
                response=sample.response,
                sampler_logprobs=sample.logprobs,
                reward=value,
                policy_version=self._sampler.version,
            )
            for sample, value in zip(samples, rewards, strict=True)
        ]
        return group(group_id, prompt, rollouts)


def _table(rows: deque[Row]) -> Table:
    table = Table(title="GRPO through the service")
    for name in ("update", "reward", "loss", "sampler KL", "entropy", "rho", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows:
        report = row.report
        table.add_row(
            str(row.update),
            f"{row.reward:.3f}",
            f"{report.loss:+.4f}",
            f"{report.sampler_kl or 0.0:.2e}",
            f"{report.entropy:.3f}",
            f"{report.token_reduction:.1f}",
            f"{report.tokens_per_second:,.0f}",
        )
    return table
