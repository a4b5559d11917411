"""A power cut at any promise, or at any moment, loses nothing that was promised.

The page cache survives a kill and not this: what a real process wrote, synced and promised is
recorded, and the service recovers from each disk that its files may be on afterwards.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ratoon_proto.types import Recovery
from tests.durability.cuts import (
    Recording,
    cuts_at_promises,
    distinct,
    first_loss,
    recover,
    torn_cuts,
)
from tests.durability.disk import Disk, read_image
from tests.durability.promises import parse_marks
from tests.durability.recorder import SHARED_MEMORY, Event, Kind
from tests.durability.sites import SITES, site_of

NUM_TORN = 24


def test_the_record_is_all_that_the_process_did(recording: Recording) -> None:
    """Without this a write that the shim does not see would pass for one that was never needed."""
    disk = Disk()
    for event in recording.events:
        disk.apply(event)
    assert disk.now() == read_image(recording.root, SHARED_MEMORY)


def test_the_recorded_life_has_everything_in_it(recording: Recording) -> None:
    kinds = {mark["kind"] for mark in parse_marks(recording.events)}
    assert kinds == {
        *("created", "started", "published", "accepted", "ended", "result"),
        *("key", "revoked", "uploaded", "deleted", "unnamed", "lost"),
    }
    assert {site_of(event) for event in recording.events} >= set(SITES)
    first = next(index for index, event in enumerate(recording.events) if event.kind is Kind.MARK)
    wal = [event for event in recording.events[first:] if event.path.endswith("-wal")]
    # The log was begun anew after it had been folded back into the journal.
    assert any(event.offset == 0 for event in wal if event.kind is Kind.WRITE)


def test_the_recorded_life_has_the_weights_of_an_undisturbed_one(recording: Recording) -> None:
    """It lost its processes twice."""
    marks = parse_marks(recording.events)
    ran = {mark["seq"]: tuple(mark["digests"]) for mark in marks if mark.get("digests")}
    assert len(ran) > 15
    assert ran == {seq: recording.oracle[seq] for seq in ran}


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.more)])
def test_a_power_cut_at_any_promise_loses_none(recording: Recording, ram: Path, every: int) -> None:
    cuts = distinct(cuts_at_promises(recording))
    assert len(cuts) > 40
    for cut in cuts[::every]:
        recover(recording, cut, ram)


def test_a_power_cut_of_a_policy_that_fails_what_was_lost_loses_nothing_in_silence(
    recording: Recording, ram: Path
) -> None:
    """Its weights are those of its newest checkpoint, and what came after has failed by name."""
    failing = replace(recording, spec=replace(recording.spec, recovery=Recovery.FAIL))
    for cut in distinct(cuts_at_promises(failing))[::4]:
        recover(failing, cut, ram)


@pytest.mark.more
def test_a_power_cut_at_any_moment_loses_no_promise(recording: Recording, ram: Path) -> None:
    """Any unsynced page, sector or name may be on the disk."""
    places = random.Random(3).sample(range(len(recording.events)), NUM_TORN)
    num_cuts = 0
    for cut in torn_cuts(recording, places):
        recover(recording, cut, ram)
        num_cuts += 1
    assert num_cuts == NUM_TORN


@pytest.mark.parametrize(
    "site",
    [
        # One of three in each run of CI, all of them at night: each is its own proof.
        pytest.param(site, marks=pytest.mark.slow if index % 3 else pytest.mark.more)
        for index, site in enumerate(SITES)
    ],
)
def test_a_power_cut_without_an_fsync_is_noticed(
    recording: Recording, ram: Path, site: str
) -> None:
    loss = first_loss(recording, lambda event: site_of(event) != site, ram)
    assert loss is not None, f"nothing notices that {site} is not synced: is it needed?"


@pytest.mark.more
def test_a_power_cut_after_a_log_was_folded_back_unsynced_is_noticed(
    recording: Recording, ram: Path
) -> None:
    """The journal itself is synced once more when its log begins anew."""
    first = next(event for event in recording.events if event.kind is Kind.MARK)
    early = {id(event) for event in recording.events[: recording.events.index(first)]}

    def is_done(event: Event) -> bool:
        return site_of(event) != "journal" or id(event) in early

    assert first_loss(recording, is_done, ram) is not None
