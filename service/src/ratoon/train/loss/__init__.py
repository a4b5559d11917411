"""The losses of the table, as pure functions over one-dimensional tensors of terms."""
