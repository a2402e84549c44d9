"""What people see of `swarmctl audit` and its experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from swarmnode.cli.render import console, plain, short

Json = Any


def print_audits(answer: Mapping[str, Json]) -> None:
    """One line a peer, and the reason of each that is not fit."""
    # "itself": times that it differed from what it had answered before
    columns = "peer", "id", "fitness", "agreed", "differed", "itself", "answers", "audited", "share"
    out, table = console(), _table(*columns)
    for row in answer["peers"]:
        counts, verdict = row.get("audits") or {}, row.get("verdict") or {}
        share = counts.get("share")
        table.add_row(
            plain(row["name"])[:16],
            short(row["peer_id"]),
            plain(row["fitness"]),
            plain(counts.get("agreed", verdict.get("audits_agreed"))),
            plain(counts.get("differed", verdict.get("audits_differed"))),
            plain(counts.get("self_differed")),
            plain(counts.get("answers")),
            plain(counts.get("audited")),
            f"{share:.0%}" if isinstance(share, int | float) else "-",
        )
    out.print(table)
    for row in answer["peers"]:
        if row["fitness"] not in (None, "fit") and (reason := (row.get("verdict") or {}).get("reason")):
            out.print(f"{plain(row['name'])}: {plain(reason)}")


def print_experiment(result: Mapping[str, Json]) -> None:
    out = console()
    out.print(f"model {plain(result['model'])}, seed {plain(result['seed'])}\n")
    if result["cheats"]:
        table = _table("cheat", "standing", "trials", "missed", "late", "suspected", "p99", "out", "p99", "at most")
        for each in result["cheats"]:
            bound = each["missed_bound"]
            table.add_row(
                each["name"], each["standing"], plain(each["trials"]), plain(each["missed"]), plain(each["late"]),
                plain(each["suspected"]["p50"]), plain(each["suspected"]["p99"]), plain(each["out"]["p50"]),
                plain(each["out"]["p99"]), "-" if bound is None else f"{bound:.1%}",
            )  # fmt: skip
        out.print(table)
        out.print("dispatches until suspected and out, medians first; missed at most so often, with 95 % confidence\n")
    if result["honest"]:
        counts = "audits", "refused", "min", "out", "at most", "suspected", "unfit", "wrong", "furthest"
        table = _table("honest", *counts)
        for each in result["honest"]:
            bound = each["quarantined_bound"]
            table.add_row(
                each["target"], plain(each["audits"]), plain(each["refused"]), f"{each['minutes']:.1f}",
                plain(each["quarantined"]),
                "-" if bound is None else f"{bound:.1e}", plain(each["suspected"]), plain(each["unfit"]),
                plain(each["wrong_audits"]), f"{each['worst_relative_l2']:.1e}",
            )  # fmt: skip
        out.print(table)
        for each in result["honest"]:
            if each["restarts"]:
                out.print(f"{each['target']}: its kernels ended and were started anew {each['restarts']} times")
            if each["reason"]:
                out.print(f"{each['target']} was given up: {plain(each['reason'])}")
        out.print("false convictions, at most so many an audit with 95 % confidence; audits with a wrong row\n")
    out.print("PASS" if result["pass"] else f"FAIL: {plain(result['reason'])}")


def print_daemons(result: Mapping[str, Json]) -> None:
    out = console()
    seconds = result["seconds"]
    out.print(
        f"{plain(result['cheat'])} among {plain(result['workers'])} workers: "
        + ("never quarantined" if seconds is None else f"quarantined after {seconds:.1f} s")
    )
    out.print(
        f"{result['asked']} prompts: {result['equal']} answers equal to llama.cpp's own, {result['tainted']} tainted, "
        f"{result['unnoticed']} wrong before anything was noticed, {result['wrong']} wrong, "
        f"{len(result['failed'])} failed"
    )
    for evidence in (result["verdict"] or {}).get("evidence", []):
        out.print(f"  {plain(evidence['text'])}")
    if result["honest_quarantined"]:
        out.print(f"honest and quarantined: {', '.join(map(plain, result['honest_quarantined']))}")
    if not result["known_to_all"]:
        out.print("not every member has heard the verdict")
    out.print("PASS" if result["pass"] else "FAIL")


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < 2 else "right")
    return table
