"""How far a policy's journal had come when callers were last told of it, beside the journal.

The journal counts the writes that callers are told of, and after which files are deleted; after
each of them the count goes into the file `position` of the policy's folder. A journal whose count
is lower than the file's has lost committed writes, whatever the cause.

The file is not synced, as it need not survive what the journal survives: a power cut may leave it
older than the journal, which says nothing. It is never newer than what was committed.
"""

from __future__ import annotations

import os
import struct
from dataclasses import astuple, dataclass
from pathlib import Path

from ratoon.log import get_logger
from ratoon.stream.files import DamagedFileError, seal_bytes, unseal_bytes

_LOG = get_logger("position")
_FIELDS = struct.Struct(">5Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """`count`: of the journal's writes. `token`: the newest fencing token.

    `max_seq`: the highest seq accepted. `last_seq`: the highest that ended in its turn.
    """

    count: int = 0
    token: int = 0
    max_seq: int = 0
    last_seq: int = 0
    version: int = 0


def read_position(path: Path) -> Position | None:
    """Read the file; None: there is none, or a power cut or a disk has torn it."""
    try:
        values = _FIELDS.unpack(unseal_bytes(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, DamagedFileError, struct.error) as err:
        _LOG.warning("position unreadable", path=str(path), reason=str(err))
        return None
    count, token, max_seq, last_seq, version = values
    return Position(count=count, token=token, max_seq=max_seq, last_seq=last_seq, version=version)


def write_position(path: Path, position: Position) -> None:
    """Write all of it in place, by one call, into the page cache. Never raises `OSError`."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(descriptor, seal_bytes(_FIELDS.pack(*astuple(position))), 0)
        finally:
            os.close(descriptor)
    except OSError as err:
        _LOG.warning("position not written", path=str(path), reason=str(err))
