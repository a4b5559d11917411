"""The verdict on a whole fault run, its result file and its last lines.

A part that did not end, tore nothing or killed too little is as bad as one that lost something.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from ratoon.engine.crash_points import CrashPoint
from ratoon_proto.types import Recovery
from tests.durability.torn import TornCounts
from tests.faults.judge.history import Verdict
from tests.faults.judge.reference import TOLERANCE
from tests.faults.selftest import SCHEDULES, Finding
from tests.faults.venues.attacks import ATTACKS
from tests.faults.venues.crashes import Kills
from tests.faults.venues.cut_logs import SHARES, CutResult
from tests.faults.venues.deliveries import ROLES, DeliveryResult
from tests.faults.venues.failover import PLACES, FailoverResult
from tests.faults.venues.live import EVENTS, LiveResult
from tests.faults.venues.load import LoadResult
from tests.faults.venues.scripts import ROLES as SCRIPT_ROLES
from tests.faults.venues.scripts import ScriptResult
from tests.hostile.fuzz import FuzzCounts

T = TypeVar("T")
MIN_KILLS = 20
MIN_IN_WINDOW = 5
# What allocators keep, however many inputs there are.
MAX_GROWTH_BYTES = 16 * 2**20
_MOST_SHOWN = 20


@dataclass
class Summary:
    """Findings of all parts. `seconds`: by part, over all rounds.

    `back_s`: seconds from each kill of the service until all callers had gone on, by what was
    killed, the longest of all rounds. `deliveries`: kills by role while versions were received,
    not in `kills`; `versions`: those that an engine sampled with. `scripts`: kills by role under
    scripts of the Tinker API, not in `kills` either; `script_s`: the longest step after one.
    `forgotten`: operations that had ended and that a promoted standby lacked. `cut_logs`: journals
    whose log was cut short; `refused_starts`: those of them that were refused. `attacks`: by name,
    why the service did not stand. `broken`: parts that did not come to their end, and why.
    `load`, `hostile`: None before they have ended.
    """

    kills: int = 0
    in_window: int = 0
    deliveries: Counter[str] = field(default_factory=Counter[str])
    versions: int = 0
    scripts: Counter[str] = field(default_factory=Counter[str])
    script_s: dict[str, float] = field(default_factory=dict[str, float])
    points: set[str] = field(default_factory=set[str])
    outages: int = 0
    back_s: dict[str, float] = field(default_factory=dict[str, float])
    operations: int = 0
    failovers: int = 0
    forgotten: int = 0
    cut_logs: int = 0
    refused_starts: int = 0
    attacks: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    fp64_difference: float = 0.0
    verdict: Verdict = field(default_factory=Verdict)
    torn: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    torn_faults: list[str] = field(default_factory=list[str])
    findings: list[Finding] = field(default_factory=list[Finding])
    load: LoadResult | None = None
    hostile: FuzzCounts | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    broken: list[str] = field(default_factory=list[str])

    def part(self, name: str, run: Callable[[], T]) -> T | None:
        """Run a part; None where it did not come to its end, which is noted."""
        begin = time.monotonic()
        try:
            return run()
        except Exception as error:  # noqa: BLE001 - the other parts go on, and the run is not good
            traceback.print_exc()
            self.broken.append(f"{name}: {type(error).__name__}: {error}")
            return None
        finally:
            self.took(name, time.monotonic() - begin)

    def took(self, name: str, seconds: float) -> None:
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 1)
        print(f"{name}: {seconds:.1f} s", flush=True)

    def add_light(self, kills: Kills, num_kills: int, operations: int, torn: TornCounts) -> None:
        self.kills += num_kills
        self.in_window += kills.in_window
        self.points |= kills.points
        self.operations += operations
        self.torn += torn.counts
        self.torn_faults += torn.faults

    def add_deliveries(self, result: DeliveryResult) -> None:
        self.deliveries += result.kills
        self.versions += result.versions
        self.operations += result.operations
        self.verdict.add(result.verdict)

    def add_live(self, live: LiveResult) -> None:
        self.kills += live.kills
        self.points |= live.points
        self.outages += live.outages
        self.operations += live.operations
        self.verdict.add(live.verdict)
        for event, seconds in live.seconds.items():
            self.back_s[event] = max(seconds, self.back_s.get(event, 0.0))

    def add_scripts(self, result: ScriptResult) -> None:
        self.scripts += result.kills
        self.script_s |= result.seconds
        self.operations += result.operations
        self.verdict.add(result.verdict)

    def add_load(self, load: LoadResult) -> None:
        self.load = load
        self.operations += load.operations
        self.verdict.add(load.verdict)

    def add_cuts(self, result: CutResult) -> None:
        self.cut_logs += result.cuts
        self.refused_starts += result.refused
        self.operations += result.operations
        self.verdict.add(result.verdict)

    def add_failovers(self, result: FailoverResult) -> None:
        self.failovers += result.failovers
        self.forgotten += result.forgotten
        self.operations += result.operations
        self.verdict.add(result.verdict)

    @property
    def num_kills(self) -> int:
        return self.kills + self.deliveries.total() + self.scripts.total()

    @property
    def num_found(self) -> int:
        return sum(finding.is_found for finding in self.findings)

    @property
    def missed_points(self) -> list[str]:
        """Crash points at which nothing was killed."""
        return sorted(point for point in CrashPoint if point not in self.points)

    @property
    def missed_events(self) -> list[str]:
        """What was not killed of the real service, or did not come back."""
        return sorted(set(EVENTS) - self.back_s.keys())

    @property
    def num_crashes(self) -> int:
        return self.hostile.crashes + self.hostile.server_errors if self.hostile else 0

    @property
    def is_good(self) -> bool:
        return not any(True for _ in self.problems())

    def problems(self) -> Iterator[str]:
        """Each reason for which the run is not good, in words."""
        yield from (f"did not end: {text}" for text in self.broken)
        for finding in self.findings:
            if not finding.is_found:
                whole = finding.whole.lost + finding.whole.doubled
                yield f"self-test: {finding.build}: not found; the whole build: {whole[:3]}"
        if len(self.findings) != len(SCHEDULES):
            yield f"self-test: {len(self.findings)} of {len(SCHEDULES)} builds"
        yield from (self.verdict.lost + self.verdict.doubled)[:_MOST_SHOWN]
        if self.kills < MIN_KILLS:
            yield f"{self.kills} kills, expected {MIN_KILLS} or more"
        if self.in_window < MIN_IN_WINDOW:
            yield f"{self.in_window} kills inside a window, expected {MIN_IN_WINDOW} or more"
        if missed := sorted(set(ROLES) - self.deliveries.keys()):
            yield f"versions were not received under kills of: {', '.join(missed)}"
        if missed := sorted(set(SCRIPT_ROLES) - self.scripts.keys()):
            yield f"scripts did not run under kills of: {', '.join(missed)}"
        if self.failovers < len(PLACES) * len(Recovery) or not self.forgotten:
            yield f"{self.failovers} failovers of the database, {self.forgotten} ends forgotten"
        if self.cut_logs < 2 * len(SHARES) or not self.refused_starts:
            yield f"{self.cut_logs} logs cut short, {self.refused_starts} refused"
        if missed := sorted(ATTACKS.keys() - self.attacks.keys()):
            yield f"not attacked by: {', '.join(missed)}"
        for name, reasons in self.attacks.items():
            yield from (f"{name}: {reason}" for reason in reasons)
        if self.missed_points:
            yield f"nothing was killed at {', '.join(self.missed_points)}"
        if self.missed_events:
            yield f"the service was not seen to survive: {', '.join(self.missed_events)}"
        if not self.fp64_difference <= TOLERANCE:
            yield f"{self.fp64_difference:.1e} from the plain loop in float64"
        yield from self._input_problems()

    def _input_problems(self) -> Iterator[str]:
        """Problems of torn files, load and hostile inputs."""
        yield from (f"torn: {text}" for text in self.torn_faults[:_MOST_SHOWN])
        if not self.torn:
            yield "torn: no file"
        if self.load is None or not self.load.is_flat:
            yield f"load is not flat: {_load_text(self.load)}"
        if self.hostile is None or not self.hostile.inputs:
            yield "hostile: no input"
        else:
            yield from (f"hostile: {text}" for text in self.hostile.findings)
            if self.num_crashes and not self.hostile.findings:
                yield f"hostile: {self.num_crashes} crashes"
            if self.hostile.peak_rss_growth_bytes > MAX_GROWTH_BYTES:
                yield f"hostile: memory grew by {self.hostile.peak_rss_growth_bytes} bytes"

    def self_test_line(self) -> str:
        return f"self-test: {self.num_found}/{len(SCHEDULES)} faults found"

    def last_line(self) -> str:
        return (
            f"faults: {self.num_kills} kills, {len(self.verdict.lost)} lost, "
            f"{len(self.verdict.doubled)} doubled, {self.torn.total()} torn files, "
            f"{len(self.torn_faults)} loaded, "
            f"{self.hostile.inputs if self.hostile else 0} hostile inputs, "
            f"{self.num_crashes} crashes"
        )

    def figures(self) -> str:
        """What a person wants to see of a good run, too."""
        return (
            f"{self.operations} operations, {self.in_window} kills inside a window, "
            f"{self.failovers} failovers of the database, "
            f"{self.refused_starts} of {self.cut_logs} cut logs refused, "
            f"{sum(not reasons for reasons in self.attacks.values())} of {len(ATTACKS)} attacks "
            "withstood, "
            f"{self.fp64_difference:.1e} from the plain loop in float64; "
            f"load: {_load_text(self.load)}"
        )

    def result(self) -> dict[str, object]:
        """The fields of the result file, but for where it ran."""
        return {
            "is_good": self.is_good,
            "problems": list(self.problems()),
            "kills": self.num_kills,
            "lost": len(self.verdict.lost),
            "doubled": len(self.verdict.doubled),
            "kills_in_window": self.in_window,
            "deliveries": {**self.deliveries, "versions": self.versions},
            "scripts": dict(self.scripts),
            "script_s": self.script_s,
            "crash_points": sorted(self.points),
            "missed_crash_points": self.missed_points,
            "back_s": self.back_s,
            "outages": self.outages,
            "failovers": self.failovers,
            "forgotten": self.forgotten,
            "cut_logs": self.cut_logs,
            "refused_starts": self.refused_starts,
            "attacks": self.attacks,
            "operations": self.operations,
            "fp64_difference": self.fp64_difference,
            "self_test": {finding.build: finding.is_found for finding in self.findings},
            "torn_files": self.torn.total(),
            "loaded": len(self.torn_faults),
            "torn": {f"{kind}, {what}": count for (kind, what), count in self.torn.items()},
            "load": _without_verdict(self.load),
            "hostile": None if self.hostile is None else asdict(self.hostile),
            "crashes": self.num_crashes,
            "seconds": self.seconds,
        }


def _without_verdict(load: LoadResult | None) -> dict[str, object] | None:
    """Its verdict is in the counts of the whole."""
    if load is None:
        return None
    return {name: value for name, value in asdict(load).items() if name != "verdict"}


def _load_text(load: LoadResult | None) -> str:
    if load is None:
        return "none"
    return (
        f"{load.operations} operations, GetOperation p99 {1000 * load.p99_s:.0f} ms (of the "
        f"{load.quiet:.0%} of the time without busy programs beside), memory "
        f"{load.pss_growth:+.1%}, descriptors {load.more_descriptors:+.1f}"
    )
