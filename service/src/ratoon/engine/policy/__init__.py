"""One policy: the order of its operations, each run once, and its recovery after a crash."""
