"""The page's pictures: the drift's curve, the histogram of margins, and where greedy answers part. SVG as text.

Each scales with the page down to a phone's width, and its legend stands below it, in words that colour only repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 640, 240, 56, 40, 8
_BLUE, _PURPLE, _GREY, _RED, _PALE = "#1f6feb", "#8250df", "#8c8c8c", "#cf222e", "#9cc3f7"
_BAR_GAP: Final = 1.0
Legend = Sequence[tuple[str, str]]


def drift_curve(level: Mapping[str, Any]) -> str:
    """Relative differences of the residual after each layer."""
    noise = level["noise_floor"]
    curves = (
        (level["pinned"]["relative_l2"], "A and B, routing pinned", _BLUE, ""),
        (level["free"]["relative_l2"], "A and B, routing free", _PURPLE, "6 4"),
        (noise["pinned"]["relative_l2"], "llama.cpp's own noise", _GREY, ""),
        (level["tolerance"]["relative_l2"], "limit", _RED, "2 3"),
    )
    highest = max((max(values) for values, *_ in curves), default=0.0) or 1.0
    lines = []
    for values, _, colour, dashes in curves:
        step = (_WIDTH - _LEFT) / max(len(values) - 1, 1)
        points = " ".join(f"{_LEFT + i * step:.1f},{_y(v / highest):.1f}" for i, v in enumerate(values))
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')
    axes = _axes(f"{highest:.2g}", ("layer 1", f"layer {level['layers']}"))
    return _picture("".join(lines) + axes, [(name, colour) for _, name, colour, _ in curves])


def margin_histogram(level: Mapping[str, Any]) -> str:
    """Positions by A's margin, and those that flipped."""
    found = level["margin_histogram"]
    highest = max(*found["counts"], 1)
    bars = [*_bars(found["counts"], highest, _PALE), *_bars(found["flipped"], highest, _RED)]
    ends = "margin 0", f"{found['edges'][-1]:.2g} and more"
    legend = (f"positions: {level['positions']}", _PALE), (f"of them flipped: {level['flips']}", _RED)
    return _picture("".join(bars) + _axes(str(highest), ends), legend)


def fork_histogram(level: Mapping[str, Any]) -> str:
    """How many answers part at each token: of both sides, and of llama.cpp with itself."""
    ours, noise = level["first_difference_counts"], level["noise_floor"]["first_difference_counts"]
    highest = max(*ours, *noise, 1)
    bars = [*_bars(ours, highest, _BLUE, (0, 2)), *_bars(noise, highest, _GREY, (1, 2))]
    legend = [
        (f"{name} ({found['identical']} of {found['prompts']} the same throughout)", colour)
        for name, found, colour in (("A and B", level, _BLUE), ("llama.cpp's own noise", level["noise_floor"], _GREY))
    ]
    return _picture("".join(bars) + _axes(str(highest), ("first token", f"token {level['tokens']}")), legend)


def _y(share: float) -> float:
    return _ABOVE + _HEIGHT * (1 - share)


def _bars(counts: Sequence[int], highest: int, colour: str, place: tuple[int, int] = (0, 1)) -> list[str]:
    """One for each count; `place`: which of how many series that stand beside each other."""
    at, of = place
    step = (_WIDTH - _LEFT) / len(counts)
    width = (step - _BAR_GAP) / of
    return [
        f'<rect x="{_LEFT + i * step + at * width:.1f}" y="{_y(count / highest):.1f}" width="{width:.1f}" '
        f'height="{_HEIGHT * count / highest:.1f}" fill="{colour}"/>'
        for i, count in enumerate(counts)
    ]


def _axes(highest: str, ends: tuple[str, str]) -> str:
    bottom = _ABOVE + _HEIGHT
    first, last = (escape(end) for end in ends)
    return (
        f'<line x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH}" y2="{bottom}" stroke="#444"/>'
        f'<line x1="{_LEFT}" y1="{_ABOVE}" x2="{_LEFT}" y2="{bottom}" stroke="#444"/>'
        f'<text x="{_LEFT - 6}" y="{_ABOVE + 10}" text-anchor="end">{escape(highest)}</text>'
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>'
        f'<text x="{_LEFT}" y="{bottom + 20}">{first}</text>'
        f'<text x="{_WIDTH}" y="{bottom + 20}" text-anchor="end">{last}</text>'
    )


def _picture(content: str, legend: Legend) -> str:
    words = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span> ' for name, colour in legend
    )
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_ABOVE + _HEIGHT + _BELOW}" role="img">{content}</svg>'
        f"<figcaption>{words}</figcaption></figure>"
    )
