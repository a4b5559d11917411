"""Arguments of several commands, with types that refuse wrong values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratoon_client.config import WEIGHTS_VARIABLE

Seq = Annotated[
    int | None,
    typer.Option(help="Seq of the call. Default: the policy's next.", min=1, show_default=False),
]
Version = Annotated[
    int | None,
    typer.Option(
        help="Version of the weights. Default: the newest published.", min=0, show_default=False
    ),
]
WeightsRoot = Annotated[
    Path | None,
    typer.Option(
        help="Weights root of a service on this host: files are linked, not fetched. Default: the"
        f" environment's {WEIGHTS_VARIABLE}.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]
