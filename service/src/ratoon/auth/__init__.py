"""Decides who may call what: API keys, their scopes, limits and the audit log."""
