"""What people see of a daemon's answers: at most 80 columns, in colour only on a terminal.

An answer may come from a daemon of another version, and it holds names that strangers chose. So whatever is missing
shows as a dash, and no text reaches the terminal before it is made printable.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from capabilities.errors import SwarmError
from swarmnode.printable import printable_line

Json = Any
COLUMNS = 80
_INDENT = " " * 6
MISSING_SHOWN = 5
ENTRIES_SHOWN = 8
_NUMBERS = frozenset(
    ("experts", "MiB", "rtt ms", "layers", "size", "llama.cpp", "swarm", "ratio", "load", "disp/s", "rows/s")
)
_WIDTHS = {
    "peer": (8, 10), "id": (8, 8), "role": (6, 8), "state": (13, 13), "backend": (7, 8), "version": (7, 7),
    "request": (20, 26),  # whole, since other commands take it
}  # fmt: skip
_STATE_STYLES = {"ready": "green", "joining": "yellow", "loading": "yellow", "suspect": "red", "gone": "red"}


def print_status(status: Mapping[str, Json]) -> None:
    console().print(status_view(status))


def status_view(status: Mapping[str, Json], *, live: bool = False) -> RenderableType:
    """Whether the swarm is ready and why not, the model and its coverage, this daemon, the requests, the peers.

    live: what is wrong comes before the peers, of which a screen may not show all.
    """
    peers = [peer for peer in _list(status.get("peers")) if isinstance(peer, dict)]
    names = {peer.get("peer_id"): peer.get("name") for peer in peers}
    table = _fields_table()
    table.add_row("swarm", verdict(status))
    leader = status.get("leader")
    table.add_row("leader", f"{plain(names.get(leader))} ({short(leader)})" if leader else "none")
    table.add_row("term, epoch", f"{plain(status.get('term'))}, {plain(status.get('epoch'))}")
    table.add_row("model", _model(_dict(status.get("model"))))
    table.add_row("combine", plain(_dict(status.get("model")).get("combine")))
    requests = _dict(status.get("requests"))
    table.add_row("requests", ", ".join(f"{plain(count)} {plain(kind)}" for kind, count in requests.items()) or "-")
    table.add_row("this peer", plain(status.get("self")))
    for address in _list(status.get("addresses"))[:ENTRIES_SHOWN]:
        # Without the peer id, which stands above: both together would break over two lines, and nobody could copy them.
        table.add_row("", plain(address).removesuffix(f"/p2p/{status.get('self')}"))
    if url := _dict(status.get("http")).get("url"):
        table.add_row("http", plain(url))
    notes = Text("\n".join(_notes(status, peers, names)))
    below: list[RenderableType] = [_peers_table(peers), *([notes] if notes.plain else [])]
    return Group(table, Text(""), *(reversed(below) if live else below))


def verdict(status: Mapping[str, Json]) -> Text:
    """Ready, or why not."""
    ready = status.get("ready") is True
    reason = plain(status.get("reason") or "no reason given").removeprefix("the swarm is not ready: ")
    words = "ready" if ready else f"not ready: {reason}"
    return Text(words, style="bold green" if ready else "bold yellow")


def _notes(status: Mapping[str, Json], peers: Iterable[Mapping[str, Json]], names: Mapping[Json, Json]) -> list[str]:
    """What is wrong, and what to do, a line each."""
    lines = [
        f"{plain(peer.get('name'))}: {plain(message)}"
        for peer in peers
        if (message := _dict(peer.get("error")).get("message"))
    ]
    lines += [plain(sentence) for sentence in _shortened(_list(_dict(status.get("model")).get("degraded")))]
    for finding in map(_dict, _list(status.get("findings"))):
        peer_id = plain(finding.get("peer"))
        name = names.get(peer_id) or short(peer_id)
        lines += [
            f"{plain(name)}: {plain(finding.get('message'))} ({plain(finding.get('kind'))})",
            f"  {plain(finding.get('hint'))}",
        ]
    return lines


def error_view(error: SwarmError) -> Text:
    """An error where pictures are shown."""
    return Text("\n".join(filter(None, (f"Error: {plain(error.message)}", printable_line(error.hint)))), style="red")


def _model(model: Mapping[str, Json]) -> str:
    if not model:
        return "none"
    coverage = _dict(model.get("coverage"))
    missing = _list(coverage.get("missing"))
    name = f"{plain(model.get('name'))} ({plain(model.get('architecture'))})"
    if not missing:
        copies = coverage.get("min_copies")
        return f"{name}, every expert has {plain(copies)} {'copy' if copies == 1 else 'copies'}" if copies else name
    first = [f"{plain(_dict(one).get('layer'))}/{plain(_dict(one).get('expert'))}" for one in missing[:MISSING_SHOWN]]
    more = ", ..." if len(missing) > MISSING_SHOWN else ""
    return f"{name}, {len(missing)} experts missing (layer/expert {', '.join(first)}{more})"


def _peers_table(peers: Iterable[Mapping[str, Json]]) -> Table:
    table = table_of("peer", "id", "role", "state", "backend", "experts", "rtt ms", "load", "version")
    for peer in peers:
        state, fitness = plain(peer.get("state")), plain(peer.get("fitness"))
        unfit = f", {fitness}" if fitness in ("unfit", "quarantined") else ""
        backends = [plain(_dict(one).get("name")) for one in _list(peer.get("backends"))]
        rtt = peer.get("rtt_ms")
        table.add_row(
            plain(peer.get("name")),
            short(peer.get("peer_id")),
            plain(next(iter(_list(peer.get("roles"))), None)),  # a leader is in the backbone, and who works has experts
            Text(state + _loaded(_dict(peer.get("progress"))) + unfit, style=state_style(state)),
            ",".join(backends) or "-",
            plain(peer.get("experts_held")),
            f"{rtt:.1f}" if isinstance(rtt, int | float) else "-",
            share(peer.get("load")),
            plain(peer.get("version")),
        )
    return table


def state_style(state: str) -> str:
    """The colour of a peer's state; "" for none."""
    return _STATE_STYLES.get(state, "")


def share(value: Json) -> str:
    """A share of 1 in percent."""
    return f"{value * 100:.0f} %" if isinstance(value, int | float) else "-"


def _loaded(loading: Mapping[str, Json]) -> str:
    done, total = loading.get("done_bytes"), loading.get("total_bytes")
    if not isinstance(done, int) or not isinstance(total, int) or not 0 <= done < total:
        return ""
    return f" {done * 100 // total} %"


def print_placement(answer: Mapping[str, Json]) -> None:
    """Who holds what, what is not as it should be, and what a loss would cost."""
    out = console()
    fields = _fields_table()
    fields.add_row("term, epoch", f"{plain(answer.get('term'))}, {plain(answer.get('epoch'))}")
    counts = [_dict(count) for count in _list(answer.get("copies"))]
    copies = [f"{plain(count.get('experts'))} with {plain(count.get('copies'))}" for count in counts]
    fields.add_row("experts", ", ".join(copies) + " copies" if copies else "-")
    fields.add_row("layers a token", f"{_number(answer.get('token_ms'))} ms by estimate")
    out.print(fields)
    table = table_of("peer", "id", "experts", "MiB", "layers held")
    for peer in _list(answer.get("peers")):
        held = [plain(_dict(one).get("layer")) for one in _list(_dict(peer).get("held"))]
        table.add_row(
            plain(_dict(peer).get("name")),
            short(_dict(peer).get("peer_id")),
            plain(_dict(peer).get("experts")),
            f"{int(_dict(peer).get('bytes') or 0) / 2**20:.0f}",
            f"{held[0]} to {held[-1]}" if held else "none",
        )
    out.print()
    out.print(table)
    notes = [*_list(answer.get("degraded")), *_shortened(_list(answer.get("single_points")))]
    notes += [
        f"{plain(_dict(peer).get('name'))} got no output rank: {plain(_dict(peer).get('why_no_output_rank'))}"
        for peer in _list(answer.get("peers"))
        if _dict(peer).get("why_no_output_rank")
    ]
    for note in notes:
        out.print(plain(note))
    if loss := _dict(answer.get("without")):
        out.print(_loss(loss))


def _shortened(lines: list[Json]) -> list[str]:
    shown = [plain(line) for line in lines[:ENTRIES_SHOWN]]
    return [*shown, f"and {len(lines) - len(shown)} more of this kind"] if len(lines) > len(shown) else shown


def _loss(loss: Mapping[str, Json]) -> str:
    gone, left = (
        sum(len(_list(_dict(one).get("experts"))) for one in _list(loss.get(key))) for key in ("no_copy", "one_copy")
    )
    text = f"Without {plain(loss.get('name') or loss.get('peer'))}: {gone} experts without a copy, {left} with one left"
    if reason := loss.get("impossible"):
        return f"{text}; the others cannot make up for it: {plain(reason)}"
    moved, slower = loss.get("bytes_to_move"), loss.get("slowdown")
    mib = int(moved or 0) / 2**20
    return f"{text}; the others would load {mib:.0f} MiB, and layers take {_number(slower)} times as long"


def print_models(answer: Mapping[str, Json]) -> None:
    """The models that a node knows, one a row."""
    models = [model for model in _list(answer.get("models")) if isinstance(model, dict)]
    if not models:
        console().print("No models on this node. `swarmctl model add FILE` makes one known; a worker needs none.")
        return
    table = table_of("model", "architecture", "layers", "experts", "size", "state")
    for model in models:
        trunk, experts = model.get("trunk_bytes"), model.get("expert_bytes")
        table.add_row(
            *(plain(model.get(key)) for key in ("name", "architecture", "moe_layers", "experts")),
            f"{(trunk + experts) / 2**30:.2f} GiB" if isinstance(trunk, int) and isinstance(experts, int) else "-",
            "unusable" if model.get("fault") else "active" if model.get("active") else "-",
        )
    console().print(table)
    for model in models:
        if fault := model.get("fault"):
            console().print(plain(fault))


def print_bench(result: Mapping[str, Json]) -> None:
    """Swarm against undivided llama.cpp, then the swarm's costs."""
    table = table_of("tokens/s", "llama.cpp", "swarm", "ratio")
    for key, label in (("prefill_tokens_per_s", "prefill"), ("decode_tokens_per_s", "decode")):
        one, swarm = _dict(result.get("llama_cpp")).get(key), _dict(result.get("swarm")).get(key)
        ratio = f"{swarm / one:.2f}" if one and swarm else "-"
        table.add_row(label, _number(one), _number(swarm), ratio)
    console().print(table)
    print_fields({key: value for key, value in result.items() if key not in ("llama_cpp", "swarm")})


def print_fields(value: Mapping[str, Json]) -> None:
    """Any answer as `key  value` lines. Long lists show their length."""
    table = _fields_table()
    for key, item in value.items():
        table.add_row(plain(key).replace("_", " "), _summary(item))
    console().print(table)


def _summary(value: Json) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{plain(key)} {_summary(item)}" for key, item in list(value.items())[:ENTRIES_SHOWN])
    if isinstance(value, list):
        return ", ".join(map(_summary, value)) or "none" if len(value) <= ENTRIES_SHOWN else f"{len(value)} entries"
    return _number(value)


def _number(value: Json) -> str:
    return f"{value:.4g}" if isinstance(value, float) else plain(value)


def plain(value: Json) -> str:
    """Any value as a line for people; a dash where there is none."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable_line(str(value))


def short(peer_id: Json) -> str:
    """A peer id's last characters: the first ones are the same for everybody."""
    return plain(peer_id)[-8:]


def _dict(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def console(columns: int = COLUMNS) -> Console:
    """Standard output: on a terminal in its width, and colours unless NO_COLOR is set; else `columns`, plain."""
    if sys.stdout.isatty():
        return Console(file=sys.stdout, force_terminal=True, highlight=False, markup=False)
    file: Any = _Trimmed(sys.stdout)
    return Console(file=file, width=columns, force_terminal=False, highlight=False, markup=False)


def indented(text: Json, columns: int) -> str:
    """A paragraph below a heading. What is longer than a line, such as a path, stays whole: people copy it."""
    return textwrap.fill(
        plain(text),
        columns,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


class _Trimmed:
    """A text stream without the spaces that fill a table's lines up: in a pipe or a file they are in the way."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.encoding = file.encoding
        self.flush = file.flush

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r" +(?=\n)", "", text))


def _fields_table() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    return table


def table_of(*names: str) -> Table:
    """A table in which columns of words give way to those of numbers and states where the line is too short."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in names:
        right = name in _NUMBERS
        least, most = _WIDTHS.get(name, (len(name), 16))
        table.add_column(name, no_wrap=True, justify="right" if right else "left", min_width=least, max_width=most)
    return table
