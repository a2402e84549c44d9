"""What a peer tells of itself: who it is, what it can compute and how exactly, what it holds, what it would rather not.

One value has one form (packing.py), and lists that are sets are sorted, so that two peers that know the same say the
same. Who reads it knows only that the peer says so; what it says of precision counts as far as it was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeVar

from capabilities.errors import PeerMistake
from capabilities.held_experts import HELD_BYTES_MAX, MODEL_ID_CHARS, HeldExperts
from capabilities.membership_certificate import MEMBERSHIP_BYTES_MAX
from capabilities.packing import Fields, Plain
from capabilities.precision import MeasuredPrecision, Precision

NAME_CHARS_MAX: Final = 64
ADDRESSES_MAX: Final = 8
ADDRESS_CHARS_MAX: Final = 256
BACKENDS_MAX: Final = 8
WEIGHTS_MAX: Final = 48
"""Weight types of one backend; ggml has some forty."""

MODELS_MAX: Final = 4
"""Models of which a peer may hold shards: the active one, one that is being prepared, and slack."""

NOT_REACHED_MAX: Final = 8
HOST_CHARS_MAX: Final = 64
_CLASS_CHARS_MAX: Final = 64
_WORD_CHARS_MAX: Final = 24


class Phase(StrEnum):
    """How far a peer has come, by its own word. Draining is a policy, suspect and gone are others' verdicts."""

    JOINING = "joining"
    LOADING = "loading"
    READY = "ready"


class Role(StrEnum):
    """What a peer offers. Who leads is said by a term's certificate alone."""

    BACKBONE = "backbone"
    WORKER = "worker"


_PHASES: Final = tuple(Phase)
_PRECISIONS: Final = tuple(Precision)


class AdvertFields(Fields):
    """Also reads texts and lists of them."""

    __slots__ = ()

    def text(self, name: str, chars_max: int) -> str:
        """A text of up to `chars_max` characters."""
        value = self._next()
        if type(value) is not str or len(value) > chars_max:
            raise self._mistake(name, value, f"a text of up to {chars_max} characters")
        return value

    def texts(self, name: str, count_max: int, chars_max: int) -> tuple[str, ...]:
        """An array of such texts."""
        values = self.array(name, count_max)
        inner = AdvertFields(values, len(values), name)
        return tuple(inner.text(name, chars_max) for _ in values)

    def peers(self, name: str, count_max: int) -> tuple[str, ...]:
        """An array of peer ids."""
        values = self.array(name, count_max)
        inner = AdvertFields(values, len(values), name)
        return tuple(inner.peer(name) for _ in values)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the peer's owner wants or its machine lives on: reasons to give it less."""

    draining: bool = False
    battery: bool = False
    metered: bool = False

    def to_flags(self) -> int:
        return self.draining | self.battery << 1 | self.metered << 2

    @classmethod
    def from_flags(cls, flags: int) -> Policy:
        return cls(*(bool(flags & bit) for bit in (1, 2, 4)))


@dataclass(frozen=True, slots=True)
class WeightSpeed:
    """One weight type on one backend: its numeric class, and rows of experts a second (0: not measured)."""

    weight: str
    numeric_class: str
    rows_per_s: int


@dataclass(frozen=True, slots=True)
class BackendAdvert:
    """One backend of the peer; `weights` sorted by their names."""

    name: str
    device: str
    accumulation: MeasuredPrecision
    source: MeasuredPrecision
    batch_invariant: bool
    repeatable: bool
    weights: tuple[WeightSpeed, ...]

    def bounded(self) -> BackendAdvert:
        """The same within an advert's limits."""
        weights = {each.weight: each for each in self.weights if len(each.weight) <= _WORD_CHARS_MAX}
        return replace(
            self,
            name=self.name[:_WORD_CHARS_MAX],
            device=self.device[:NAME_CHARS_MAX],
            weights=tuple(weights[name] for name in sorted(weights))[:WEIGHTS_MAX],
        )

    def to_plain(self) -> Plain:
        weights = tuple((each.weight, each.numeric_class, each.rows_per_s) for each in self.weights)
        accumulation, source = _precision_to_plain(self.accumulation), _precision_to_plain(self.source)
        return (self.name, self.device, accumulation, source, self.batch_invariant, self.repeatable, weights)

    @classmethod
    def from_plain(cls, value: object) -> BackendAdvert:
        fields = AdvertFields(value, 7, "advert's backend")
        return cls(
            name=fields.text("name", _WORD_CHARS_MAX),
            device=fields.text("device", NAME_CHARS_MAX),
            accumulation=_read_precision(fields.array("accumulation", 3)),
            source=_read_precision(fields.array("source", 3)),
            batch_invariant=fields.flag("batch invariant"),
            repeatable=fields.flag("repeatable"),
            weights=_ordered(
                (_read_weight(item) for item in fields.array("weights", WEIGHTS_MAX)), lambda each: each.weight
            ),
        )


@dataclass(frozen=True, slots=True)
class AdvertContent:
    """What a peer knows of itself, without the running numbers and the signature of one advert.

    Memory in bytes. `roles`, `backends` (by name and device), `held` (by model) and `not_reached` are sorted and
    distinct; `addresses` are multiaddrs, the most useful first. `not_reached` are peers whose addresses this one could
    not dial, so that they hear of it. `host` tells which peers share a machine; equal texts mean one machine, and no
    text means anything else. `membership` is the certificate, opaque here.
    """

    name: str = ""
    roles: tuple[Role, ...] = ()
    version: str = ""
    wire: int = 0
    phase: Phase = Phase.JOINING
    policy: Policy = Policy()
    addresses: tuple[str, ...] = ()
    backends: tuple[BackendAdvert, ...] = ()
    memory_budget: int = 0
    memory_used: int = 0
    held: tuple[HeldExperts, ...] = ()
    not_reached: tuple[str, ...] = ()
    host: str = ""
    membership: bytes = b""

    def bounded(self) -> AdvertContent:
        """The same within an advert's limits: texts cut, lists sorted, without repetitions and cut."""
        backends = {(each.name, each.device): each for each in map(BackendAdvert.bounded, self.backends)}
        held = {each.model: each for each in self.held}
        fitting = dict.fromkeys(address for address in self.addresses if len(address) <= ADDRESS_CHARS_MAX)
        return replace(
            self,
            name=self.name[:NAME_CHARS_MAX],
            roles=tuple(sorted(set(self.roles))),
            version=self.version[:NAME_CHARS_MAX],
            addresses=tuple(fitting)[:ADDRESSES_MAX],
            backends=tuple(backends[key] for key in sorted(backends))[:BACKENDS_MAX],
            held=tuple(held[model] for model in sorted(held))[:MODELS_MAX],
            not_reached=tuple(sorted(set(self.not_reached)))[:NOT_REACHED_MAX],
            host=self.host[:HOST_CHARS_MAX],
        )

    def to_plain(self) -> tuple[Plain, ...]:
        return (
            self.name,
            tuple(str(role) for role in self.roles),
            self.version,
            self.wire,
            _PHASES.index(self.phase),
            self.policy.to_flags(),
            self.addresses,
            tuple(backend.to_plain() for backend in self.backends),
            self.memory_budget,
            self.memory_used,
            tuple((held.model, held.to_blob()) for held in self.held),
            self.not_reached,
            self.host,
            self.membership,
        )

    @classmethod
    def read(cls, fields: AdvertFields) -> AdvertContent:
        """The next CONTENT_FIELDS fields."""
        return cls(
            name=fields.text("name", NAME_CHARS_MAX),
            roles=_ordered((_read_role(role) for role in fields.array("roles", len(Role))), str),
            version=fields.text("version", NAME_CHARS_MAX),
            wire=fields.integer("wire", 65_535),
            phase=_PHASES[fields.integer("phase", len(_PHASES) - 1)],
            policy=Policy.from_flags(fields.integer("policy", 7)),
            addresses=fields.texts("addresses", ADDRESSES_MAX, ADDRESS_CHARS_MAX),
            backends=_ordered(
                (BackendAdvert.from_plain(item) for item in fields.array("backends", BACKENDS_MAX)),
                lambda each: (each.name, each.device),
            ),
            memory_budget=fields.integer("memory budget"),
            memory_used=fields.integer("memory used"),
            held=_ordered((_read_held(item) for item in fields.array("held", MODELS_MAX)), lambda each: each.model),
            not_reached=_ordered(fields.peers("not reached", NOT_REACHED_MAX), str),
            host=fields.text("host", HOST_CHARS_MAX),
            membership=fields.blob("membership", MEMBERSHIP_BYTES_MAX),
        )


CONTENT_FIELDS: Final = len(AdvertContent().to_plain())

_T = TypeVar("_T")


def _ordered(items: Iterable[_T], key: Callable[[_T], Any]) -> tuple[_T, ...]:
    """`items`, which must be sorted by their keys and distinct: so that one set has one form."""
    values = tuple(items)
    keys = [key(value) for value in values]
    if keys != sorted(set(keys)):
        raise PeerMistake("advert: a list is unsorted or has something twice")
    return values


def _read_role(value: object) -> Role:
    try:
        return Role(str(value))
    except ValueError:
        raise PeerMistake(f"advert: {value!r:.40} is no role") from None


def _precision_to_plain(precision: MeasuredPrecision) -> Plain:
    return tuple(map(str, (precision.declared, precision.measured, precision.measured_when_asked)))


def _read_precision(words: tuple[object, ...]) -> MeasuredPrecision:
    if len(words) != 3 or not all(word in _PRECISIONS for word in words):
        raise PeerMistake("advert: a precision is three known words")
    return MeasuredPrecision(*map(Precision.of, words))


def _read_weight(value: object) -> WeightSpeed:
    fields = AdvertFields(value, 3, "advert's weight type")
    weight, numeric_class = fields.text("weight", _WORD_CHARS_MAX), fields.text("numeric class", _CLASS_CHARS_MAX)
    return WeightSpeed(weight, numeric_class, fields.integer("rows a second"))


def _read_held(value: object) -> HeldExperts:
    fields = AdvertFields(value, 2, "advert's held experts")
    model = fields.text("model", MODEL_ID_CHARS)
    return HeldExperts.from_blob(model, fields.blob("experts", HELD_BYTES_MAX))
