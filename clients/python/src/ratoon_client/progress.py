"""A progress bar on standard error."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ratoon_proto.types import Operation


@contextmanager
def progress_bar() -> Generator[Callable[[Operation], None]]:
    """Gives the function to call with every state."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("waiting", total=None, rate="")

        def show(operation: Operation) -> None:
            progress = operation.progress
            bar.update(
                task,
                description=describe(operation),
                total=progress.micro_batches_planned or None,
                completed=progress.micro_batches_done,
                rate=f"{progress.tokens_per_second:,.0f} tokens/s",
            )

        yield show


def describe(operation: Operation) -> str:
    """One line without numbers that change quickly."""
    text = f"{operation.kind} {operation.state}"
    if operation.blocked_by_seq:
        text += f", waits for seq {operation.blocked_by_seq}"
    return text
