"""Alembic's environment: runs the revisions on the connection that `upgrade` opened.

`upgrade` commits its transaction, so an upgrade happens whole or not at all.
"""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
