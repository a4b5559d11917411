"""gRPC: one servicer, mounted on Serve's proxy and on the gateway."""
