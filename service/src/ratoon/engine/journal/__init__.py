"""The database: what was accepted, how it ended, and which controller may write."""
