"""Hostile inputs by the thousand, to everything that reads what others have written.

In: a seed and how many. Out: what became of them. Invariant: the same seed makes the same inputs;
an input may be refused by a typed error, and do nothing else.
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.hostile.targets import ServerFaultError, Target, all_targets

# Share of inputs after which memory is measured: by then everything loaded or cached once is there.
_WARM_SHARE = 0.2
_MEASURE_EVERY = 500
_MOST_FINDINGS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzCounts:
    """`crashes`: any other exception than the typed ones. `findings` are the first of both."""

    inputs: int
    crashes: int
    server_errors: int
    peak_rss_growth_bytes: int
    slowest_s: float
    accepted: int
    findings: tuple[str, ...]


def fuzz(seed: int, num_inputs: int) -> FuzzCounts:
    """Make `num_inputs` and take them, each by the target that its turn has."""
    with tempfile.TemporaryDirectory(prefix="ratoon-fuzz-") as folder:
        return run(all_targets(Path(folder)), seed, num_inputs)


def run(targets: list[Target], seed: int, num_inputs: int) -> FuzzCounts:
    turns = [target for target in targets for _ in range(target.weight)]
    process = psutil.Process()
    crashes, server_errors, accepted, slowest_s = 0, 0, 0, 0.0
    findings: list[str] = []
    warm_rss, peak_rss = 0, 0
    for index in range(num_inputs):
        dice = random.Random(f"{seed}.{index}")
        target = dice.choice(turns)
        start = time.perf_counter()
        try:
            target.take(dice)
            accepted += 1
        except target.may_raise:
            pass
        except ServerFaultError as error:
            server_errors += 1
            findings.append(f"{target.name} {seed}.{index}: {error}")
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            crashes += 1
            findings.append(f"{target.name} {seed}.{index}: {type(error).__name__}: {error}")
        slowest_s = max(slowest_s, time.perf_counter() - start)
        del findings[_MOST_FINDINGS:]
        if index % _MEASURE_EVERY == 0:
            peak_rss = max(peak_rss, rss := process.memory_info().rss)
            if index <= num_inputs * _WARM_SHARE:
                warm_rss = peak_rss = rss
    return FuzzCounts(
        inputs=num_inputs,
        crashes=crashes,
        server_errors=server_errors,
        peak_rss_growth_bytes=max(peak_rss - warm_rss, 0),
        slowest_s=slowest_s,
        accepted=accepted,
        findings=tuple(findings),
    )
