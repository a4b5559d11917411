"""What a call did: the report, and the sums, seconds and FLOPs that it is made of."""
