"""Order, durability and workers of policies."""
