"""One policy: the order of its operations, each run once, and its way back after a crash."""
