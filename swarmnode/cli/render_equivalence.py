"""A comparison of two backends on a terminal: each level's verdict and why, and a table of its figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.padding import Padding
from rich.table import Table

from swarmnode.cli.render import console as open_console
from swarmnode.equivalence.figures import figures_of, first_choice_words, operators_by_cause, short
from swarmnode.equivalence.page import contradictions, fitness_notes, pair_words, restart_words
from swarmnode.printable import printable_line

CLASS_CHARS = 8  # of a numeric class: enough to tell a swarm's apart
COLUMNS_MAX: Final = 10_000  # of any line
COLUMNS = COLUMNS_MAX  # where nobody looks: a line is as long as it takes, so that whoever searches it finds all of it
DIVERGENCE: Final = {"first": "the first layer that differs", "worst": "the most of all"}
WORDS: Final = {True: "pass", False: "FAIL", None: "not judged"}


def share_line(share: Mapping[str, Any]) -> str:
    """How much of a model a peer computed."""
    return (
        f"{share['peer']} computed the {share['held']} experts that it holds of {share['of']}, "
        f"{share['rows']} of {share['rows_of']} rows; this machine the others"
    )


def print_equivalence(result: Mapping[str, Any]) -> None:
    """What `swarmctl equivalence` found."""
    console = open_console(COLUMNS)
    console.print(printable_line(f"A = {result['a']}, B = {result['b']}, model {result['model'] or '-'}"))
    for side, note in fitness_notes(result["fitness"]):
        console.print(f"{side.upper()} {note}")
    for side, share in result["experts"].items():
        if share is not None:
            console.print(printable_line(f"{side.upper()}: {share_line(share)}"))
    for side, reasons in result["restarts"].items():
        if reasons:
            console.print(printable_line(f"{side.upper()}: {restart_words(reasons)}"))
    for level in result["levels"]:
        console.print(f"\n{level['level']}: {WORDS[level['pass']]}: {printable_line(level['reason'])}")
        if level["tolerance"] is None:
            continue  # it could not be computed
        if level["level"] == "op":
            console.print(_operators(level))
            console.print("what differences come from:")
            for line in _causes(level):
                console.print(Padding(line, (0, 0, 0, 2)))
            for row in level["ops"]:
                if row["reason"] and row["limit_share"] <= 1:  # which its figures do not show
                    console.print(Padding(row["reason"], (0, 0, 0, 2)))
            for note in level["skipped"]:
                console.print(Padding(f"left out: {printable_line(note)}", (0, 0, 0, 2)))
            continue
        console.print(_figures(level))
        if level["level"] == "decisions" and (words := first_choice_words(level)):
            console.print(words)
        for which, parted in level.get("divergence", {}).items():
            if parted is not None:
                console.print(f"on the same rows, {DIVERGENCE[which]}: {_parted(parted)}")


def print_matrix(result: Mapping[str, Any]) -> None:
    """What `swarmctl equivalence --all` found: a table of pairs, and then why any of them failed."""
    console = open_console(COLUMNS)
    names = {peer["peer_id"]: printable_line(peer["name"]) for peer in result["peers"]}
    table = _pairs(result, names)
    if console.measure(table, options=console.options.update(width=COLUMNS_MAX)).maximum > console.width:
        table = _list_of_pairs(result, names)  # figures that are cut off say nothing
    console.print(table)
    for peer_id, words in fitness_notes({peer["peer_id"]: peer["fitness"] for peer in result["peers"]}):
        console.print(f"{names[peer_id]} {words}")
    for line in contradictions(result, names):
        console.print(line)
    for pair in result["pairs"]:
        for level in pair["levels"]:
            if not level["pass"]:
                what = f"{names[pair['a']]}, {names[pair['b']]}, {level['level']}: {WORDS[level['pass']]}"
                console.print(f"{what}: {printable_line(level['reason'] or '')}")
    if result["absent"]:
        console.print(f"not there: {', '.join(map(printable_line, result['absent']))}")


def _pairs(result: Mapping[str, Any], names: Mapping[str, str]) -> Table:
    """A row and a column for each peer."""
    cells = {frozenset((pair["a"], pair["b"])): pair_words(pair) for pair in result["pairs"]}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", *names.values(), "class", "fitness"):
        table.add_column(heading, no_wrap=True)
    for peer in result["peers"]:
        row = [cells.get(frozenset((peer["peer_id"], other)), "-") for other in names]
        table.add_row(names[peer["peer_id"]], *row, *_known_of(peer))
    return table


def _list_of_pairs(result: Mapping[str, Any], names: Mapping[str, str]) -> Table:
    """The same where all peers side by side are wider than the terminal: a row for each peer and for each pair."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for peer in result["peers"]:
        table.add_row(names[peer["peer_id"]], f"class {' '.join(_known_of(peer))}")
    for pair in result["pairs"]:
        table.add_row(f"{names[pair['a']]}, {names[pair['b']]}", pair_words(pair))
    return table


def _known_of(peer: Mapping[str, Any]) -> tuple[str, str]:
    return (peer["numeric_class"] or "not known")[:CLASS_CHARS], peer["fitness"] or "-"


def _operators(level: Mapping[str, Any]) -> Table:
    """Narrow enough for 80 columns: figures that are cut off say nothing."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("", "operator", "weights", "length", "largest", "rel. L2", "cosine", "limit", "A to q8", "B to q8"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("", "operator", "weights") else "right")
    for row in level["ops"]:
        rounded = row.get("to_rounded")
        table.add_row(
            WORDS[row["pass"]],
            row["op"],
            row["type"] or "-",
            str(row["length"]),
            short(row["max_abs_diff"]),
            short(row["relative_l2"]),
            f"{row['min_cosine']:.7f}",
            short(row["tolerance"]["median_relative_l2"]),
            *("-" if rounded is None else short(rounded[side]) for side in "ab"),
            style=None if row["pass"] else "bold red",
        )
    return table


def _causes(level: Mapping[str, Any]) -> list[str]:
    """What operators' differences come from, the operators of one cause together."""
    return [f"{cause}: {', '.join(operators)}" for cause, operators in operators_by_cause(level["ops"]).items()]


def _figures(level: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", "A and B", "own noise", "limit"):  # llama.cpp's own: the page has room to say so
        table.add_column(name, no_wrap=bool(name), justify="right" if name else "left")
    for figure in figures_of(level):
        table.add_row(*figure)
    return table


def _parted(parted: Mapping[str, Any]) -> str:
    peers = dict.fromkeys(peer for peer in (parted["peer_a"], parted["peer_b"]) if peer)
    by = f", computed by {printable_line(' and '.join(peers))}" if peers else ""
    return f"expert {parted['expert']} of layer {parted['layer']}{by}, off by {short(parted['relative_l2'])}"
