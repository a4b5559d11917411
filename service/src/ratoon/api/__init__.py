"""The wires: HTTP and gRPC to the engine and back."""
