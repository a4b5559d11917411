"""Requests of the Tinker wire, as its SDK makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ratoon_proto.tinker import tinker_pb2 as wire

_DTYPES = {"float32": wire.DTYPE_FLOAT32, "int64": wire.DTYPE_INT64, "int32": wire.DTYPE_INT32}


def tensor(values: Sequence[float], dtype: str = "float32") -> wire.Tensor:
    array = np.array(values, dtype)
    return wire.Tensor(dense=array.tobytes(), dtype=_DTYPES[dtype], shape=[len(array)])


def chunk(tokens: Sequence[int]) -> wire.Chunk:
    data = np.array(tokens, np.int32).tobytes()
    return wire.Chunk(encoded_text=wire.EncodedText(tokens=data))


def datum(
    tokens: Sequence[int], targets: Sequence[int] | None = None, **columns: Sequence[float]
) -> wire.Datum:
    """A datum; `targets` None: the next tokens, 7 at the end."""
    found = wire.Datum(model_input=[chunk(tokens)])
    found.loss_fn_inputs["target_tokens"].CopyFrom(
        tensor([*tokens[1:], 7] if targets is None else targets, "int64")
    )
    for name, values in columns.items():
        found.loss_fn_inputs[name].CopyFrom(tensor(values))
    return found


def forward_backward(
    *data: wire.Datum, loss_fn: str = "cross_entropy", seq_id: int = 1, **fields: Any
) -> wire.ForwardBackwardRequest:
    return wire.ForwardBackwardRequest(seq_id=seq_id, loss_fn=loss_fn, data=data, **fields)
