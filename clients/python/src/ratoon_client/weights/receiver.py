"""Versions of a policy into an engine, each as soon as it is published.

What is committed was pulled and verified whole; until the engine has taken it, and where it does
not, the version before it is served.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import tenacity
import xxhash

from ratoon_client.caller import Caller, may_pass
from ratoon_client.config import weights_root
from ratoon_client.errors import (
    EngineError,
    IntegrityError,
    InvalidArgumentError,
    RatoonApiError,
    RatoonClientError,
)
from ratoon_client.operation import POLL_S
from ratoon_client.weights.calls import ack_weights, weight_manifest
from ratoon_client.weights.disk import held, in_thread
from ratoon_client.weights.folder import (
    Committed,
    VersionsFolder,
    files_of,
    read_committed,
    write_committed,
)
from ratoon_client.weights.pull import KEEP_VERSIONS, fetch_delta, pull_weights
from ratoon_proto.types import WeightManifest

_LOG = logging.getLogger("ratoon_client")
_FIRST_RETRY_S = 0.5
_MAX_RETRY_S = 60.0


class Adapter(Protocol):
    """One engine. A receiver calls one method at a time, and none once it was cancelled."""

    async def tag(self) -> str | None:
        """Another text once the engine has lost what was committed last; None: it cannot tell.

        Raises EngineError where the engine does not answer.
        """
        ...

    async def commit(
        self, folder: Path, manifest: WeightManifest, *, previous: Path | None
    ) -> float:
        """Serve the version in `folder`; gives the seconds in which nothing was sampled.

        Has ended, one way or the other, when its caller goes on, cancelled or not. Raises
        EngineError where the engine did not take it, and has then loaded `previous` again, the
        folder of the version committed before, as far as it could.
        """
        ...


@runtime_checkable
class DeltaAdapter(Adapter, Protocol):
    """An engine that can take a version as a delta, before its files are here."""

    async def commit_delta(
        self, delta: Path, manifest: WeightManifest, *, previous: Path
    ) -> float | None:
        """Serve the version that `delta` makes of the one in `previous`, committed before.

        Gives the seconds in which nothing was sampled, or None where the engine cannot make it of
        what it has: nothing has changed then, and the version comes by `commit`. Ends and raises as
        `commit`.
        """
        ...


class FolderAdapter:
    """Readers of the folder follow its `latest`, which a receiver sets after each commit."""

    async def tag(self) -> str | None:
        return "folder"

    async def commit(
        self, folder: Path, manifest: WeightManifest, *, previous: Path | None
    ) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A version that the engine took. `size_bytes` is all of it, `fetched_bytes` what came now.

    `fetch_s` and `verify_s` are `PulledWeights`'; in `pause_s` of them the engine sampled nothing.
    """

    policy_id: str
    version: int
    folder: Path
    size_bytes: int
    fetched_bytes: int
    fetch_s: float
    verify_s: float
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveFailure:
    """Why `version` (None: it is not known which) is not served; tried again in `retry_s`."""

    policy_id: str
    version: int | None
    error: BaseException
    retry_s: float


ReceiverEvent = Received | ReceiveFailure


def log_event(event: ReceiverEvent) -> None:
    """What a receiver does with its events where it is not told."""
    if isinstance(event, Received):
        _LOG.info("%s: version %d is served", event.policy_id, event.version)
    else:
        _LOG.warning("%s: version %s: %s", event.policy_id, event.version, event.error)


class AsyncWeightReceiver:
    """`root` is this receiver's alone: `keep` versions at most, and `latest`, the one committed.

    `receiver_id` is its name in the service's metrics; None: of this host and `root`.
    `on_event` is called on the event loop for each version, and by `follow` for each failure.
    """

    def __init__(
        self,
        caller: Caller,
        policy_id: str,
        root: Path | str,
        adapter: Adapter | None = None,
        *,
        receiver_id: str | None = None,
        keep: int = KEEP_VERSIONS,
        on_event: Callable[[ReceiverEvent], None] = log_event,
    ) -> None:
        if keep < 2:
            raise InvalidArgumentError("keep", keep, "2 or more: what is served, and what comes")
        self._caller = caller
        self._policy_id = policy_id
        # Engines are told whole paths.
        self._root = Path(root).absolute()
        self._receiver_id = receiver_id or own_id(self._root)
        self._folder = VersionsFolder(self._root)
        self._adapter = FolderAdapter() if adapter is None else adapter
        self._keep = keep
        self._on_event = on_event
        self._wanted: int | None = None

    async def sync_once(self, wait_s: float = 0.0) -> Received | None:
        """Bring the engine to the newest version; None where the engine serves it already.

        The newest version is never older than what an operation made that had ended before this
        call: while the service still writes that version, the call waits for it. `wait_s` is how
        many seconds it waits beyond that for a version that no operation has made yet.

        Raises EngineError, IntegrityError, TransportError, RatoonApiError or OSError where that
        fails: the engine serves what it did, unless an EngineError says otherwise.
        """
        with self._alone():
            return await self._sync(wait_s)

    async def follow(self) -> None:
        """Bring the engine to each version as it is published, until cancelled.

        What fails is tried again, ever later. A slow engine gets only the newest version. Raises
        what no retry helps: for one that the policy is gone.
        """
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_random_exponential(multiplier=_FIRST_RETRY_S, max=_MAX_RETRY_S),
            before_sleep=self._report,
            sleep=self._rest,
        )
        with self._alone():
            while True:
                await retrying(self._sync, POLL_S)

    @contextmanager
    def _alone(self) -> Generator[None]:
        try:
            with held(self._root / ".receiver.lock"):
                yield
        except BlockingIOError:
            raise InvalidArgumentError(
                "root", f"{self._root}, another receiver's", "a folder of this one's own"
            ) from None

    async def _sync(self, wait_s: float) -> Received | None:
        gone: WeightManifest | None = None
        while True:
            self._wanted = None
            committed = await in_thread(read_committed, self._root, self._policy_id)
            served = committed if await self._is_served(committed) else None
            newest = await self._newest(served, wait_s)
            if newest is None:
                return None
            try:
                return await self._receive(newest, committed)
            except RatoonApiError as error:
                # Retired while it was pulled: then the newest is another one.
                if error.code != "WEIGHTS_NOT_FOUND" or newest == gone:
                    raise
                gone, wait_s = newest, 0.0

    async def _is_served(self, committed: Committed | None) -> bool:
        """Whether the engine still has it; one that cannot tell is not trusted."""
        tag = await self._adapter.tag()
        return committed is not None and tag is not None and committed.tag == tag

    async def _newest(self, served: Committed | None, wait_s: float) -> WeightManifest | None:
        """The newest version, where it is another than what is served."""
        known = None if served is None else served.version
        try:
            newest = await weight_manifest(
                self._caller,
                self._policy_id,
                known_version=known,
                wait_s=wait_s,
                delta_from=known if self._wants_deltas else None,
            )
        except RatoonApiError as error:
            if error.code != "WEIGHTS_NOT_FOUND":
                raise
            return None  # Nothing is published yet.
        if newest.version == known:
            # A policy that was made anew has other files under its old numbers.
            files = await in_thread(files_of, self._folder.version_folder(newest.version))
            if files == set(newest.files):
                return None
        return newest

    async def _receive(self, newest: WeightManifest, committed: Committed | None) -> Received:
        self._wanted = newest.version
        served = None if committed is None else committed.version
        await self._acknowledge(served, holds_version=newest.version)
        await self._make_room(newest, committed)
        pause_s = await self._commit_delta(newest, committed)
        pulled = await pull_weights(
            self._caller, self._policy_id, self._root, version=newest.version, keep=None
        )
        if pause_s is None:
            await self._forget_tag(committed)
            pause_s = await self._adapter.commit(
                pulled.folder, pulled.manifest, previous=self._previous(newest, committed)
            )
        async with self._folder.locked():
            await in_thread(self._folder.point_latest, pulled.version)
        tag = await self._adapter.tag()
        done = Committed(policy_id=self._policy_id, version=pulled.version, tag=tag)
        await in_thread(write_committed, self._root, done)
        await self._acknowledge(pulled.version)
        received = Received(
            policy_id=self._policy_id,
            version=pulled.version,
            folder=pulled.folder,
            size_bytes=sum(file.size_bytes for file in pulled.manifest.files),
            fetched_bytes=pulled.fetched_bytes,
            fetch_s=pulled.fetch_s,
            verify_s=pulled.verify_s,
            pause_s=pause_s,
        )
        self._on_event(received)
        return received

    @property
    def _wants_deltas(self) -> bool:
        """Whether a delta is of use before files are there, which a `weights_root` links."""
        return isinstance(self._adapter, DeltaAdapter) or weights_root(self._caller.config) is None

    async def _commit_delta(
        self, newest: WeightManifest, committed: Committed | None
    ) -> float | None:
        """Commit by the delta from what is committed; None where that cannot be."""
        adapter, previous = self._adapter, self._previous(newest, committed)
        if committed is None or previous is None or not isinstance(adapter, DeltaAdapter):
            return None
        for delta in newest.deltas:
            if delta.parent_version == committed.version:
                try:
                    path = await fetch_delta(self._caller, self._root, newest, delta)
                except IntegrityError as error:
                    _LOG.info("%s: not by a delta: %s", self._policy_id, error)
                    return None
                await self._forget_tag(committed)
                return await adapter.commit_delta(path, newest, previous=previous)
        return None

    async def _forget_tag(self, committed: Committed | None) -> None:
        """Who ends during a commit leaves an engine of which nothing is known."""
        if committed is not None:
            await in_thread(write_committed, self._root, replace(committed, tag=None))

    async def _make_room(self, newest: WeightManifest, committed: Committed | None) -> None:
        """Before the pull: a folder in memory must not hold more than it has to."""
        versions = [newest.version] if committed is None else [newest.version, committed.version]
        async with self._folder.locked():
            await in_thread(self._folder.prune, keep=self._keep, versions=versions)

    def _previous(self, newest: WeightManifest, committed: Committed | None) -> Path | None:
        """What an engine may be given back where it does not take the new version."""
        if committed is None or committed.version == newest.version:
            return None
        folder = self._folder.version_folder(committed.version)
        return folder if files_of(folder) else None

    async def _acknowledge(self, version: int | None, holds_version: int | None = None) -> None:
        """Tell the service what is served, and what must stay while it is fetched.

        One that does not hear it, or holds enough already, has its versions all the same.
        """
        try:
            await ack_weights(
                self._caller,
                self._policy_id,
                self._receiver_id,
                version=version,
                holds_version=holds_version,
            )
        except RatoonClientError as error:
            _LOG.info("%s: not acknowledged: %s", self._policy_id, error)

    def _report(self, state: tenacity.RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        assert error is not None
        self._on_event(
            ReceiveFailure(
                policy_id=self._policy_id,
                version=self._wanted,
                error=error,
                retry_s=state.upcoming_sleep,
            )
        )

    async def _rest(self, seconds: float) -> None:
        """Until then, or until another version than the one that failed is the newest."""
        end = time.monotonic() + seconds
        if self._wanted is not None:
            try:
                newest = await weight_manifest(
                    self._caller, self._policy_id, known_version=self._wanted, wait_s=seconds
                )
            except RatoonClientError:
                pass  # The next try says what is wrong.
            else:
                if newest.version != self._wanted:
                    return
        await asyncio.sleep(max(end - time.monotonic(), 0.0))


def own_id(root: Path) -> str:
    """A name that stays after a restart: characters that the service takes, at most 64."""
    host = re.sub(r"[^a-zA-Z0-9._-]", "-", platform.node())[:47]
    return f"{host}-{xxhash.xxh3_64_hexdigest(str(root).encode())}"


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, RatoonApiError):
        return error.retryable or error.code == "WEIGHTS_NOT_FOUND"
    return isinstance(error, IntegrityError | EngineError | OSError) or may_pass(error)
