"""The journal's tables, for SQLite and PostgreSQL alike, and opening their database.

Values that are only read back whole are JSON text columns; bodies are files, never columns.
(policy_id, seq) and (policy_id, request_id) are unique. The newest revision of `migrations` must
leave exactly these tables.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.exc import OperationalError

from ratoon.engine.journal.connections import connect, is_server_away
from ratoon.engine.journal.migrate import upgrade
from ratoon.engine.journal.sealed import DIGEST, check_all
from ratoon.log import get_logger

_LOG = get_logger("store")
METADATA = MetaData()
# Versions, seqs and bytes. SQLite's own integers have 64 bits.
_WIDE = BigInteger().with_variant(Integer, "sqlite")


def _digest() -> Column[str]:
    """Digest of the row: see `sealed`."""
    return Column(DIGEST, String(32), nullable=False, server_default="")


POLICIES = Table(
    "policies",
    METADATA,
    Column("policy_id", String(64), primary_key=True),
    Column("spec", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("version", _WIDE, nullable=False),
    Column("max_version", _WIDE, nullable=False),
    Column("next_seq", _WIDE, nullable=False),
    Column("token", _WIDE, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("info", Text),
    # JSON list of versions, in publication order.
    Column("published", Text, nullable=False),
    # Why the policy failed.
    Column("failure", Text),
    # How many writes callers could be told of; null: of before it was counted.
    Column("position", _WIDE),
    _digest(),
)

# No foreign key to policies: the record of a DeletePolicy outlives its policy.
OPERATIONS = Table(
    "operations",
    METADATA,
    Column("operation_id", String(128), primary_key=True),
    Column("policy_id", String(64), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("seq", _WIDE),
    Column("request_id", String(256)),
    Column("payload_hash", String(64), nullable=False),
    Column("command", Text),
    Column("body_digest", String(64), nullable=False),
    Column("body_bytes", _WIDE, nullable=False),
    Column("key_id", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("choices", Text),
    Column("result", Text),
    Column("version", _WIDE),
    # Digest of weights, moments and counters after the operation.
    Column("weights_digest", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    # Key of a NUMERICS row: the numerics it ran under.
    Column("numerics", String(32)),
    _digest(),
    UniqueConstraint("policy_id", "seq"),
    UniqueConstraint("policy_id", "request_id"),
)
# Operations that may run or be replayed: few, however many a policy has had.
_IS_KEPT = OPERATIONS.c.command.is_not(None)
Index(
    "operations_kept",
    OPERATIONS.c.policy_id,
    OPERATIONS.c.seq,
    sqlite_where=_IS_KEPT,
    postgresql_where=_IS_KEPT,
)

CHECKPOINTS = Table(
    "checkpoints",
    METADATA,
    Column("policy_id", String(64), primary_key=True),
    Column("checkpoint_id", String(64), primary_key=True),
    Column("version", _WIDE, nullable=False),
    Column("seq", _WIDE, nullable=False),
    Column("replay_from_seq", _WIDE, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("size_bytes", _WIDE, nullable=False),
    Column("weights_digest", String(64)),
    _digest(),
)

# One row: the last fencing token given to any policy's controller.
TOKENS = Table(
    "tokens",
    METADATA,
    Column("name", String(16), primary_key=True),
    Column("last", _WIDE, nullable=False),
    _digest(),
)

# Numerics, on which bits depend besides journal and plan, by their digest.
NUMERICS = Table(
    "numerics",
    METADATA,
    Column("numerics", String(32), primary_key=True),
    # JSON object of texts.
    Column("fields", Text, nullable=False),
    _digest(),
)


def open_database(url: str) -> Engine:
    """A database with these tables, created or upgraded as needed.

    Every row is read once. Raises what `connect`, `upgrade` and `check_all` raise.
    """
    engine = connect(url)
    upgrade(engine)
    with engine.begin() as connection:
        check_all(connection, POLICIES, OPERATIONS, CHECKPOINTS, NUMERICS, TOKENS)
    return engine


def await_database(url: str) -> Engine:
    """`open_database`, retried until its server is up."""
    while True:
        try:
            return open_database(url)
        except OperationalError as err:
            if not is_server_away(err):
                raise
            _LOG.warning("still waiting for the database", reason=str(err.orig))
