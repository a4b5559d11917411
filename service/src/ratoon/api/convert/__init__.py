"""Wire messages to the service's own types and back; see docs/api.md for what each field means."""
