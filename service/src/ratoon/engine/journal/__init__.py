"""The database: what was accepted, how it ended, and who may write."""
