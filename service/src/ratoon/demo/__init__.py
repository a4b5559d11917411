"""`ratoon demo`: a real GRPO loop against the real service, on this machine."""
