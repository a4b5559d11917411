"""How tensors are cut into parts, and get from one rank to another."""
