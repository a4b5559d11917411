"""HTTP under /v1: JSON bodies translated to the same messages that gRPC carries."""
