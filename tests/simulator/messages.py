"""What nodes of a whole swarm say to each other besides elections: members and leader, dispatches, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capabilities.errors import SwarmError
from scheduler.requests import Request
from tests.simulator.toy import F32, I32

Held = Mapping[int, tuple[int, ...]]
"""Experts of each layer."""


# --- On a member's stream ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker to its leader, whose term it names."""

    term: int
    budget_bytes: int
    numeric_class: str
    host: str  # the machine that it runs on
    holding: tuple[tuple[int, int], ...]  # names of the set in its memory that has begun


@dataclass(frozen=True, slots=True)
class Policy:
    """Whether a worker wants to hold nothing more."""

    draining: bool


@dataclass(frozen=True, slots=True)
class Assign:
    """What to hold in an epoch."""

    term: int
    epoch: int
    held: Held


@dataclass(frozen=True, slots=True)
class Loaded:
    """It is held now, or cannot be."""

    term: int
    epoch: int
    well: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """The epoch serves; all others may be forgotten."""

    term: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Ping:
    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    number: int


# --- A layer's dispatch -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """Rows to compute: x float32 [Tp, WIDTH], tokens and experts int32 [R]; with weights [R], to be summed by them."""

    term: int
    epoch: int
    number: int
    layer: int
    x: F32
    tokens: I32
    experts: I32
    weights: F32 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The answer to a dispatch: rows, which may be anything if the worker is bad, or why there are none."""

    number: int
    values: Any
    refusal: str = ""


# --- On a prompt's stream ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to the leader of a term; `request.generated` is the answer so far."""

    attempt: int
    term: int
    request: Request


@dataclass(frozen=True, slots=True)
class Alive:
    """The leader works on it."""


@dataclass(frozen=True, slots=True)
class Token:
    index: int
    token: int
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete, with the text that was held back."""

    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    error: SwarmError
