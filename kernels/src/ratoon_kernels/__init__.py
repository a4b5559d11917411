"""Tree attention and token log-probabilities as torch custom ops."""
