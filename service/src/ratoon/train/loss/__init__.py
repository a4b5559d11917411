"""The losses, as sums over (sequence, trained token) terms."""
