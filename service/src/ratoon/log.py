"""Structured logs: one event per line, on standard error.

An event is a short constant text with fields. Fields never hold token ids, prompts, bodies or keys.
"""

from __future__ import annotations

import logging
import sys
from typing import cast

import structlog


def configure_logging(level: str) -> None:
    """Set up the process's log: JSON lines, or coloured text on a terminal. Raises `ValueError`."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if sys.stderr.isatty():
        last: list[structlog.typing.Processor] = [
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        ]
    else:
        # Locals may be token ids and prompts.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        last = [
            structlog.processors.ExceptionRenderer(tracebacks),
            structlog.processors.JSONRenderer(),
        ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(_level(level)),
        # Looked up at each event, so that a test that replaces standard error gets its events.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(component: str) -> structlog.stdlib.BoundLogger:
    """Return a logger whose events name their component."""
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger(component=component))


def ray_level(level: str) -> str:
    """Return the level of Ray's and Serve's own logs, whose INFO has a line for each step."""
    return "WARNING" if level == "INFO" else level


def _level(name: str) -> int:
    """Return the number of a level's name. Raises `ValueError` for any other name."""
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        raise ValueError(f"log_level: got {name}, expected one of {sorted(levels)}")
    return levels[name.upper()]
