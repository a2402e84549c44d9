"""What people see of requests that were kept, and of `swarmctl verify`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from swarmnode.cli.render import console, plain, short, table_of

Json = Any


def print_requests(answer: Mapping[str, Json]) -> None:
    rows = answer["requests"]
    if not rows:
        why = "none are to be ([requests] keep = 0)" if not answer["keep"] else "nothing was asked on this node"
        console().print(f"No requests are kept: {why}.")
        return
    table = table_of("request", "ended", "tokens", "end", "leader")
    for row in rows:
        ended = datetime.fromtimestamp(row["asked_at"], UTC).astimezone()
        table.add_row(
            plain(row["request_id"]),
            f"{ended:%m-%d %H:%M:%S}",
            plain(row["completion_tokens"]),
            plain(row["finish_reason"]),
            short(row["leader"]),
        )
    console().print(table)


def print_verdict(report: Mapping[str, Json]) -> None:
    words, style = {
        True: ("verified", "bold green"),
        False: ("NOT VERIFIED", "bold red"),
        None: ("not proven", "bold yellow"),
    }[report["verified"]]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("request", plain(report["request_id"]))
    table.add_row("verdict", Text(f"{words}: {plain(report['reason'])}", style=style))
    table.add_row("kept", f"{report['completion_tokens']} tokens, {report['token_hash'][:16]}")
    for name, side in (("swarm again", report["swarm"]), ("llama.cpp", report["undivided"])):
        table.add_row(name, _side(side))
    console().print(table)


def _side(side: Mapping[str, Json]) -> str:
    if side["token_hash"] is None:
        return plain(side["reason"])
    same = "the same" if side["first_difference"] is None else f"parts at index {side['first_difference']['index']}"
    return f"{side['completion_tokens']} tokens, {side['token_hash'][:16]}, {same}"
