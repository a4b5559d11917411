"""Between the client's values and the messages of `ratoon.v1`: the one mapping layer."""
