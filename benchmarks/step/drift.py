"""How far the log-probs of one way are from those of another, over the same response tokens.

Enters log-probs by response token, leaves means and maxima. Invariant: neither is the truth; both
are rounded to the model's dtype on the way.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.step.run import Row


def drift(got_J: Tensor, other_J: Tensor) -> Row:
    """Mean and greatest absolute difference, and the mean of exp(d) - 1 - d, d = got - other.

    The last is the k3 estimate of a KL divergence (Schulman, "Approximating KL divergence", 2020),
    of tokens that stand for samples of `other`.
    """
    d_J = got_J.double() - other_J.double()
    return {
        "mean_abs": float(d_J.abs().mean()),
        "max_abs": float(d_J.abs().max()),
        "k3": float((d_J.expm1() - d_J).mean()),
    }
