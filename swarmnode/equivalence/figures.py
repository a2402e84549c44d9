"""A level's figures in words, for terminal and page alike: what A and B differ by, what llama.cpp differs from itself
by, and the limit where the figure has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

Level = Mapping[str, Any]
FORK_RANGES: Final = 8  # of an answer's tokens, in which partings are counted


class Figure(NamedTuple):
    """One line. noise: llama.cpp on the undivided model beside itself with `fast`. "" where there is no such thing."""

    what: str
    found: str
    noise: str = ""
    limit: str = ""


def figures_of(level: Level) -> list[Figure]:
    """Of every level but op, whose figures are one row for each operator."""
    return _FIGURES[level["level"]](level)


def short(value: float) -> str:
    """Two digits, and where it is small an exponent of as few as it takes: 1.3, 4.8e-7."""
    if value == 0 or 0.1 <= abs(value) < 100:
        return f"{value:.2g}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def operators_by_cause(rows: Sequence[Level]) -> dict[str, list[str]]:
    """Operators by what their difference comes from; products by their weights, and by length where those differ."""
    named = {(row["op"], row["type"]): set[str]() for row in rows}
    for row in rows:
        named[row["op"], row["type"]].add(cause_of(row))
    found: dict[str, list[str]] = {}
    for row in rows:
        what = f"{row['op']} {row['type'] or ''}".strip()
        if len(named[row["op"], row["type"]]) > 1:
            what = f"{what} over {row['length']}"
        known = found.setdefault(cause_of(row), [])
        if what not in known:
            known.append(what)
    return found


def cause_of(row: Level) -> str:
    """In words: what an operator's difference comes from."""
    return "no difference" if row["bit_identical"] else row["cause"] or "not attributable"


def _layer(level: Level) -> list[Figure]:
    noise, limits, last = level["noise_floor"], level["tolerance"]["relative_l2"], level["layers"]
    found = []
    for key, how in (("pinned", "routing pinned"), ("free", "routing free")):
        ours, theirs = level[key], noise[key]
        limit = [short(limits[0]), short(limits[-1])] if key == "pinned" else ["", ""]
        for at, after, allowed in ((0, "the first layer", limit[0]), (-1, f"the last of {last}", limit[1])):
            pair = short(ours["relative_l2"][at]), short(theirs["relative_l2"][at])
            found.append(Figure(f"{how}: residual after {after}", *pair, allowed))
        found.append(Figure(f"{how}: grows as depth to the", _power(ours), _power(theirs)))
        found.append(Figure(f"{how}: first layer that differs", _layer_of(ours), _layer_of(theirs)))
    return found


def _power(drift: Level) -> str:
    return "-" if drift["exponent"] is None else f"{drift['exponent']:.2f}"


def _layer_of(drift: Level) -> str:
    return "none" if drift["first_layer"] is None else str(drift["first_layer"])


def _logits(level: Level) -> list[Figure]:
    noise = level["noise_floor"]
    return [
        Figure("mean KL, nats", short(level["kl_mean"]), short(noise["kl_mean"]), short(level["tolerance"]["kl_mean"])),
        *(
            Figure(what, short(level[key]), short(noise[key]))
            for what, key in (
                ("largest KL", "kl_max"), ("L2, relative, median", "l2_median"), ("L2, relative, largest", "l2_max"),
                ("L-infinity", "l_infinity"),
            )
        ),
        Figure("positions", str(level["positions"]), str(noise["positions"])),
    ]  # fmt: skip


def _decisions(level: Level) -> list[Figure]:
    noise, limits, of = level["noise_floor"], level["tolerance"], level["routing"]
    of_noise = noise["routing"]
    return [
        Figure(
            f"likeliest tokens that flip, of {level['positions']}",
            str(level["flips"]), str(noise["flips"]), f"{limits['flips']:.1f}",
        ),
        Figure("predicted from the margins", f"{level['flips_predicted']:.1f}", f"{noise['flips_predicted']:.1f}"),
        Figure("flips through the gate", str(level["flips_through_the_gate"]), "", "0"),
        Figure(
            "tokens that agree",
            f"{level['top1_agreement']:.1%}", f"{noise['top1_agreement']:.1%}", f"{limits['top1_agreement']:.1%}",
        ),
        *(
            Figure(f"routers by themselves: other {what}", f"{of[key]:.2%}", f"{of_noise[key]:.2%}")
            for what, key in (
                ("sets of experts", "sets_changed"), ("experts", "experts_changed"), ("likeliest", "top1_changed"),
            )
        ),
        Figure("first choice that differs", _choice(of["first"]), _choice(of_noise["first"])),
    ]  # fmt: skip


def _choice(first: Level | None) -> str:
    return "none" if first is None else f"layer {first['layer']}, token {first['token']}"


def first_choice_words(level: Level) -> str | None:
    """Of the level decisions: the first choice of a router that differs, with what each side's would be."""
    first = level["routing"]["first"]
    if first is None:
        return None
    a, b = (", ".join(map(str, first[side])) for side in ("experts_a", "experts_b"))
    return f"routers by themselves differ first in {_choice(first)}: A's chooses experts {a}, B's {b}"


def _generation(level: Level) -> list[Figure]:
    noise, limits = level["noise_floor"], level["tolerance"]
    parted = [each["prompts"] - each["identical"] for each in (level, noise)]
    ours, theirs = (ranges_of(each["first_difference_counts"]) for each in (level, noise))
    return [
        Figure(f"answers that part, of {level['prompts']}", str(parted[0]), str(parted[1]), f"{limits['forks']:.1f}"),
        Figure("predicted from the margins", f"{level['forks_predicted']:.1f}", f"{noise['forks_predicted']:.1f}"),
        Figure("partings through the gate", str(level["forks_through_the_gate"]), "", "0"),
        Figure("tokens compared", str(level["positions"]), str(noise["positions"])),
        *(
            Figure(f"part at {words}", str(count), str(other))
            for (words, count), (_, other) in zip(ours, theirs, strict=True)
        ),
    ]


def ranges_of(counts: Sequence[int]) -> list[tuple[str, int]]:
    """Counts by token in at most FORK_RANGES ranges of one length, each in words."""
    length = -(-len(counts) // FORK_RANGES)
    found = []
    for start in range(0, len(counts), length):
        end = min(start + length, len(counts))
        words = f"token {start}" if end == start + 1 else f"tokens {start} to {end - 1}"
        found.append((words, sum(counts[start:end])))
    return found


def _task(level: Level) -> list[Figure]:
    noise, limits, asked = level["noise_floor"], level["tolerance"], level["choices"]
    other = noise["choices"]
    perplexities = _both(level, "perplexity", ".4g"), _both(noise, "perplexity", ".4g")
    right = _both(asked, "accuracy", ".1%"), _both(other, "accuracy", ".1%")
    return [
        Figure(f"perplexity of {level['positions']} tokens", *perplexities),
        Figure(
            "paired difference, nats a token",
            short(level["nll_difference"]), short(noise["nll_difference"]), short(limits["nll_difference"]),
        ),
        Figure("its standard error", short(level["standard_error"]), short(noise["standard_error"])),
        Figure(f"right answers of {asked['questions']} questions", *right),
        Figure("answers that change", str(asked["changed"]), str(other["changed"]), f"{limits['changed']:.1f}"),
        Figure("predicted from the margins", f"{asked['changed_predicted']:.1f}", f"{other['changed_predicted']:.1f}"),
        Figure("answers' movement, nats", short(asked["spread"]), short(other["spread"]), short(limits["spread"])),
    ]  # fmt: skip


def _both(found: Level, key: str, shown: str) -> str:
    return f"{found[f'{key}_a']:{shown}}, {found[f'{key}_b']:{shown}}"


_FIGURES: Final[dict[str, Callable[[Level], list[Figure]]]] = {
    "layer": _layer, "logits": _logits, "decisions": _decisions, "generation": _generation, "task": _task,
}  # fmt: skip
