"""The report as one page without anything from elsewhere: pairs, verdicts, and each level's figures and pictures.

Names of files and backends are whoever's: everything that is text goes through `escape`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from backends.atomic_file import replacing
from capabilities.equivalence import LEVELS
from capabilities.errors import UsageError
from swarmnode.equivalence.charts import drift_curve, fork_histogram, margin_histogram
from swarmnode.equivalence.figures import cause_of, figures_of, first_choice_words, short
from swarmnode.equivalence.targets import EXACT, ROUNDED

_SHADES: Final = {True: "near", False: "far", None: "none"}  # blue, orange, grey: told apart by all eyes
_PEERS: Final = ("peer_a", "peer_b")
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;overflow-wrap:anywhere}"
    ".wide{overflow-x:auto;margin:1em 0}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:3px 10px;border-bottom:1px solid #ddd;text-align:left}"
    ".wide table{overflow-wrap:normal}.figures td{white-space:nowrap}.figures th{min-width:4.5em}"
    ".figures td:first-child{white-space:normal;min-width:8em}"
    ".near{background:#cfe5ff}.far{background:#ffd8a8;font-weight:bold}.none{background:#eee}"
    ".pass{color:#1a7f37}.fail{color:#cf222e;font-weight:bold}"
    "figure{margin:1em 0}svg{width:100%;max-width:680px;height:auto;display:block}text{font:16px system-ui,sans-serif}"
    ".key{display:inline-block;margin-right:1.5em;font-size:13px}"
    ".key i{display:inline-block;width:12px;height:12px;margin-right:6px}"
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
    a, b, model = (escape(result[key] or "none") for key in ("a", "b", "model"))
    parts = [f"<p>A is {a}, B is {b}, on the model {model}: {_word(result['pass'])}.</p>"]
    parts += [f"<p>{side.upper()} {escape(words)}.</p>" for side, words in fitness_notes(result["fitness"])]
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
        "<p>Each cell says whether the pair is within its tolerances, and how far apart it is: the largest relative L2"
        " over the weight types that the classes are of, and the gated unit; over all operators where a class is not"
        " known.</p>",
        *(f"<p>{line}</p>" for line in contradictions(result, names)),
    ]  # fmt: skip
    parts += [f"<p>{names[peer]} {escape(words)}.</p>" for peer, words in fitness_notes(_fitness(result))]
    if missing := [level for level in LEVELS if level not in _levels_of(result)]:
        parts.append(
            f"<p>Not compared: {', '.join(missing)}. <code>--level {','.join(LEVELS)}</code> compares whole models: "
            "the drift&#39;s curve, the margins&#39; histogram, and where answers part then stand with each pair.</p>"
        )
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
    return f'<div class="wide"><table><tr><td></td>{head}</tr>{"".join(rows)}</table></div>'


def pair_words(pair: Mapping[str, Any]) -> str:
    """One pair in a few words, as its cell has it: what the peers' classes are of, where that is known."""
    verdict = {True: "pass", False: "FAIL", None: "not judged"}[pair["pass"]]
    ops: list[dict[str, Any]] = next((level["ops"] for level in pair["levels"] if level.get("ops")), [])
    if not ops:
        return verdict
    if all(row["bit_identical"] for row in ops):
        return f"{verdict}, same bits"
    if (of_class := pair["in_class"]) is not None and not of_class["bit_identical"]:
        return f"{verdict}, {of_class['relative_l2']:.0e}"
    if of_class is not None:
        types = of_class["types"]
        return f"{verdict}, same bits in {types[0] if len(types) == 1 else f'{len(types)} types'}"
    return f"{verdict}, {max(float(row['relative_l2']) for row in ops):.0e}"


def contradictions(result: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """A sentence for each pair of one numeric class whose bits are not the same in what the class is of."""
    return [
        f"{names[pair['a']]} and {names[pair['b']]} are of one numeric class, and differ in"
        f" {', '.join(of_class['types'])} or the gated unit by {of_class['relative_l2']:.0e}: the class does not say"
        " any more what they compute"
        for pair in result["pairs"]
        if (of_class := pair["in_class"]) is not None and of_class["contradicted"]
    ]


def fitness_notes(fitness: Mapping[str, str | None]) -> list[tuple[str, str]]:
    """Of sides or peers by name: those whose work the leader has found wanting, and what a comparison says of that."""
    words = "is {} by what was measured of its work, and operators come from a process of their own, not from the one "
    words += "that serves: that they are right says nothing of its work"
    return [(name, words.format(held)) for name, held in fitness.items() if held in ("unfit", "quarantined")]


def _fitness(result: Mapping[str, Any]) -> dict[str, str | None]:
    return {peer["peer_id"]: peer["fitness"] for peer in result["peers"]}


def _levels_of(result: Mapping[str, Any]) -> set[str]:
    return {level["level"] for pair in result["pairs"] for level in pair["levels"]}


def restart_words(reasons: Sequence[str]) -> str:
    """What became of kernels that ended in the middle."""
    times = "once" if len(reasons) == 1 else f"{len(reasons)} times"
    return f"its kernels ended and were started anew {times}, last since {reasons[-1]}"


def _page(title: str, parts: Sequence[str]) -> str:
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def _sections(result: Mapping[str, Any]) -> list[str]:
    """One comparison's report."""
    levels = {level["level"]: level for level in result["levels"] if level["tolerance"] is not None}
    parts = [_share(side, share) for side, share in result["experts"].items() if share is not None]
    parts.append(_verdicts(result["levels"]))
    for name, heading, body in (
        ("op", "Operators", _op), ("layer", "Drift of the residual, by layer", _layer), ("logits", "Logits", _figures),
        ("decisions", "Decisions: the likeliest token, and what the routers chose", _decisions),
        ("generation", "Greedy answers: where they part", _generation),
        ("task", "Task: a text, and questions with one right answer", _figures),
    ):  # fmt: skip
        if name in levels:
            parts += [f"<h2>{heading}</h2>", f"<p>{_word(levels[name]['pass'])}: {escape(levels[name]['reason'])}</p>"]
            parts.append(body(levels[name]))
    return parts


def _share(side: str, share: Mapping[str, Any]) -> str:
    peer = escape(share["peer"])
    return f"<p>{side.upper()}: {peer} computed {share['held']} of {share['of']} experts, this machine the others.</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "figures") -> str:
    """Cells are markup already. A table that is wider than the page is moved sideways."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'


def _word(passed: bool | None) -> str:
    if passed is None:
        return "not judged"
    return '<span class="pass">pass</span>' if passed else '<span class="fail">fail</span>'


def _verdicts(levels: Sequence[Mapping[str, Any]]) -> str:
    rows = [(level["level"], _word(level["pass"]), escape(level["reason"])) for level in levels]
    return _table(("level", "verdict", "why"), rows, "words")


def _figures(level: Mapping[str, Any]) -> str:
    """Every figure of a level beside llama.cpp's own noise."""
    rows = [tuple(escape(cell) for cell in figure) for figure in figures_of(level)]
    return _table(("", "A and B", "llama.cpp's own noise", "limit"), rows)


# -- levels -----------------------------------------------------------------------------------------------------------


def _op(level: Mapping[str, Any]) -> str:
    head = ("operator", "weights", "length", "largest", "relative L2", "cosine", "limit", "worst at", "cause", "")
    rows = [
        (
            row["op"], row["type"] or "", str(row["length"]), short(row["max_abs_diff"]), short(row["relative_l2"]),
            f"{row['min_cosine']:.7f}", short(row["tolerance"]["median_relative_l2"]), f"{row['worst_width']} rows",
            _cause(row), _word(row["pass"]),
        )
        for row in level["ops"]
    ]  # fmt: skip
    widths = ", ".join(map(str, level["widths"]))
    notes = "".join(f"<p>Left out: {escape(note)}</p>" for note in level["skipped"])
    return f"{_references(level)}{_table(head, rows, 'words')}<p>The worst over batches of {widths} rows.</p>{notes}"


def _references(level: Mapping[str, Any]) -> str:
    """A, B and both references, each beside each other: the largest relative L2 of any product."""
    products = [row for row in level["ops"] if "to_exact" in row]
    if not products:
        return ""
    found: dict[tuple[str, str], list[float]] = {}
    for row in products:
        found.setdefault(("A", "B"), []).append(row["relative_l2"])
        found.setdefault((EXACT, ROUNDED), []).append(row["references_apart"])
        for side in "ab":
            found.setdefault((side.upper(), EXACT), []).append(row["to_exact"][side])
            found.setdefault((side.upper(), ROUNDED), []).append(row["to_rounded"][side])
    far = {frozenset(pair): short(max(values)) for pair, values in found.items()}
    names = ("A", "B", EXACT, ROUNDED)
    rows = [(one, *(far.get(frozenset((one, other)), "") for other in names)) for one in names]
    words = "Every pair of A, B and the references (exact, and with activations rounded to 8 bits)"
    return f"<p>{words}: the largest relative L2 of a product.</p>" + _table(("", *names), rows)


def _layer(level: Mapping[str, Any]) -> str:
    return drift_curve(level) + _figures(level) + _divergence(level["divergence"])


def _decisions(level: Mapping[str, Any]) -> str:
    words = first_choice_words(level)
    return margin_histogram(level) + _figures(level) + (f"<p>{escape(words)}.</p>" if words else "")


def _generation(level: Mapping[str, Any]) -> str:
    return fork_histogram(level) + _figures(level)


def _cause(row: Mapping[str, Any]) -> str:
    """The cause, and what the reference has to be switched to to come near each side."""
    if row["bit_identical"]:
        return "no difference"
    sides = [f"{side.upper()}: {each['setting']}" for side, each in row["nearest"].items() if each["setting"]]
    title = escape("; ".join(sides), quote=True)
    return f'<span title="{title}">{escape(cause_of(row))}</span>'


def _divergence(divergence: Mapping[str, Any]) -> str:
    """Which experts part on the very same rows."""
    rows = [
        (what, str(each["layer"]), str(each["expert"]), *(escape(each[side] or "this machine") for side in _PEERS),
         short(each["relative_l2"]))
        for key, what in (("first", "in the first layer that differs"), ("worst", "most of all"))
        if (each := divergence[key]) is not None
    ]  # fmt: skip
    if not rows:
        return "<p>On the same rows every expert gives the same bits.</p>"
    return _table(("on the same rows", "layer", "expert", "A by", "B by", "relative L2"), rows)
