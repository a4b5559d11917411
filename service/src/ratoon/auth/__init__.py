"""Who may call what: API keys, their scopes, and the audit log."""
