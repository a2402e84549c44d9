"""A comparison of two backends on a terminal: one table of operators, then a line or two for each other level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.table import Table

from swarmnode.cli.render import console as open_console
from swarmnode.equivalence.page import pair_words, restart_words
from swarmnode.printable import printable_line

CLASS_CHARS = 8  # of a numeric class: enough to tell a swarm's apart
COLUMNS = 120  # where nobody looks
_NOISE = "llama.cpp's own noise"


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
    for side, share in result["experts"].items():
        if share is not None:
            console.print(printable_line(f"{side.upper()}: {share_line(share)}"))
    for side, reasons in result["restarts"].items():
        if reasons:
            console.print(printable_line(f"{side.upper()}: {restart_words(reasons)}"))
    for level in result["levels"]:
        console.print(f"\n{level['level']}: {WORDS[level['pass']]}")
        if reason := level.get("reason"):
            console.print(f"  {printable_line(reason)}")
        if level["tolerance"] is None:
            continue  # it could not be computed
        if level["level"] == "op":
            console.print(_operators(level))
            for note in level["skipped"]:
                console.print(f"  left out: {printable_line(note)}")
        else:
            for line in _LINES[level["level"]](level):
                console.print(f"  {line}")


def print_matrix(result: Mapping[str, Any]) -> None:
    """What `swarmctl equivalence --all` found: a table of pairs, and then why any of them failed."""
    console = open_console(COLUMNS)
    names = {peer["peer_id"]: printable_line(peer["name"]) for peer in result["peers"]}
    cells = {frozenset((pair["a"], pair["b"])): pair_words(pair) for pair in result["pairs"]}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", *names.values(), "class"):
        table.add_column(heading, no_wrap=True)
    for peer in result["peers"]:
        row = [cells.get(frozenset((peer["peer_id"], other)), "-") for other in names]
        table.add_row(names[peer["peer_id"]], *row, (peer["numeric_class"] or "not known")[:CLASS_CHARS])
    console.print(table)
    for pair in result["pairs"]:
        for level in pair["levels"]:
            if not level["pass"]:
                what = f"{names[pair['a']]}, {names[pair['b']]}, {level['level']}: {WORDS[level['pass']]}"
                console.print(f"{what}: {printable_line(level['reason'] or '')}")
    if result["absent"]:
        console.print(f"not there: {', '.join(map(printable_line, result['absent']))}")


def _operators(level: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in (
        "operator",
        "weights",
        "length",
        "largest",
        "relative L2",
        "cosine",
        "limit",
        "A, B to q8",
        "cause",
        "",
    ):
        table.add_column(name, no_wrap=True, justify="right" if name in ("length", "cosine") else "left")
    for row in level["ops"]:
        rounded = row.get("to_rounded")
        table.add_row(
            row["op"],
            row["type"] or "-",
            str(row["length"]),
            f"{row['max_abs_diff']:.1e}",
            f"{row['relative_l2']:.1e}",
            f"{row['min_cosine']:.7f}",
            f"{row['tolerance']['median_relative_l2']:.1e}",
            "-" if rounded is None else f"{rounded['a']:.0e}, {rounded['b']:.0e}",
            row["cause"] or ("-" if row["bit_identical"] else "not attributable"),
            "" if row["pass"] else "FAIL",
        )
    return table


def _layer(level: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, what in (
        ("pinned", "routing pinned"),
        ("free", "routing free"),
        ("noise_floor", _NOISE),
    ):
        drift = level[name]
        grows = "-" if drift["exponent"] is None else f"L^{drift['exponent']:.2f}"
        lines.append(
            f"{what}: {drift['relative_l2'][0]:.1e} after the first layer, {drift['relative_l2'][-1]:.1e} after the "
            f"last of {level['layers']}, grows as {grows}"
        )
    lines.append(f"limit after the last: {level['tolerance']['relative_l2'][-1]:.1e}")
    for which, parted in level["divergence"].items():
        if parted is not None:
            lines.append(f"on the same rows, {DIVERGENCE[which]}: {_parted(parted)}")
    return lines


def _parted(parted: Mapping[str, Any]) -> str:
    peers = dict.fromkeys(peer for peer in (parted["peer_a"], parted["peer_b"]) if peer)
    by = f", computed by {printable_line(' and '.join(peers))}" if peers else ""
    return f"expert {parted['expert']} of layer {parted['layer']}{by}, off by {parted['relative_l2']:.1e}"


def _logits(level: Mapping[str, Any]) -> list[str]:
    return [
        f"{what}: KL {found['kl_mean']:.1e} (largest {found['kl_max']:.1e}), L2 {found['l2_median']:.1e}, "
        f"L-infinity {found['l_infinity']:.2g}, {found['positions']} positions"
        for what, found in (("A and B", level), (_NOISE, level["noise_floor"]))
    ] + [f"limit of the mean KL: {level['tolerance']['kl_mean']:.1e}"]


def _decisions(level: Mapping[str, Any]) -> list[str]:
    routing = level["routing"]
    return [
        *(
            f"{what}: {found['flips']} of {found['positions']} tokens flipped, {found['flips_predicted']:.1f} predicted"
            for what, found in (("A and B", level), (_NOISE, level["noise_floor"]))
        ),
        f"{level['flips_through_the_gate']} flips where the margin exceeds twice L-infinity",
        f"routers left to themselves: {routing['sets_changed']:.2%} of {routing['choices']} choices would differ, "
        f"{routing['experts_changed']:.2%} of the experts",
    ]


def _generation(level: Mapping[str, Any]) -> list[str]:
    return [
        f"{what}: {found['identical']} of {found['prompts']} answers of {found['tokens']} tokens are the same, "
        f"{found['forks_predicted']:.1f} forks predicted; first differences at {found['first_differences'] or '-'}"
        for what, found in (("A and B", level), (_NOISE, level["noise_floor"]))
    ]


def _task(level: Mapping[str, Any]) -> list[str]:
    both = (("A and B", level), (_NOISE, level["noise_floor"]))
    return [
        f"{what}: perplexity {found['perplexity_a']:.4g} and {found['perplexity_b']:.4g} over {found['positions']} "
        f"tokens, paired difference {found['nll_difference']:+.2e} (standard error {found['standard_error']:.1e}) nats"
        for what, found in both
    ] + [
        f"{what}: {found['accuracy_a']:.1%} and {found['accuracy_b']:.1%} of {found['questions']} questions right, "
        f"{found['changed']} answers changed, {found['changed_predicted']:.1f} predicted"
        for what, found in ((what, found["choices"]) for what, found in both)
    ]


_LINES = {"layer": _layer, "logits": _logits, "decisions": _decisions, "generation": _generation, "task": _task}
