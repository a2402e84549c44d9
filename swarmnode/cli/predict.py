"""`swarmctl predict`: what this machine would hold, and how fast; beside it, for a member, what was measured."""

from __future__ import annotations

import sys
from typing import Any

import click

from capabilities.errors import NoDaemon, UsageError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.progress import ProgressLine
from swarmnode.control_client import request

TOKEN_CHARS_MAX = 8_192


@click.command()
@click.argument("token", required=False)
@click.option("--model", metavar="NAME", help="One of this node's models, in place of the one that the swarm serves.")
@click.option("--memory-mib", type=click.IntRange(1), help="Offer so much. Default: as node.memory_mib.")
@common_options
@pass_settings
def predict(settings: Settings, token: str | None, model: str | None, memory_mib: int | None) -> None:
    """Tell what this machine would hold in a swarm and how fast that would be, before it joins.

    TOKEN is an invite ('-' reads standard input); it is not used up. A member leaves it out and sees the measurement
    beside the prediction. With --model and neither, this machine alone is meant.

    \b
    Examples:
      swarmctl predict TOKEN
      swarmctl predict TOKEN --memory-mib 4096
      swarmctl predict
    """
    if token and model:
        raise UsageError("--model is for a member's own models", hint="Leave it or the invite out.")
    from swarmnode import logs
    from swarmnode.config import load_config
    from swarmnode.models import Models
    from swarmnode.outline import Outline
    from swarmnode.paths import find_paths
    from swarmnode.predicting import foretold, keep, make_offer, offer_of_member, outline_by_invite, report

    logs.configure("warning")
    paths = find_paths(settings.data_dir)
    config = load_config(paths.config_file if paths.config_file.exists() else None)
    status: dict[str, Any] | None = None
    with ProgressLine() as progress:
        progress("asking the swarm", 0, 1)
        rtt_ms, outline = 0.0, None
        if token:
            outline, rtt_s = outline_by_invite(sys.stdin.read(TOKEN_CHARS_MAX) if token == "-" else token)
            rtt_ms = rtt_s * 1e3
        else:
            try:
                outline = Outline.from_json(request(settings.socket, "outline", {}))
                status = request(settings.socket, "status", {})
            except NoDaemon:
                if model is None:
                    raise
        own = _own_row(status)
        if model is not None:
            workers, replicas = ((), 2) if outline is None else (outline.workers, outline.replicas)
            outline, status = Outline.of_model(Models(paths.models).manifest(model), workers, replicas), None
        assert outline is not None
        progress("measuring this machine", 0, 1)
        offer = (None if model else offer_of_member(own, memory_mib)) or make_offer(
            config, outline, memory_mib=memory_mib, rtt_ms=rtt_ms or float(own.get("rtt_ms") or 0.0)
        )
    before = None if token else foretold(paths, outline.model)
    result = report(outline, offer, foretold=before, status=status)
    if token:
        keep(paths, result)
    if settings.json:
        common.print_json(result)
    else:
        _print(result)


def _own_row(status: dict[str, Any] | None) -> dict[str, Any]:
    rows = (status or {}).get("peers") or []
    return next((row for row in rows if row.get("peer_id") == (status or {}).get("self")), {})


def _print(result: dict[str, Any]) -> None:
    from swarmnode.cli.render import console, plain, table_of

    out, offer = console(), result["offer"]
    out.print(
        f"{plain(result['model'])}: {result['moe_layers']} layers, {result['experts']} experts of"
        f" {_mib(result['expert_bytes'])} MiB in all; {result['workers']} other workers"
    )
    out.print(
        f"This machine offers {_mib(offer['budget_bytes'])} MiB and computes {offer['rows_per_s']:.0f} rows a second."
    )
    sides = [("predicted", result["predicted"])]
    sides += [("foretold", result["foretold"])] if result["foretold"] else []
    sides += [("measured", result["measured"])] if result["measured"] else []
    table = table_of("", *(name for name, _ in sides))
    for key, label in (
        ("experts", "experts held"), ("bytes", "MiB held"), ("rows_per_s", "rows/s of this machine"),
        ("kernel_ms", "ms a token in its kernels"), ("layers_ms", "ms a token in all layers"),
        ("layers_ms_without", "the same without this machine"), ("tokens_per_s_max", "tokens/s at most (no trunk)"),
    ):  # fmt: skip
        values = [side.get(key) for _, side in sides]
        if any(value is not None for value in values):
            table.add_row(label, *(shown(key, value) for value in values))
    table.columns[0].max_width = None
    out.print(table)
    if missing := result["predicted"]["missing"]:
        out.print(f"The swarm cannot serve it yet, even with this machine: {plain(missing)}")


def shown(key: str, value: Any) -> str:
    """A figure as people write it."""
    if value is None:
        return "-"
    if key == "bytes":
        return str(_mib(value))
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _mib(count: int) -> int:
    return count >> 20
