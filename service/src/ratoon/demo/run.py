"""`ratoon demo`: start the service here, train a tiny policy through it, report the outcome."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TypeVar

import numpy as np
from rich.console import Console

from ratoon import app
from ratoon.config import GrpcConfig, HttpConfig, RatoonConfig, ServeConfig
from ratoon.demo.loop import POLICY_ID, Loop, Update
from ratoon.demo.verdict import Round, Verdict, clipped
from ratoon_client import RatoonClient

# A leg ends at this mean reward of its last steps, or after this many steps.
WINDOW = 6
_COLUMNS = 79
SYNCHRONOUS_REWARD, MAX_UPDATES = 0.6, 120
ASYNCHRONOUS_REWARD, MAX_ROUNDS = 0.9, 40


StepT = TypeVar("StepT", Update, Round)

_UPDATE_COLUMNS: Mapping[str, Callable[[Update], str]] = {
    "reward": lambda each: f"{each.reward:.3f}",
    "loss": lambda each: _figure(each.report.loss, "+.4f"),
    "sampler KL": lambda each: _figure(each.report.sampler_kl, ".1e"),
    "entropy": lambda each: _figure(each.report.entropy, ".3f"),
    "rho": lambda each: _figure(each.report.token_reduction, ".1f"),
    "tokens/s": lambda each: _figure(each.report.tokens_per_second, ",.0f"),
}
_ROUND_COLUMNS: Mapping[str, Callable[[Round], str]] = {
    "reward": lambda each: f"{each.reward:.3f}",
    "staleness": lambda each: f"{each.first.staleness_max}, {each.second.staleness_max}",
    "ratio": lambda each: (
        f"{_figure(each.second.ratio_min, '.2f')} to {_figure(each.second.ratio_max, '.2f')}"
    ),
    "clipped": lambda each: f"{clipped(each.second):.1%}",
    "correction": lambda each: _figure(each.first.correction_weight_mean, ".3f"),
}


def run_demo(
    *, preset: str, seed: int, shuffle_rewards: bool, console: Console, stopped: Event
) -> bool:
    """Run the whole demo on a policy of a preset; True if it passes.

    Raises what the client and, while `stopped` is set in the start, `app.running` raise.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ratoon-demo-") as folder:
        root = Path(folder)
        config = RatoonConfig(
            data_root=root / "data",
            models_root=root / "models",
            http=HttpConfig(port=0),
            grpc=GrpcConfig(port=0),
            serve=ServeConfig(num_replicas=0),
            log_level="WARNING",
        )
        console.print("starting the service on this machine, in some ten seconds")
        with app.running(config, stopped=stopped) as addresses:
            # From here on Ctrl-C interrupts the client, and the block stops the service.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            console.print(f"grpc {addresses.grpc}   http {addresses.http}")
            with RatoonClient(addresses.grpc) as client:
                client.create_policy(POLICY_ID, preset=preset, seed=seed).result()
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
    updates = _leg(
        loop.synchronous(), console, "update", _UPDATE_COLUMNS, MAX_UPDATES, SYNCHRONOUS_REWARD
    )
    middle_reward = loop.evaluate()
    console.print("2. asynchronous: samples one version old, two Updates a Forward")
    rounds = _leg(
        loop.asynchronous(), console, "round", _ROUND_COLUMNS, MAX_ROUNDS, ASYNCHRONOUS_REWARD
    )
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


def _leg(
    steps: Iterator[StepT],
    console: Console,
    name: str,
    columns: Mapping[str, Callable[[StepT], str]],
    most: int,
    wanted: float,
) -> list[StepT]:
    """Run at most `most` steps, until the mean reward is `wanted`; print a line of each."""
    width = (_COLUMNS - len(name)) // len(columns)
    done: list[StepT] = []

    def line(first: object, *rest: str) -> None:
        console.print(
            f"{first:>{len(name)}}" + "".join(f"{each:>{width}}" for each in rest), highlight=False
        )

    line(name, *columns)
    for each in islice(steps, most):
        done.append(each)
        line(len(done), *(cell(each) for cell in columns.values()))
        rewards = [step.reward for step in done[-WINDOW:]]
        if len(rewards) == WINDOW and float(np.mean(rewards)) >= wanted:
            break
    return done


def _figure(value: float | None, form: str) -> str:
    """Formats a figure for a table; one that was not computed is a dash."""
    return "-" if value is None else format(value, form)
