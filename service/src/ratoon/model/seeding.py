"""Random numbers of initial weights: a function of (seed, tensor name), of nothing else.

No global generator is read or changed, and a tensor's numbers do not depend on which other tensors
there are.
"""

from __future__ import annotations

import torch
import xxhash


def tensor_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the tensor `name` of a model with this seed (unsigned, 64 bits)."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()))
    return generator
