"""Who may call what: API keys, their scopes, and the record of what was done with them."""
