"""Revisions, oldest first by name; they form one line, without branches."""
