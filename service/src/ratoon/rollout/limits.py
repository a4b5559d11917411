"""How many packed tokens a device holds at a time.

Enters a device's budget as tokens, leaves which plans fit it. Invariant: what `hold` says fits is
never refused by the model's own plan of bytes, from which the limits are made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Limits of one forward and backward; a token of a resident prefix is held, too."""

    # Most tokens where nothing is resident: all are run at once, or whole trees one by one.
    at_once: int
    # Most tokens beside resident prefixes, less, for each of their tokens, so many: their keys,
    # values and the gradients of these stay beside their activations.
    streamed: int
    prefix_weight: float

    def beside(self, resident: int) -> int:
        """Most tokens held at a time where up to `resident` of them are of resident prefixes."""
        if resident == 0:
            return self.at_once
        return int(self.streamed - self.prefix_weight * resident)

    def hold(self, tokens: int, resident: int) -> bool:
        return tokens <= self.beside(resident)


# Of a CPU, whose memory nothing counts.
NO_LIMITS = TokenLimits(at_once=2**62, streamed=2**62, prefix_weight=0.0)
