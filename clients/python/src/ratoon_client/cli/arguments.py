"""Arguments that several commands take, with the types by which a wrong one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratoon_client.config import WEIGHTS_VARIABLE

Seq = Annotated[
    int | None, typer.Option(help="Default: the policy's next.", min=1, show_default=False)
]
Version = Annotated[
    int | None, typer.Option(help="Default: the newest published.", min=0, show_default=False)
]
WeightsRoot = Annotated[
    Path | None,
    typer.Option(
        help="The service's, on this host: files are linked from there, not fetched. Default: the"
        f" environment's {WEIGHTS_VARIABLE}.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]
