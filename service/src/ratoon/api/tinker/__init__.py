"""The Tinker wire: scripts written for its SDK run against this service (docs/tinker.md)."""
