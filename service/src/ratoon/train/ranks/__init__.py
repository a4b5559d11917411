"""The ranks of a policy: one device's share each, and how their gradients get to one another."""
