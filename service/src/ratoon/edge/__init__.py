"""Transport of the public ports: bounds, TLS and the gRPC proxy. It knows no RPC."""
