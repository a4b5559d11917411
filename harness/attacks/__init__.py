"""Attacks by hostile callers on the service's resources, for tests and benchmarks."""
