"""Gated DeltaNet over packed forests: the recurrence, and the causal convolution before it."""
