"""What `swarmctl top` shows: the swarm's pace in two lines, then its peers, the busiest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from swarmnode.cli import render


def top_view(rates: Mapping[str, Any], status: Mapping[str, Any]) -> RenderableType:
    """rates: swarmnode.top.measure's. status: the later of the two that it was made from."""
    table = render.table_of("peer", "id", "state", "load", "disp/s", "rows/s", "rtt ms")
    for peer in sorted(rates["peers"], key=lambda peer: (-(_number(peer["load"]) or 0), str(peer["name"]))):
        table.add_row(
            render.plain(peer["name"]),
            render.short(peer["peer_id"]),
            Text(state := render.plain(peer["state"]), style=render.state_style(state)),
            render.share(peer["load"]),
            _shown(peer["dispatches_per_s"], 0),
            _shown(peer["rows_per_s"], 0),
            _shown(peer["rtt_ms"], 1),
        )
    pace = (
        f"{_shown(rates['tokens_per_s'], 1)} tokens/s   {_shown(rates['layers_per_s'], 0)} layers/s   "
        f"{_shown(rates['layer_ms'], 2)} ms a layer   {render.plain(rates['running'])} running, "
        f"{render.plain(rates['waiting'])} waiting"
    )
    return Group(render.verdict(status), Text(pace), Text(""), table)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _shown(value: Any, digits: int) -> str:
    number = _number(value)
    return "-" if number is None else f"{number:.{digits}f}"
