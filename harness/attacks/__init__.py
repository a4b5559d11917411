"""Ways of callers to cost a service more than it is worth, for tests and benchmarks alike."""
