"""The report as one page without anything from elsewhere: pairs, verdicts, the drift's curve, the margins' histogram.

Names of files and backends are whoever's: everything that is text goes through `escape`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from backends.atomic_file import replacing
from capabilities.errors import UsageError

_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 240, 60, 24
_CURVES: Final = (
    ("pinned", "A and B, routing pinned", "#1f6feb"),
    ("free", "A and B, routing free", "#8250df"),
    ("noise_floor", "llama.cpp's own noise", "#9a9a9a"),
)
_SHADES: Final = {True: "near", False: "far", None: "none"}  # blue, orange, grey: told apart by all eyes
_PEERS: Final = ("peer_a", "peer_b")
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:2px 10px;border-bottom:1px solid #ddd;text-align:left}"
    ".near{background:#cfe5ff}.far{background:#ffd8a8;font-weight:bold}.none{background:#eee}"
    ".pass{color:#1a7f37}.fail{color:#cf222e;font-weight:bold}text{font:11px system-ui,sans-serif}"
)


def write_page(path: Path, result: Mapping[str, Any]) -> None:
    """Write what `run_equivalence` or `run_matrix` gave to `path`, whole or not at all.

    Raises:
        UsageError: it cannot be written there.
    """
    try:
        with replacing(path) as partial:
            partial.write_text((page_of_all if "pairs" in result else page_of)(result), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint="Choose another --html.") from error


def page_of(result: Mapping[str, Any]) -> str:
    title = f"{result['a']} and {result['b']}"
    parts = [f"<p>Model: {escape(result['model'] or 'none')}</p>"]
    for side, reasons in result["restarts"].items():
        if reasons:
            parts.append(f"<p>{side.upper()}: {escape(restart_words(reasons))}</p>")
    return _page(title, [*parts, *_sections(result)])


def page_of_all(result: Mapping[str, Any]) -> str:
    """All peers: who is in which numeric class, the matrix of pairs, and each pair's own report to be opened."""
    names = {peer["peer_id"]: escape(peer["name"]) for peer in result["peers"]}
    groups = [
        (escape(group["numeric_class"] or "not known"), ", ".join(names[peer] for peer in group["peers"]))
        for group in result["groups"]
    ]
    parts = [
        f"<p>Model: {escape(result['model'] or 'none')}. {_word(result['pass'])}.</p>",
        "<h2>Numeric classes</h2>", _table(("class", "peers"), groups),
        "<h2>Pairs</h2>", _matrix(result, names),
        "<p>Each cell says whether the pair is within its tolerances, and the largest relative L2 of an operator.</p>",
    ]  # fmt: skip
    for pair in result["pairs"]:
        heading = f"{names[pair['a']]} and {names[pair['b']]}: {_word(pair['pass'])}"
        body = "\n".join(_sections(pair))
        parts.append(f"<details><summary>{heading}</summary>{body}</details>")
    if result["absent"]:
        parts.append(f"<p>Not there: {escape(', '.join(result['absent']))}</p>")
    return _page("All peers", parts)


def _matrix(result: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Rows and columns in the order of the groups. Colour says nothing that the words do not."""
    pairs = {frozenset((pair["a"], pair["b"])): pair for pair in result["pairs"]}
    head = "".join(f"<th scope=col>{name}</th>" for name in names.values())
    rows = []
    for peer, name in names.items():
        cells = []
        for other in names:
            pair = pairs.get(frozenset((peer, other)))
            shade = "" if pair is None else f' class="{_SHADES[pair["pass"]]}"'
            cells.append(f"<td{shade}>{'' if pair is None else escape(pair_words(pair))}</td>")
        rows.append(f"<tr><th scope=row>{name}</th>{''.join(cells)}</tr>")
    return f"<table><tr><td></td>{head}</tr>{''.join(rows)}</table>"


def pair_words(pair: Mapping[str, Any]) -> str:
    """One pair in a few words, as its cell has it."""
    verdict = {True: "pass", False: "FAIL", None: "not judged"}[pair["pass"]]
    ops: list[dict[str, Any]] = next((level["ops"] for level in pair["levels"] if level.get("ops")), [])
    if not ops:
        return verdict
    if all(row["bit_identical"] for row in ops):
        return f"{verdict}, same bits"
    return f"{verdict}, {max(float(row['relative_l2']) for row in ops):.0e}"


def restart_words(reasons: Sequence[str]) -> str:
    """What became of kernels that ended in the middle."""
    times = "once" if len(reasons) == 1 else f"{len(reasons)} times"
    return f"its kernels ended and were started anew {times}, last since {reasons[-1]}"


def _page(title: str, parts: Sequence[str]) -> str:
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def _sections(result: Mapping[str, Any]) -> list[str]:
    """One comparison's report."""
    levels = {level["level"]: level for level in result["levels"] if level["tolerance"] is not None}
    parts = [_share(side, share) for side, share in result["experts"].items() if share is not None]
    parts.append(_verdicts(result["levels"]))
    if "op" in levels:
        parts += ["<h2>Operators</h2>", _operators(levels["op"])]
    if "layer" in levels:
        parts += ["<h2>Drift of the residual, relative, by layer</h2>", _drift(levels["layer"])]
        parts.append(_divergence(levels["layer"]["divergence"]))
    if "decisions" in levels:
        parts += ["<h2>Margins of the likeliest token, and flips</h2>", _margins(levels["decisions"])]
    return parts


def _share(side: str, share: Mapping[str, Any]) -> str:
    peer = escape(share["peer"])
    return f"<p>{side.upper()}: {peer} computed {share['held']} of {share['of']} experts, this machine the others.</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are markup already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    return (
        f"<table><tr>{top}</tr>"
        + "".join("<tr>" + "".join(f"<td>{c}</td>" for c in r) + "</tr>" for r in rows)
        + ("</table>")
    )


def _word(passed: bool | None) -> str:
    if passed is None:
        return "not judged"
    return '<span class="pass">pass</span>' if passed else '<span class="fail">fail</span>'


def _verdicts(levels: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (level["level"], _word(level["pass"]), _key_figure(level), escape(level["reason"] or "")) for level in levels
    ]
    return _table(("level", "", "", ""), rows)


def _key_figure(level: Mapping[str, Any]) -> str:
    if level["tolerance"] is None:
        return ""
    match level["level"]:
        case "op":
            worst = max(level["ops"], key=lambda row: float(row["relative_l2"]))
            return f"relative L2 at most {worst['relative_l2']:.1e} ({worst['op']} {worst['type'] or ''})"
        case "layer":
            return f"{level['pinned']['relative_l2'][-1]:.1e} after the last layer"
        case "logits":
            return f"mean KL {level['kl_mean']:.1e}"
        case "decisions":
            return f"{level['flips']} of {level['positions']} flipped, {level['flips_predicted']:.1f} predicted"
        case "generation":
            return f"{level['identical']} of {level['prompts']} answers the same"
        case _:
            return f"{level['nll_difference']:+.1e} nats a token, standard error {level['standard_error']:.1e}"


def _operators(level: Mapping[str, Any]) -> str:
    head = ("operator", "weights", "length", "largest", "relative L2", "cosine", "limit", "cause", "")
    rows = [
        (
            row["op"], row["type"] or "", str(row["length"]), f"{row['max_abs_diff']:.1e}", f"{row['relative_l2']:.1e}",
            f"{row['min_cosine']:.7f}", f"{row['tolerance']['median_relative_l2']:.1e}", _cause(row),
            _word(row["pass"]),
        )
        for row in level["ops"]
    ]  # fmt: skip
    notes = "".join(f"<p>Left out: {escape(note)}</p>" for note in level["skipped"])
    return _table(head, rows) + notes


def _cause(row: Mapping[str, Any]) -> str:
    """The cause, and what the reference has to be switched to to come near each side."""
    if row["bit_identical"]:
        return ""
    sides = [f"{side.upper()}: {each['setting']}" for side, each in row["nearest"].items() if each["setting"]]
    title = escape("; ".join(sides), quote=True)
    return f'<span title="{title}">{escape(row["cause"] or "not attributable")}</span>'


def _axes(highest: float, last: str, first: str) -> str:
    return (
        f'<line x1="{_LEFT}" y1="{_HEIGHT}" x2="{_WIDTH}" y2="{_HEIGHT}" stroke="#444"/>'
        f'<line x1="{_LEFT}" y1="0" x2="{_LEFT}" y2="{_HEIGHT}" stroke="#444"/>'
        f'<text x="2" y="12">{highest:.2g}</text><text x="2" y="{_HEIGHT}">0</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT + 16}">{first}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{last}</text>'
    )


def _svg(content: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _BELOW}" width="{_WIDTH}" role="img">{content}</svg>'


def _drift(level: Mapping[str, Any]) -> str:
    curves = [(level[key]["relative_l2"], name, colour) for key, name, colour in _CURVES]
    curves.append((level["tolerance"]["relative_l2"], "limit", "#cf222e"))
    highest = max((max(values) for values, _, _ in curves), default=0.0) or 1.0
    lines = []
    for at, (values, name, colour) in enumerate(curves):
        step = (_WIDTH - _LEFT) / max(len(values) - 1, 1)
        points = " ".join(f"{_LEFT + i * step:.1f},{_HEIGHT * (1 - v / highest):.1f}" for i, v in enumerate(values))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(f'<text x="{_LEFT + 10}" y="{14 + 14 * at}" fill="{colour}">{escape(name)}</text>')
    return _svg(_axes(highest, f"layer {level['layers']}", "1") + "".join(lines))


def _divergence(divergence: Mapping[str, Any]) -> str:
    """Which experts part on the very same rows."""
    rows = [
        (what, str(each["layer"]), str(each["expert"]), *(escape(each[side] or "this machine") for side in _PEERS),
         f"{each['relative_l2']:.1e}")
        for key, what in (("first", "in the first layer that differs"), ("worst", "most of all"))
        if (each := divergence[key]) is not None
    ]  # fmt: skip
    if not rows:
        return "<p>On the same rows every expert gives the same bits.</p>"
    return _table(("on the same rows", "layer", "expert", "A by", "B by", "relative L2"), rows)


def _margins(level: Mapping[str, Any]) -> str:
    found = level["margin_histogram"]
    highest, step = max(*found["counts"], 1), (_WIDTH - _LEFT) / len(found["counts"])
    bars = [
        f'<rect x="{_LEFT + i * step:.1f}" y="{_HEIGHT * (1 - count / highest):.1f}" width="{step - 1:.1f}" '
        f'height="{_HEIGHT * count / highest:.1f}" fill="{colour}"/>'
        for counts, colour in ((found["counts"], "#b6d3fb"), (found["flipped"], "#cf222e"))
        for i, count in enumerate(counts)
    ]
    note = f"<p>Red: flipped ({level['flips']}). Predicted: {level['flips_predicted']:.1f}.</p>"
    return _svg(_axes(highest, f"{found['edges'][-1]:.2g} and more", "0") + "".join(bars)) + note
