"""Order, durability and workers of a policy."""
