"""`ratoon demo`: start the service here, train a tiny policy through it, report the outcome."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ratoon import app
from ratoon.config import GrpcConfig, HttpConfig, RatoonConfig, ServeConfig
from ratoon.demo.loop import POLICY_ID, Loop, Update
from ratoon.demo.verdict import Round, Verdict, clipped
from ratoon_client import RatoonClient

# A leg ends at this mean reward of its last steps, or after this many steps.
WINDOW = 6
SYNCHRONOUS_REWARD, MAX_UPDATES = 0.6, 120
ASYNCHRONOUS_REWARD, MAX_ROUNDS = 0.9, 40


def run_demo(*, seed: int, shuffle_rewards: bool, console: Console) -> bool:
    """Run the whole demo; True if it passes. Raises what the client raises."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ratoon-demo-") as folder:
        root = Path(folder)
        config = RatoonConfig(
            data_root=root / "data",
            models_root=root / "models",
            http=HttpConfig(port=0),
            grpc=GrpcConfig(port=0),
            serve=ServeConfig(num_replicas=0),
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
                )
                verdict = train(loop, console, start)
    for line in verdict.lines():
        console.print(line, highlight=False, soft_wrap=True)
    return not verdict.faults


def train(loop: Loop, console: Console, start: float) -> Verdict:
    """Both legs, with an evaluation around each; `start` is the demo's monotonic start."""
    first_reward = loop.evaluate()
    console.print("1. synchronous: sample with the newest weights, one Update a batch")
    updates = _synchronous_leg(loop.synchronous(), console)
    middle_reward = loop.evaluate()
    console.print("2. asynchronous: samples one version old, two Updates a Forward")
    rounds = _asynchronous_leg(loop.asynchronous(), console)
    last_reward = loop.evaluate()
    reports = [each.report for each in updates] + [r for e in rounds for r in (e.first, e.second)]
    reductions = [report.token_reduction for report in reports]
    return Verdict(
        first_reward=first_reward,
        middle_reward=middle_reward,
        last_reward=last_reward,
        # The second leg begins with one more update of the first's kind.
        num_updates=len(reports) + 1,
        token_reduction=float(np.mean([rho for rho in reductions if rho is not None])),
        version=loop.version,
        seconds=time.monotonic() - start,
        rounds=rounds,
    )


def _synchronous_leg(updates: Iterator[Update], console: Console) -> list[Update]:
    done: list[Update] = []
    rows = _Rows("update", "reward", "loss", "sampler KL", "entropy", "rho", "tokens/s")
    with Live(rows.table(), console=console, auto_refresh=False) as live:
        for each in islice(updates, MAX_UPDATES):
            done.append(each)
            report = each.report
            rows.add(
                str(len(done)),
                f"{each.reward:.3f}",
                _figure(report.loss, "+.4f"),
                _figure(report.sampler_kl, ".1e"),
                _figure(report.entropy, ".3f"),
                _figure(report.token_reduction, ".1f"),
                _figure(report.tokens_per_second, ",.0f"),
            )
            live.update(rows.table(), refresh=True)
            if _reached([each.reward for each in done], SYNCHRONOUS_REWARD):
                break
    return done


def _asynchronous_leg(rounds: Iterator[Round], console: Console) -> list[Round]:
    done: list[Round] = []
    rows = _Rows("round", "reward", "staleness", "ratio", "clipped", "correction")
    with Live(rows.table(), console=console, auto_refresh=False) as live:
        for each in islice(rounds, MAX_ROUNDS):
            done.append(each)
            first, second = each.first, each.second
            rows.add(
                str(len(done)),
                f"{each.reward:.3f}",
                f"{first.staleness_max}, {second.staleness_max}",
                f"{_figure(second.ratio_min, '.2f')} to {_figure(second.ratio_max, '.2f')}",
                f"{clipped(second):.1%}",
                _figure(first.correction_weight_mean, ".3f"),
            )
            live.update(rows.table(), refresh=True)
            if _reached([each.reward for each in done], ASYNCHRONOUS_REWARD):
                break
    return done


def _figure(value: float | None, form: str) -> str:
    """Formats a figure for a table; one that was not computed is a dash."""
    return "-" if value is None else format(value, form)


def _reached(rewards: list[float], wanted: float) -> bool:
    return len(rewards) >= WINDOW and float(np.mean(rewards[-WINDOW:])) >= wanted


class _Rows:
    """The last rows of a table with these column names."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._rows: deque[tuple[str, ...]] = deque(maxlen=12)

    def add(self, *cells: str) -> None:
        self._rows.append(cells)

    def table(self) -> Table:
        table = Table()
        for name in self._names:
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return table
