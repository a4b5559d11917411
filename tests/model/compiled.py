"""Layers that are compiled on a machine without a compiler: traced, and run operation by operation.

Leaves a context; inside, models made with `compile_layers` have their graphs, and these are
listed. Invariant: what was compiled before is forgotten, and so is what was in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from ratoon.model import layers


@contextmanager
def eager_graphs() -> Iterator[list[GraphModule]]:
    """Graphs compiled so far."""
    compiled: list[GraphModule] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        compiled.append(graph)
        return lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    torch.compiler.reset()
    layers.configure_compiler()
    with pytest.MonkeyPatch.context() as patch:
        for name, run in (("_compiled_plain", "_run_plain"), ("_compiled_again", "_run_again")):
            function = torch.compile(getattr(layers, run), fullgraph=True, backend=backend)
            patch.setattr(layers, name, partial(lambda f: f, function))
        yield compiled
    torch.compiler.reset()
