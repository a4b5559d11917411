"""Connects this process to Ray: to a cluster, or to one that it starts for this machine alone.

Whoever reaches Ray's ports can run code, so a Ray started here listens on loopback only and
requires a token that only this user can read. The logs of its processes, which write to files in
their session's folder, are copied to one stream, each line labelled with its actor.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

import ray

from ratoon.auth.keys import access_folder, make_access_folder
from ratoon.cluster.ray_private import (
    SESSION_LATEST,
    LocalRay,
    forget_token,
    hide_token_notices,
    on_loopback,
)
from ratoon.config import RatoonConfig, is_loopback, is_ray_open, ray_token_file
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import ShownLogs, copied_event, get_logger, ray_level
from ratoon.stream.files import fsync_folder, temporary_name, write_atomic

_log = get_logger("ray")
_POLL_S = 0.25
# Read per file and round, so that a busy file does not hold up the others.
_MOST_BYTES = 2**20
_WORKER = re.compile(r"worker-[0-9a-f]+-[0-9a-f]+-(?P<pid>\d+)\.(?:out|err)")
_DAEMON = re.compile(r"(?P<name>raylet|gcs_server)(?:\.\d+)?\.err")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """A Ray that this process has started. `logs` None: its logs are not shown."""

    ray: LocalRay
    logs: RayLogs | None


# At most one: a process has one connection to Ray.
_own: list[_Own] = []


def connect_ray(config: RatoonConfig, *, shown: ShownLogs) -> None:
    """Connect to the cluster of `config.ray.address`, or start Ray. `shown`: its logs here.

    Ray's own variables for its token take precedence; turning the token off logs a warning.
    """
    options: dict[str, Any] = {
        "namespace": config.ray.namespace,
        "logging_level": config.log_level,
    }
    with _own_sigterm():
        if config.ray.address:
            show = shown is not ShownLogs.NONE
            ray.init(address=config.ray.address, log_to_driver=show, **options)
        else:
            _start_ray(config, options, shown)


def _start_ray(config: RatoonConfig, options: dict[str, Any], shown: ShownLogs) -> None:
    token_file = make_token_file(config.data_root.absolute())
    sessions = SessionFolders(config.data_root.absolute())
    if is_ray_open():
        _log.warning("Ray asks for no token: every user of this machine can run code in it")
    hide_token_notices()
    level = ray_level(config.log_level) if shown is ShownLogs.ALL else "ERROR"
    logging.getLogger("ray").setLevel(level)
    with ray_token_file(token_file), on_loopback():
        forget_token()
        folder = config.ray.temp_folder or str(make_ray_folder())
        try:
            local = LocalRay(
                num_cpus=config.ray.num_cpus,
                object_store_bytes=config.ray.object_store_bytes,
                temp_folder=folder,
            )
        except Exception as err:  # Ray has no class for it.
            logs = Path(folder) / SESSION_LATEST / "logs"
            text = (
                f"Ray did not start ({err}); a start on a less busy machine may. Its logs: {logs}"
            )
            raise RatoonError(ErrorCode.UNAVAILABLE, text) from err
        logs = None
        if shown is not ShownLogs.NONE:
            logs = RayLogs(local.session_folder / "logs", sys.stderr, shown)
        _own.append(_Own(ray=local, logs=logs))
        if logs is not None:
            logs.start()
        try:
            options |= {"logging_level": level}
            ray.init(address=local.address, log_to_driver=False, **options)
            local.open_forks()
        except BaseException:
            leave_ray()
            raise
    sessions.begin(local.session_folder)
    address = ray.util.get_node_ip_address()
    if not is_loopback(address):
        leave_ray()
        raise RuntimeError(f"Ray listens on {address}, expected loopback")


def is_own_ray() -> bool:
    """Whether this process started its Ray, and will end it."""
    return bool(_own)


def ended_processes() -> list[str]:
    """Names of the essential processes of our own Ray that have ended.

    Always empty on a cluster, which others watch.
    """
    return [name for own in _own for name in own.ray.ended_processes()]


def exit_without_ray() -> NoReturn:
    """End this process with status 1, and the rest of our own Ray; its workers follow.

    Nothing is drained: an orderly end would wait a minute for the processes that are gone.
    """
    for own in _own:
        own.ray.end(is_orderly=False)
        if own.logs is not None:
            own.logs.stop()
    os._exit(1)


def leave_ray() -> None:
    """End what `connect_ray` began, with the session folder of a Ray that was started here.

    The next Ray of this process gets a token of its own.
    """
    ray.shutdown()
    while _own:
        own = _own.pop()
        own.ray.end(is_orderly=True)
        if own.logs is not None:
            own.logs.stop()
        remove_session(own.ray.session_folder)
    forget_token()


class SessionFolders:
    """The session folders (sockets and logs) of every Ray started for a data root.

    The folder of a killed Ray is kept, so that its logs can be read; the start after next removes
    it.
    """

    def __init__(self, data_root: Path) -> None:
        self._names = access_folder(data_root) / "ray-sessions"

    def begin(self, folder: Path) -> None:
        """Remove all earlier folders but the newest, and record `folder`."""
        text = self._names.read_text("utf-8") if self._names.exists() else ""
        left = [path for path in map(Path, text.splitlines()) if path.is_dir()]
        for path in left[:-1]:
            remove_session(path)
        kept = [*left[-1:], folder]
        write_atomic(self._names, "".join(f"{path}\n" for path in kept).encode())


def remove_session(folder: Path) -> None:
    """Remove the folder, and Ray's link to the latest session where it points there."""
    latest = folder.parent / SESSION_LATEST
    if latest.is_symlink() and latest.readlink() == folder:
        latest.unlink(missing_ok=True)
    if folder.name.startswith("session_") and not folder.is_symlink():
        # Ray's last processes may still be writing here; that is not worth an error.
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _own_sigterm() -> Generator[None, None, None]:
    """Restore the caller's SIGTERM handler: Ray's own ends the process at once."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if callable(handler):
        signal.signal(signal.SIGTERM, handler)


def make_token_file(data_root: Path) -> Path:
    """The token's path. The file is made once, atomically; a Ray that runs with it goes on."""
    make_access_folder(data_root)
    path = access_folder(data_root) / "ray-token"
    if path.exists():
        return path
    temporary = temporary_name(path)
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # Another process was first.
            path.hardlink_to(temporary)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def make_ray_folder() -> Path:
    """A folder for Ray's sockets and logs, for this user alone: Ray opens its own to everybody.

    Not below the data root: a socket path has at most 107 bytes. Raises INVALID_ARGUMENT where
    another user has made the folder.
    """
    folder = Path(tempfile.gettempdir()) / f"ratoon-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or status.st_mode & 0o077:
        got = f"none, and {folder} is open to other users"
        raise invalid("ray.temp_folder", got, "a folder of this user alone (chmod 700)")
    # Ray opens the folder it is given to everybody, so give it one inside.
    inner = folder / "ray"
    inner.mkdir(exist_ok=True)
    return inner


# Markers that Ray writes between lines to say whose they are.
# Labels of Ray's and Serve's own processes.
_INNER = ("raylet", "gcs_server", "Serve", "Proxy")
_ACTOR, _OTHER_MARKS = ":actor_name:", (":job_id:", ":task_name:")


@dataclass(slots=True, kw_only=True)
class _File:
    path: Path
    label: str
    # "": a daemon, whose label never changes.
    pid: str
    offset: int = 0
    rest: bytes = b""


class RayLogs:
    """Tails a folder of logs from `start` to `stop`, which copies what is left."""

    def __init__(self, folder: Path, stream: TextIO, shown: ShownLogs) -> None:
        self._folder = folder
        self._stream = stream
        self._is_all = shown is ShownLogs.ALL
        self._files: dict[str, _File] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ray-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self.copy()

    def copy(self) -> None:
        """Write the complete lines added since the last call."""
        for path in sorted(self._folder.glob("*.*")):
            file = self._files.get(path.name) or _file_of(path)
            if file is not None:
                self._files[path.name] = file
                self._copy_file(file)
        self._stream.flush()

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_S):
            self.copy()

    def _copy_file(self, file: _File) -> None:
        try:
            size = file.path.stat().st_size
            if size < file.offset:
                file.offset, file.rest = 0, b""  # It was rotated.
            if size == file.offset:
                return
            with file.path.open("rb") as opened:
                opened.seek(file.offset)
                data = opened.read(_MOST_BYTES)
        except FileNotFoundError:
            return
        file.offset += len(data)
        *lines, file.rest = (file.rest + data).split(b"\n")
        for line in lines:
            self._write(file, line.decode("utf-8", "replace"))

    def _write(self, file: _File, line: str) -> None:
        if line.startswith(_ACTOR):
            file.label = f"{line.removeprefix(_ACTOR)} pid={file.pid}"
        elif line and not line.startswith(_OTHER_MARKS):
            event = copied_event(line, self._stream)
            if event is not None:
                self._stream.write(f"{event}\n")
            elif self._is_all or not file.label.startswith(_INNER):
                self._stream.write(f"({file.label}) {line}\n")


def _file_of(path: Path) -> _File | None:
    """None: a file that is not shown."""
    if found := _WORKER.fullmatch(path.name):
        return _File(path=path, label=f"pid={found['pid']}", pid=found["pid"])
    if found := _DAEMON.fullmatch(path.name):
        return _File(path=path, label=found["name"], pid="")
    return None
