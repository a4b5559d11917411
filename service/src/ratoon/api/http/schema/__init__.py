"""JSON bodies: pydantic models built from the messages of `ratoon.v1`, with their comments."""
