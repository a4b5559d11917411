"""How many packed tokens a device holds at a time; the model's own plan of bytes accepts whatever
is within.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Most packed tokens held at a time of a forward and backward, those of prefixes among them."""

    # Limit of a micro-batch that is run at once.
    at_once: int
    # Limit of one in stages: besides its activations, on the device or the host, each token needs
    # room in stacks of keys, values and the gradients of these.
    streamed: int

    def at_most(self, tokens: int | None) -> TokenLimits:
        """These limits, and no more than `tokens`; None: just these."""
        if tokens is None:
            return self
        return TokenLimits(at_once=min(self.at_once, tokens), streamed=min(self.streamed, tokens))


# Limits of a CPU, whose memory nothing counts.
NO_LIMITS = TokenLimits(at_once=2**62, streamed=2**62)
