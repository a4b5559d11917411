"""Fencing tokens: integers that only grow, across policies, deletions and database failovers.

The upper bits are PostgreSQL's timeline, which each promotion of a standby raises. So a token whose
commit was lost in a failover is never given again, and older tokens are recognised.
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from ratoon.engine.journal.sealed import update_rows, verified
from ratoon.engine.journal.tables import TOKENS

_TIMELINE_BITS = 32
_NAME = "last"


def next_token(last: int, own: int, timeline: int) -> int:
    """The token after `last` (of any policy) and `own` (from before tokens were shared). Pure."""
    return max(last, own, timeline << _TIMELINE_BITS) + 1


def is_before(token: int, timeline: int) -> bool:
    """Whether a token is from an earlier timeline. Pure."""
    return token >> _TIMELINE_BITS < timeline


def is_promoted_since(token: int, newer: int) -> bool:
    """Whether a standby was promoted between the commits of two tokens. Pure."""
    return is_before(token, newer >> _TIMELINE_BITS)


def last_token(connection: Connection) -> int:
    """The last token, locked until the transaction ends; 0: none was given yet."""
    query = select(TOKENS).where(TOKENS.c.name == _NAME).with_for_update()
    return int(verified(TOKENS, connection.execute(query).mappings().one())["last"])


def set_last_token(connection: Connection, token: int) -> None:
    update_rows(connection, TOKENS, TOKENS.c.name == _NAME, {"last": token})
