"""Sequences that a policy's published versions continue prompts with: one port, two samplers."""
