"""What people see of `swarmctl peer`: who it is, what it computes with and how, what is held of it and by what."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.text import Text

from swarmnode.cli.render import Json, _dict, _fields_table, _list, _number, console, plain, short, table_of

LAYERS_SHOWN = 4
WEIGHTS_SHOWN = 12
_FITNESS_STYLES = {"fit": "bold green", "unfit": "bold yellow", "quarantined": "bold red"}


def print_peer(answer: Mapping[str, Json]) -> None:
    out, table = console(), _fields_table()
    said = _dict(answer.get("advertised"))
    table.add_row("peer", f"{plain(answer.get('name'))}")
    table.add_row("id", plain(answer.get("peer_id")))
    table.add_row("roles", ", ".join(map(plain, _list(answer.get("roles")))) or "-")
    table.add_row("state", _state(answer, said))
    fitness = plain(answer.get("fitness"))
    table.add_row("fitness", Text(fitness, style=_FITNESS_STYLES.get(fitness, "")))
    table.add_row("audits", _audits(_dict(answer.get("audits")), _dict(answer.get("verdict"))))
    table.add_row("differed from itself", f"{plain(answer.get('self_differed'))} times")
    table.add_row("releases", _releases(_dict(answer.get("releases"))))
    table.add_row("experts", _experts(_dict(answer.get("experts"))))
    table.add_row("by the leader", _measured_by_leader(answer))
    for address in _list(said.get("addresses")):
        table.add_row("address", plain(address).rpartition("/p2p/")[0] or plain(address))
    out.print(table)
    for backend in map(_dict, _list(answer.get("backends"))):
        _print_backend(out, backend)
    if answer.get("error"):
        out.print(f"\n{plain(_dict(answer.get('error')).get('message'))}")
    evidence = [_dict(each) for each in _list(_dict(answer.get("verdict")).get("evidence"))]
    if evidence:
        out.print("\nevidence, the latest last:")
    for each in evidence:
        out.print(f"  {_evidence(each)}")


def _state(answer: Mapping[str, Json], said: Mapping[str, Json]) -> str:
    parts = [plain(answer.get("state"))]
    parts += [word for word in ("draining", "battery", "metered") if said.get(word) is True]
    if answer.get("banned") is True:
        parts.append("banned by the owner")
    if (heard := said.get("heard_s_ago")) is not None:
        parts.append(f"heard {_number(heard)} s ago")
    return ", ".join(parts)


def _audits(counts: Mapping[str, Json], verdict: Mapping[str, Json]) -> str:
    """What the leader counts now, and what the newest verdict was made of."""
    lines = []
    if counts:
        agreed, differed = plain(counts.get("agreed")), plain(counts.get("differed"))
        share = counts.get("share")
        of = f", {share:.0%} of its answers are audited now" if isinstance(share, float | int) else ""
        lines.append(f"{agreed} agreed, {differed} differed{of}")
    if verdict:
        agreed, differed = plain(verdict.get("audits_agreed")), plain(verdict.get("audits_differed"))
        lines.append(f"verdict of term {plain(verdict.get('term'))}: {agreed} agreed, {differed} differed")
    return "; ".join(lines) or "none yet"


def _releases(releases: Mapping[str, Json]) -> str:
    last = releases.get("last_at_s")
    return "none" if not isinstance(last, int) else f"{plain(releases.get('count'))}, the last on {_when(last)}"


def _experts(experts: Mapping[str, Json]) -> str:
    lines = [f"{plain(experts.get('proven'))} proven"]
    for model in map(_dict, _list(experts.get("models"))):
        layers = [_dict(layer) for layer in _list(model.get("layers"))]
        shown = [f"{plain(one.get('layer'))}: {len(_list(one.get('experts')))}" for one in layers[:LAYERS_SHOWN]]
        more = ", ..." if len(layers) > LAYERS_SHOWN else ""
        model_id, count = plain(model.get("model"))[:8], plain(model.get("experts"))
        lines.append(f"{count} of model {model_id}, by layer {', '.join(shown)}{more}")
    return "; ".join(lines)


def _measured_by_leader(answer: Mapping[str, Json]) -> str:
    same = answer.get("bit_identical_to_leader")
    return (
        f"rtt {_number(answer.get('rtt_ms'))} ms, {_number(answer.get('rows_per_s'))} rows/s, "
        f"{plain(answer.get('dispatches'))} dispatches, the leader's bits when probed: {plain(same)}"
    )


def _print_backend(out: Json, backend: Mapping[str, Json]) -> None:
    sums, source = _dict(backend.get("accumulation")), _dict(backend.get("source"))
    out.print(
        f"\n{plain(backend.get('name'))} on {plain(backend.get('device'))}: sums in {plain(sums.get('measured'))}"
        f" ({plain(sums.get('measured_when_asked'))} when asked), activations in {plain(source.get('measured'))}"
    )
    weights = [_dict(each) for each in _list(backend.get("weights"))]
    if not weights:
        return
    table = table_of("weights", "numeric class", "rows/s")
    for each in weights[:WEIGHTS_SHOWN]:
        table.add_row(plain(each.get("type")), short(each.get("numeric_class")), plain(each.get("rows_per_s")))
    out.print(table)


def _evidence(each: Mapping[str, Json]) -> str:
    text = plain(each.get("text"))
    where = [f"{key} {plain(each.get(key))}" for key in ("layer", "expert") if each.get(key) is not None]
    if where and text.startswith(", ".join(where)):
        where = []  # it says so itself
    if each.get("weight_type"):
        where.append(plain(each.get("weight_type")))
    figures = ""
    if each.get("limit"):
        figures = (
            f" (median {_number(each.get('median_relative_l2'))}, extreme {_number(each.get('extreme_relative_l2'))},"
            f" limit {_number(each.get('limit'))})"
        )
    at_s = each.get("at_s")
    when = f"{_when(at_s)} " if isinstance(at_s, int) and at_s else ""
    said = f" {', '.join(where)}" if where else ""
    return f"{when}{plain(each.get('kind'))}{said}: {text}{figures}"


def _when(at_s: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    except (OverflowError, ValueError, OSError):
        return "-"
