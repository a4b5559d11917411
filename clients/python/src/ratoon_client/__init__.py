"""Client of the Ratoon policy-update service."""
