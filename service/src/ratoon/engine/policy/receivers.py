"""Receivers of a policy's versions: which one each serves, and which one it holds while reading.

They are kept in memory only: an engine that starts knows of no receiver and no hold. What a list of
versions says of each is here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ratoon.engine.types import Acknowledgement, NamedVersion
from ratoon.errors import ErrorCode, RatoonError, exhausted
from ratoon.stream.versions import read_manifest
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto import types
from ratoon_proto.types import PublishConfig, PublishKind, ReceiverInfo, StepWarning, VersionInfo

# Receivers per policy; one more makes the longest silent one forgotten.
MAX_RECEIVERS = 64
# Publications behind the newest from which on a receiver that follows lags, and from which on one
# is taken for gone.
LAGGING = range(9, 65)
# Receivers that one warning names.
_MOST_NAMED = 8
# A hold ends with its reader's next acknowledgement.
_RETRY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Receiver:
    """`version` None: it serves none. `held` None: it holds none; else until `until`.

    `seen_at`: when it last said so, in seconds since the epoch.
    """

    version: int | None
    held: int | None
    until: float
    seen_at: float


class Receivers:
    """The last acknowledgement of each of a policy's receivers, the longest silent first."""

    def __init__(
        self,
        *,
        max_held: int,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """At most `max_held` different versions are held at a time."""
        self._max_held = max_held
        self._clock = clock
        self._now = now
        self._receivers: dict[str, _Receiver] = {}

    def acknowledge(self, ack: Acknowledgement) -> tuple[str, ...]:
        """Replace what the receiver said before; returns the ids whose lag is no longer known.

        Raises RESOURCE_EXHAUSTED where it would hold one version too many; nothing changes then.
        """
        self._check_held(ack)
        earlier = self._receivers.pop(ack.receiver_id, None)
        self._receivers[ack.receiver_id] = _Receiver(
            version=ack.version,
            held=ack.holds_version,
            until=self._clock() + ack.hold_s,
            seen_at=self._now(),
        )
        unknown: list[str] = []
        if ack.version is None and earlier is not None:
            unknown.append(ack.receiver_id)
        if len(self._receivers) > MAX_RECEIVERS:
            silent = next(iter(self._receivers))
            del self._receivers[silent]
            unknown.append(silent)
        return tuple(unknown)

    def held(self, *, without: str = "") -> frozenset[int]:
        """Versions that a receiver, other than `without`, holds now."""
        now = self._clock()
        return frozenset(
            receiver.held
            for name, receiver in self._receivers.items()
            if receiver.held is not None and now < receiver.until and name != without
        )

    def lags(self, newest: int) -> Mapping[str, int]:
        """Versions from what each serves to `newest`, by receiver."""
        return {
            name: newest - receiver.version
            for name, receiver in self._receivers.items()
            if receiver.version is not None
        }

    def lagging(self, newest: int, every: int) -> tuple[str, ...]:
        """What each receiver that lags serves, in words, the farthest behind first.

        `every`: versions from one publication to the next.
        """
        lags = sorted(self.lags(newest).items(), key=lambda each: -each[1])
        return tuple(
            f"{name} version {newest - lag} ({lag} behind)"
            for name, lag in lags
            if lag // every in LAGGING
        )

    def lag_warning(self, newest: int | None, publish: PublishConfig) -> StepWarning | None:
        """A warning of receivers far behind `newest`, the version published last; None: none is.

        Receivers that ask for each version follow at a pace of their own.
        """
        if newest is None or publish.kind is PublishKind.ON_REQUEST:
            return None
        lagging = self.lagging(
            newest, publish.every_n if publish.kind is PublishKind.EVERY_N else 1
        )
        if not lagging:
            return None
        more = len(lagging) - _MOST_NAMED
        text = (
            f"receivers serve weights far behind version {newest}, the newest: "
            f"{', '.join(lagging[:_MOST_NAMED])}{f' and {more} more' if more > 0 else ''}; they "
            "have stopped, or load versions more slowly than they are made"
        )
        return warn(WarningKind.RECEIVER_LAG, text)

    def described(self, newest: int | None) -> tuple[ReceiverInfo, ...]:
        """All receivers, the longest silent first, with their lags behind `newest`."""
        now = self._clock()
        lags = dict[str, int]() if newest is None else self.lags(newest)
        return tuple(
            ReceiverInfo(
                receiver_id=name,
                version=receiver.version,
                lag=lags.get(name),
                holds_version=receiver.held if now < receiver.until else None,
                last_seen=datetime.fromtimestamp(receiver.seen_at, UTC),
            )
            for name, receiver in self._receivers.items()
        )

    def _check_held(self, ack: Acknowledgement) -> None:
        held = self.held(without=ack.receiver_id)
        if ack.holds_version is None or ack.holds_version in held or len(held) < self._max_held:
            return
        raise exhausted(
            f"receivers hold versions {sorted(held)}, of at most {self._max_held}",
            resource="held_versions",
            wanted=1,
            free=self._max_held - len(held),
            limit=self._max_held,
            retry_after_s=_RETRY_S,
        )


def describe_versions(
    root: Path,
    policy_id: str,
    listed: tuple[int, ...],
    named: tuple[NamedVersion, ...],
    held: frozenset[int],
) -> Iterator[VersionInfo]:
    """The `listed` versions whose files are there, with their names; reads their manifests."""
    for version in listed:
        info = version_info(root, version, policy_id)
        if info is not None:
            names = tuple(_shown(each) for each in named if each.version == version)
            yield replace(info, is_held=version in held, names=names)


def version_info(root: Path, version: int, policy_id: str) -> VersionInfo | None:
    """A published version, without names and holds; None: it was dropped meanwhile."""
    try:
        manifest = read_manifest(root, version, policy_id)
    except RatoonError as error:
        if error.code is not ErrorCode.WEIGHTS_NOT_FOUND:
            raise
        return None
    return VersionInfo(
        version=version,
        size_bytes=sum(file.size_bytes for file in manifest.files),
        delta_bytes=sum(delta.file.size_bytes for delta in manifest.deltas),
        published_at=datetime.fromtimestamp(manifest.created_at, UTC),
        is_held=False,
        names=(),
    )


def _shown(named: NamedVersion) -> types.NamedVersion:
    expires_at = named.expires_at
    return types.NamedVersion(
        name=named.name,
        version=named.version,
        size_bytes=named.size_bytes,
        created_at=datetime.fromtimestamp(named.created_at, UTC),
        expires_at=None if expires_at is None else datetime.fromtimestamp(expires_at, UTC),
    )
