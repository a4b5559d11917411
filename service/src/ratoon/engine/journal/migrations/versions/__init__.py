"""Revisions, oldest first by name. Invariant: they form one line, without branches."""
