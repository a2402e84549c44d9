"""`swarmctl status` and `swarmctl top`: the swarm once, or again and again until Ctrl-C.

On a terminal what is shown again is drawn over what was there, on the alternate screen, whole lines at a time, so that
nothing flickers and the scrollback stays as it was; the last picture remains when it ends.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from capabilities.errors import SwarmError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.control_client import request

if TYPE_CHECKING:
    from rich.console import RenderableType

PERIOD_S: Final = 1.0  # a status is some milliseconds of the leader's time

Answer = dict[str, Any]


@click.command()
@click.option("--watch", is_flag=True, help="Show it again each second, until Ctrl-C. With --json one object a line.")
@common_options
@pass_settings
def status(settings: Settings, watch: bool) -> None:
    """Show peers, what they hold, and whether the swarm is ready.

    \b
    Examples:
      swarmctl status
      swarmctl status --watch
      swarmctl status --json | jq .ready
    """
    if settings.json:
        _print_statuses(settings, watch)
        return
    from swarmnode.cli.render import console, status_view

    if watch:
        _draw(settings, lambda _before, now, _seconds: status_view(now, live=True), status_view)
    else:
        console().print(status_view(request(settings.socket, "status", {})))


@click.command()
@common_options
@pass_settings
def top(settings: Settings) -> None:
    """Show who computes how much: tokens a second, time a layer, dispatches and load of each peer, until Ctrl-C.

    Without a terminal, and with --json, one second is measured and shown once.

    \b
    Examples:
      swarmctl top
      swarmctl top --json | jq .tokens_per_s
    """
    from swarmnode.cli.render_top import top_view
    from swarmnode.top import measure

    def view(before: Answer, now: Answer, seconds: float) -> RenderableType:
        return top_view(measure(before, now, seconds), now)

    if sys.stdout.isatty() and not settings.json:
        _draw(settings, view)
        return
    polls = _polls(settings)
    (before, began), (now, ended) = next(polls), next(polls)
    for answer in (before, now):
        if isinstance(answer, SwarmError):
            raise answer
    if settings.json:
        common.print_json(measure(before, now, ended - began))
    else:
        from swarmnode.cli.render import console

        console().print(view(before, now, ended - began))


def _polls(settings: Settings) -> Iterator[tuple[Any, float]]:
    """(status, instant) each PERIOD_S. Raises where the first one fails; later the error stands in a status's place,
    since a daemon that is started again is what a person may be waiting for."""
    yield request(settings.socket, "status", {}), time.monotonic()
    due = time.monotonic()
    while True:
        due = max(due + PERIOD_S, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            answer: Any = request(settings.socket, "status", {})
        except SwarmError as error:
            answer = error
        yield answer, time.monotonic()


def _print_statuses(settings: Settings, watch: bool) -> None:
    if not watch:
        common.print_json(request(settings.socket, "status", {}))
        return
    with contextlib.suppress(KeyboardInterrupt):
        for answer, _ in _polls(settings):
            common.print_json({"error": answer.to_json()} if isinstance(answer, SwarmError) else answer)
            sys.stdout.flush()


def _draw(
    settings: Settings,
    view: Callable[[Answer, Answer, float], RenderableType],
    last: Callable[[Answer], RenderableType] | None = None,
) -> None:
    """Show `view(status before, status now, seconds between)` until Ctrl-C, then leave `last` of it, or that."""
    from rich.console import Group
    from rich.live import Live

    from swarmnode.cli.render import console, error_view

    out, before, now, began, shown = console(), None, None, 0.0, Group()
    try:
        with _screen(out, Live) as show:
            for answer, instant in _polls(settings):
                if isinstance(answer, SwarmError):
                    show(Group(error_view(answer), "", shown))
                    continue
                before, now, seconds, began = now or answer, answer, instant - began if began else PERIOD_S, instant
                shown = Group(view(before, now, seconds))
                show(shown)
    except KeyboardInterrupt:
        if out.is_terminal and now is not None:
            out.print(shown if last is None else last(now))


@contextlib.contextmanager
def _screen(out: Any, live_kind: Any) -> Iterator[Callable[[RenderableType], None]]:
    """A function that shows a picture in place of the one before; without a terminal, after it."""
    if not out.is_terminal:

        def show(view: RenderableType) -> None:
            out.print(view)
            sys.stdout.flush()

        yield show
        return
    with live_kind(console=out, screen=True, auto_refresh=False) as live:
        yield lambda view: live.update(view, refresh=True)
