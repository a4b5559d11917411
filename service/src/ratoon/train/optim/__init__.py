"""Optimizer state and the step: gradient sums, AdamW by what it keeps, the digest of the result."""
