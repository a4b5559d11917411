"""JSON bodies, one model a message of `ratoon.v1`, field for field (a test compares them)."""
