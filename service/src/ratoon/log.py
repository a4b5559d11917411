"""Structured logs: one event per line, on standard error.

An event is a short constant text with fields. Fields never hold token ids, prompts, bodies or keys.
On a terminal events are short: a time, the text and the fields, and a sentence about each operation
that has ended. Elsewhere they are JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import datetime
from enum import Enum
from typing import Any, TextIO, cast

import structlog


class ShownLogs(Enum):
    """What this process shows of what the service's other processes write."""

    NONE = "none"
    # Not what Ray and Serve say of themselves.
    OWN = "own"
    ALL = "all"


def configure_logging(level: str) -> None:
    """Set up the process's log: JSON lines, or coloured text on a terminal. Raises `ValueError`."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Locals may be token ids and prompts.
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    last: list[structlog.typing.Processor] = [
        structlog.processors.ExceptionRenderer(tracebacks),
        structlog.processors.JSONRenderer(),
    ]
    if sys.stderr.isatty():
        last = [_short, _CONSOLE]
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


def copied_event(line: str, stream: TextIO) -> str | None:
    """A line of another process's log as `stream` shows it; None: the line is no event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not {"event", "level", "timestamp"} <= event.keys():
        return None
    if not stream.isatty():
        return line
    fields = cast("dict[str, Any]", event)
    if isinstance(fields.get("exception"), list):
        fields["exception"] = "\n".join(_traceback(fields["exception"]))
    return str(_CONSOLE(None, "", _short(None, "", fields)))


def ray_level(level: str) -> str:
    """Return the level of Ray's and Serve's own logs, whose INFO has a line for each step."""
    return "WARNING" if level == "INFO" else level


_CONSOLE = structlog.dev.ConsoleRenderer(
    exception_formatter=structlog.dev.plain_traceback, sort_keys=False, pad_event_to=0
)
# Figures of an operation's line: name of the field, and how it is written.
_FIGURES: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("version", "v{}".format),
    ("seconds", "{:.1f} s".format),
    ("groups", "groups {}".format),
    ("token_reduction", "rho {:.2f}".format),
    ("reward", "reward {:.3g}".format),
    ("loss", "loss {:+.3g}".format),
    ("grad_norm", "norm {:.3g}".format),
    ("sampler_kl", "sampler KL {:.1e}".format),
    ("kl", "KL {:.1e}".format),
    ("clip", "clip {:.1%}".format),
    ("error", "{}".format),
    ("field", "at {}".format),
    ("skip_reason", "skipped: {}".format),
    ("warnings", lambda kinds: "warnings: " + ", ".join(kinds)),
)


def _short(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """An event as a terminal shows it."""
    time = datetime.fromisoformat(event.pop("timestamp")).astimezone()
    event.pop("component", None)
    first: dict[str, Any] = {"timestamp": time.strftime("%H:%M:%S")}
    if event["level"] == "info":
        del event["level"]
    if event["event"] != "operation ended":
        return first | {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in event.items()
        }
    seq = f"#{event['seq']} " if "seq" in event else ""
    what = f"{event['policy_id']} {seq}{event['kind']}"
    if event["state"] != "done":
        what += f" {event['state']}"
    figures = [write(event[name]) for name, write in _FIGURES if name in event]
    level = {"level": event["level"]} if "level" in event else {}
    return first | level | {"event": ", ".join([what, *figures])}


def _traceback(exceptions: list[dict[str, Any]]) -> list[str]:
    """Tracebacks of JSON events, as lines; the cause comes last."""
    lines: list[str] = []
    for each in exceptions:
        lines += [f"  {at['filename']}:{at['lineno']} in {at['name']}" for at in each["frames"]]
        lines.append(f"{each['exc_type']}: {each['exc_value']}")
    return lines


def _level(name: str) -> int:
    """Return the number of a level's name. Raises `ValueError` for any other name."""
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        raise ValueError(f"log_level: got {name}, expected one of {sorted(levels)}")
    return levels[name.upper()]
