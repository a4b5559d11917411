"""How many packed tokens a device holds at a time; the model's own plan of bytes accepts whatever
is within.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Most packed tokens held at a time of a forward and backward, those of prefixes among them."""

    # Of a micro-batch that is run at once.
    at_once: int
    # Of one in stages: beside its activations, on the device or the host, each token has room in
    # stacks of keys, values and the gradients of these.
    streamed: int

    def at_most(self, tokens: int | None) -> TokenLimits:
        """None: the same."""
        if tokens is None:
            return self
        return TokenLimits(at_once=min(self.at_once, tokens), streamed=min(self.streamed, tokens))


# Of a CPU, whose memory nothing counts.
NO_LIMITS = TokenLimits(at_once=2**62, streamed=2**62)
