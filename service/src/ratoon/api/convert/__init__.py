"""Wire messages to the service's own types and back; docs/api.md explains each field."""
