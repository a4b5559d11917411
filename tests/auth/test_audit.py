"""What anybody can cause does not fill the disk."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from ratoon.auth.audit import REFUSALS_A_MINUTE, SUPPRESSED, AuditEntry, AuditLog
from tests.auth.test_rates import Clock

REFUSED = AuditEntry(
    key_id="", peer="stranger", call="update", policy_id="", seq=0, outcome="UNAUTHENTICATED"
)
ANSWERED = replace(REFUSED, key_id="k", peer="friend", outcome="OK")


def _lines(root: Path) -> list[dict[str, Any]]:
    text = (root / "access" / "audit.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _log(root: Path, clock: Clock, max_file_bytes: int = 0) -> AuditLog:
    return AuditLog(root, max_file_bytes=max_file_bytes, max_files=3, now=clock)


def test_a_strangers_refusals_are_counted_beyond_so_many(tmp_path: Path) -> None:
    clock = Clock()
    log = _log(tmp_path, clock)
    for _ in range(1000):
        log.write(REFUSED)
    log.write(replace(REFUSED, peer="another"))
    log.write(ANSWERED)
    lines = _lines(tmp_path)
    assert len(lines) == REFUSALS_A_MINUTE + 2
    assert lines[-1]["outcome"] == "OK"
    clock.now += 61.0
    log.write(ANSWERED)
    counted = _lines(tmp_path)[len(lines)]
    assert counted.pop("at")
    assert counted == {
        "peer": "stranger",
        "outcome": SUPPRESSED,
        "num_suppressed": 1000 - REFUSALS_A_MINUTE,
    }
    log.write(REFUSED)
    assert _lines(tmp_path)[-1]["outcome"] == "UNAUTHENTICATED"


def test_many_strangers_together_are_bounded_too(tmp_path: Path) -> None:
    clock = Clock()
    log = _log(tmp_path, clock)
    for number in range(5000):
        log.write(replace(REFUSED, peer=f"host {number}"))
    assert len(_lines(tmp_path)) == 10 * REFUSALS_A_MINUTE
    clock.now += 61.0
    log.write(ANSWERED)
    (counted,) = [line for line in _lines(tmp_path) if line["outcome"] == SUPPRESSED]
    assert (counted["peer"], counted["num_suppressed"]) == ("", 5000 - 10 * REFUSALS_A_MINUTE)


def test_what_is_answered_is_never_counted_instead(tmp_path: Path) -> None:
    log = _log(tmp_path, Clock())
    for _ in range(20 * REFUSALS_A_MINUTE):
        log.write(ANSWERED)
    assert len(_lines(tmp_path)) == 20 * REFUSALS_A_MINUTE


def test_files_are_put_aside_and_the_oldest_dropped(tmp_path: Path) -> None:
    log = _log(tmp_path, Clock(), max_file_bytes=1000)
    for seq in range(60):
        log.write(replace(ANSWERED, seq=seq))
    aside = sorted((tmp_path / "access").glob("audit-*.jsonl"))
    assert len(aside) == 3
    assert all(1000 <= path.stat().st_size < 1300 for path in aside)
    lines = [json.loads(line) for path in aside for line in path.read_text().splitlines()]
    seqs = [line["seq"] for line in [*lines, *_lines(tmp_path)]]
    assert seqs == list(range(seqs[0], 60))


def test_writers_that_meet_lose_no_line(tmp_path: Path) -> None:
    def write(number: int) -> None:
        log = AuditLog(tmp_path, max_file_bytes=2000, max_files=1000)
        for seq in range(100):
            log.write(replace(ANSWERED, peer=str(number), seq=seq))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    paths = (tmp_path / "access").glob("audit*.jsonl")
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    seen = {(line["peer"], line["seq"]) for line in lines}
    assert len(lines) == len(seen) == 400
