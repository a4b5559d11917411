"""What all commands share: their arguments, the service they talk to, and how they answer.

Standard output holds the answer alone, as a table or as JSON; all else goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ratoon_client.blocking import RatoonClient
from ratoon_client.config import WEIGHTS_VARIABLE, ClientConfig

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
VersionName = Annotated[
    str | None,
    typer.Option("--name", help="Its name, in place of --version.", show_default=False),
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


_WIDE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`api_key` and files None: the environment's."""

    url: str
    api_key: str | None = dataclasses.field(repr=False)
    ca_file: Path | None
    cert_file: Path | None
    key_file: Path | None
    timeout_s: float
    as_json: bool


def settings_of(context: typer.Context) -> Settings:
    settings = context.find_object(Settings)
    assert settings is not None
    return settings


@contextmanager
def open_client(
    context: typer.Context, config: ClientConfig | None = None
) -> Generator[RatoonClient]:
    settings = settings_of(context)
    with RatoonClient(
        settings.url,
        config=config,
        api_key=settings.api_key,
        ca_file=settings.ca_file,
        cert_file=settings.cert_file,
        key_file=settings.key_file,
        timeout_s=settings.timeout_s,
    ) as client:
        yield client


@contextmanager
def until_stopped() -> Generator[None]:
    """Run until SIGINT or SIGTERM, either of which ends it quietly."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show(context: typer.Context, value: object, fields: Mapping[str, object]) -> None:
    """`value` whole as JSON, or `fields` as two columns."""
    if settings_of(context).as_json:
        typer.echo(json.dumps(_plain(value)))
        return
    table = Table(box=None, show_header=False)
    for name, field in fields.items():
        table.add_row(name, text_of(field))
    Console(soft_wrap=True).print(table)


def show_line(context: typer.Context, value: object, text: str) -> None:
    """`value` whole as JSON, or `text`; at once, for who reads as it comes."""
    typer.echo(json.dumps(_plain(value)) if settings_of(context).as_json else printable(text))
    sys.stdout.flush()


def show_rows(
    context: typer.Context,
    values: object,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
) -> None:
    """`values` as JSON, or `rows` as a table."""
    if settings_of(context).as_json:
        typer.echo(json.dumps(_plain(values)))
        return
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*map(text_of, row))
    # A terminal folds what is wide; a file or a pipe gets one line a row.
    Console(soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE).print(table)


def text_of(value: object) -> str:
    """A cell of a table: what it says is shown, and neither obeyed nor taken for markup."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    return escape(printable(str(value)))


def printable(text: str) -> str:
    """`text` with what a terminal would obey, or show nothing of, written as an escape: \\x1b."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _plain(value: object) -> Any:
    """What JSON can say; a number that is not finite is null."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
