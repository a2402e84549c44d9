"""Structured logs on standard error: for people on a terminal, one JSON object a line otherwise; and in a file.

    log = structlog.get_logger(__name__)    # at the top of a module
    with bound(request_id=request.id):      # every line from here on carries it, also in tasks started meanwhile
        log.info("request started", prompt_tokens=17)

Two promises are kept here rather than by every caller: prompts, answers and tokens never reach a log, under whatever
key they come by mistake; and what peers do can neither send control characters to a terminal nor fill a disk.
Lines of the standard library's loggers (libp2p) come out in the same form, from WARNING on.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import MutableMapping
from itertools import islice
from typing import Any, Literal, TextIO

import structlog
from structlog.contextvars import bound_contextvars as bound

from swarmnode.printable import printable_line, printable_text

__all__ = ["bound", "configure"]

Event = MutableMapping[str, Any]
OUR_PACKAGES = ("swarmnode", "backends", "scheduler", "capabilities")
SECRET_KEYS = frozenset(
    ("prompt", "text", "token", "tokens", "messages", "system", "answer", "content", "generated", "stop")
)
VALUE_CHARS_MAX = 500  # of one value; the longest legitimate ones are error messages
INNER_CHARS_MAX = 200  # of a text within a list or mapping: an address, an error's message
ITEMS_MAX = 16  # of a list or mapping
DEPTH_MAX = 2  # deeper ones are shown as text
EXCEPTION_CHARS_MAX = 20_000
LINES_PER_MINUTE = 200  # of one event that names a peer: 0.1 MB; a swarm of 256 peers stays below it on a bad day


def configure(
    level: str = "info",
    format: Literal["auto", "human", "json"] = "auto",
    stream: TextIO | None = None,
    file: logging.Handler | None = None,
) -> None:
    """Send this process's logs to `stream` (standard error). Call it after libp2p's import, which resets its logger.

    file: gets every line as well, as JSON.
    """
    stream = sys.stderr if stream is None else stream
    human = format == "human" or (format == "auto" and stream.isatty())
    common: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
        _Throttle(),
        _withhold,
        _clean,
        structlog.processors.format_exc_info,
        _clean_exception,
    ]
    structlog.configure(
        processors=[*common, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    as_json = structlog.processors.JSONRenderer(default=str)
    render: Any = as_json
    if human:
        colors = stream.isatty() and "NO_COLOR" not in os.environ
        render = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[remove, render], foreign_pre_chain=common))
    handlers: list[logging.Handler] = [handler]
    if file is not None:
        stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
        file.setFormatter(
            structlog.stdlib.ProcessorFormatter(processors=[remove, stamp, as_json], foreign_pre_chain=common)
        )
        handlers.append(file)
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for package in OUR_PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
    libp2p = logging.getLogger("libp2p")
    libp2p.handlers.clear()
    libp2p.propagate = True
    libp2p.setLevel(logging.WARNING)


class _Throttle:
    """Drops lines that peers provoke (they name one) beyond LINES_PER_MINUTE of each event, and tells how many."""

    def __init__(self) -> None:
        self._minutes: dict[str, tuple[int, int]] = {}  # event -> minute, lines in it

    def __call__(self, _logger: Any, _method: str, event: Event) -> Event:
        if "peer" not in event:
            return event
        name, minute = str(event.get("event")), int(time.monotonic() // 60)
        last, lines = self._minutes.get(name, (minute, 0))
        if last != minute:
            if lines > LINES_PER_MINUTE:
                event["lines_dropped"] = lines - LINES_PER_MINUTE
            lines = 0
        self._minutes[name] = minute, lines + 1
        if lines >= LINES_PER_MINUTE:
            raise structlog.DropEvent
        return event


def _withhold(_logger: Any, _method: str, event: Event) -> Event:
    for key in SECRET_KEYS & event.keys():
        # A number under a plural is a count; under `token` it is one.
        if key == "token" or not isinstance(event[key], int | float):
            event[key] = "(withheld)"
    return event


def _clean(_logger: Any, _method: str, event: Event) -> Event:
    for key, value in event.items():
        if key not in ("exc_info", "_record", "_from_structlog"):
            event[key] = _bounded(value, VALUE_CHARS_MAX, DEPTH_MAX)
    return event


def _bounded(value: Any, chars: int, depth: int) -> Any:
    """The value with every text in it printable and cut, and few of what a list or mapping has many of."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth and isinstance(value, dict):
        inner = dict(islice(value.items(), ITEMS_MAX))
        return {_bounded(str(key), chars, 0): _bounded(item, INNER_CHARS_MAX, depth - 1) for key, item in inner.items()}
    if depth and isinstance(value, list | tuple):
        return [_bounded(item, INNER_CHARS_MAX, depth - 1) for item in value[:ITEMS_MAX]]
    text = value if isinstance(value, str) else repr(value)
    return printable_line(text if len(text) <= chars else f"{text[:chars]}... ({len(text)} characters)")


def _clean_exception(_logger: Any, _method: str, event: Event) -> Event:
    if isinstance(text := event.get("exception"), str):
        event["exception"] = printable_text(text[-EXCEPTION_CHARS_MAX:])
    return event
