"""What Alembic runs each of its commands with: the connection that `migrate` opened.

Enters the configuration's connection, in its transaction, leaves the revisions applied in that same
transaction. Invariant: it is committed by `migrate`, so an upgrade happens whole or not at all.
"""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
