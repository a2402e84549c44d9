"""Peers as sides of a comparison: by name, and what they compute by way of this machine's daemon.

A peer's operators are asked for once, a weight type at a time, and kept for as long as the command runs: every pair
that it belongs to is compared by the same numbers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from backends.experts import F32
from capabilities.errors import NoDaemon, PeerMistake, SwarmError, UnsupportedModel, UsageError
from capabilities.precision import Verdict
from swarmnode.comparing import messages
from swarmnode.comparing.messages import HeldAnswer, Operators, OperatorsAnswer
from swarmnode.control_client import request
from swarmnode.equivalence.recipes import AFAR_WIDTHS, Recipe, Sizes, inputs_hash
from swarmnode.wire import Fields, Frame

PREFIX: Final = "peer:"
_SUFFIX_CHARS_MIN: Final = 4  # of a peer id: all of one kind begin alike, and shorter ends are typing errors
_LISTED_MAX: Final = 12  # peers that an error message names

Ask = Callable[[str, Mapping[str, Any], bytes], Frame]
"""(peer id, header, payload) to the peer's answer."""


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A peer as the daemon knows it. fitness: by what the leader measured of its work, None if that is not known."""

    peer_id: str
    name: str
    state: str
    numeric_class: str | None
    fitness: str | None = None
    types: Sequence[str] = ()  # of weights, that its class is of

    @property
    def is_there(self) -> bool:
        return self.state not in ("gone", "failed")


@dataclass(frozen=True)
class Swarm:
    """The swarm that this machine's daemon belongs to."""

    me: str
    peers: tuple[PeerRow, ...]
    ask: Ask

    def find(self, words: str) -> PeerRow:
        """The peer with this name, this id, or an id that ends so.

        Raises:
            UsageError: there is none, or several.
        """
        exact = [peer for peer in self.peers if words in (peer.name, peer.peer_id)]
        ends = [peer for peer in self.peers if len(words) >= _SUFFIX_CHARS_MIN and peer.peer_id.endswith(words)]
        found = exact or ends
        if len(found) == 1:
            return found[0]
        listed = ", ".join(f"{peer.name} ({peer.peer_id[-8:]})" for peer in (found or self.peers)[:_LISTED_MAX])
        if found:
            raise UsageError(f"{words} are {len(found)} peers: {listed}", hint="Name one by the end of its peer id.")
        raise UsageError(f"there is no peer {words}", hint=f"Known: {listed or 'none'}.")


def open_swarm(socket: Callable[[], Path]) -> Swarm:
    """What the daemon behind a control socket knows.

    Raises:
        NoDaemon: none runs.
        SwarmError: it belongs to no swarm.
    """
    try:
        found = request(socket(), "compare_peers", {})
    except UsageError as error:
        hint = "Peers are compared in a swarm of members: `swarmctl init` or `join`, and a daemon of this version."
        raise UsageError("this machine's daemon compares no peers", hint=hint) from error
    keys = ("peer_id", "name", "state", "numeric_class", "fitness", "types")
    rows = [PeerRow(**{key: row[key] for key in keys}) for row in found["peers"]]

    def ask(peer: str, header: Mapping[str, Any], payload: bytes) -> Frame:
        words = {"peer": peer, "header": dict(header), "payload": base64.b64encode(payload).decode()}
        answer = request(socket(), "compare", words)
        return Frame(answer["header"], base64.b64decode(answer["payload"]))

    return Swarm(found["self"], tuple(rows), ask)


def no_swarm() -> Swarm:
    """Where nobody may be asked."""
    raise NoDaemon("peers are compared by way of a daemon, and none is meant")


@dataclass(eq=False)
class RemotePeer:
    """What one peer computes, as a Target's `afar`."""

    row: PeerRow
    ask: Ask
    sizes: Sizes
    _answers: dict[str, tuple[Operators, OperatorsAnswer]] = field(default_factory=dict)
    _refused: dict[str, SwarmError] = field(default_factory=dict)
    _held: HeldAnswer | None = None

    @property
    def computes_rows(self) -> bool:
        asked, answer = self.fetch("")
        return all(answer.results[asked.recipes.index(each)] for each in asked.recipes if each.op == "softmax")

    def outputs(self, recipe: Recipe) -> list[F32]:
        """See Target.outputs. UnsupportedModel also where the peer's inputs are not this machine's."""
        asked, answer = self.fetch(recipe.type)
        at = asked.recipes.index(recipe)
        if answer.inputs[at] != inputs_hash(recipe.inputs()):
            raise UnsupportedModel(f"{self.row.name} draws other inputs: another version of NumPy")
        return answer.results[at]

    def precision(self, kind: str) -> Verdict:
        return self.fetch(kind)[1].precision

    @property
    def seconds(self) -> float:
        """Of computing, as the peer says."""
        return sum(answer.seconds for _, answer in self._answers.values())

    def held(self) -> HeldAnswer:
        """Which experts it holds. NotReady if none."""
        if self._held is None:
            self._held = messages.decode_held(self.ask(self.row.peer_id, messages.held(self.row.peer_id), b""))
        return self._held

    def fetch(self, kind: str) -> tuple[Operators, OperatorsAnswer]:
        """All operators over one weight type, or those without weights for "": asked for once.

        Raises:
            UnsupportedModel: the peer does not know the weight type.
            SwarmError: it cannot be reached, is busy, or answered what is no answer.
        """
        if kind in self._refused:
            raise self._refused[kind]
        if kind not in self._answers:
            peer = self.row.peer_id
            if kind:
                header = messages.products(peer, kind, self.sizes.lengths, self.sizes.widths)
                asked = messages.operators_of(Fields(header, "request"))
            else:
                header = messages.elements(peer, self.sizes.widths, AFAR_WIDTHS)
                asked = messages.elements_of(Fields(header, "request"))
            try:
                answer = messages.decode_operators(self.ask(peer, header, b""), asked)
            except SwarmError as error:
                if isinstance(error, PeerMistake):
                    error = PeerMistake(f"{self.row.name}: {error.message}", peer=peer)
                self._refused[kind] = error
                raise error from None
            self._answers[kind] = asked, answer
        return self._answers[kind]
