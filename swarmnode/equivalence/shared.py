"""A model's experts on two machines: those that a peer holds are computed there, the others here.

Which experts the peer holds, and that they are this model's, is settled before anything is computed: the peer names
each layer by a digest of its experts' hashes and its program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.experts import F32, I32, ExpertBackend
from backends.manifest import Manifest
from capabilities.errors import NotReady, UnsupportedModel
from swarmnode import limits
from swarmnode.comparing import messages
from swarmnode.equivalence.peers import RemotePeer

ASK_BYTES_MAX: Final = 640 << 10
"""Of one question: with a third more in base64 it fits the control socket's longest line, with room for its header."""


@dataclass(eq=False)
class Share:
    """What a peer computes of a model. held: layer -> which experts, bool [n_expert]. rows, rows_all: counted as it
    goes, those of the peer and all."""

    peer: RemotePeer
    model: str
    held: Mapping[int, NDArray[np.bool_]]
    experts_all: int
    rows: int = 0
    rows_all: int = 0

    @property
    def experts(self) -> int:
        return sum(int(layer.sum()) for layer in self.held.values())

    def holds(self, layer: int, expert: int) -> bool:
        held = self.held.get(layer)
        return held is not None and bool(held[expert])

    def figures(self) -> dict[str, Any]:
        """For the report."""
        return {
            "peer": self.peer.row.name,
            "peer_id": self.peer.row.peer_id,
            "held": self.experts,
            "of": self.experts_all,
            "rows": self.rows,
            "rows_of": self.rows_all,
        }


def share_of(peer: RemotePeer, manifest: Manifest) -> Share:
    """What the peer holds of this model.

    Raises:
        NotReady: it holds nothing.
        UnsupportedModel: it holds experts of another model.
    """
    name, said = peer.row.name, peer.held()
    held = {}
    for number in said.experts.layers:
        layer = manifest.by_layer.get(number)
        if layer is None or said.layers.get(number) != messages.layer_digest(manifest, layer):
            raise UnsupportedModel(
                f"{name} holds experts of another model than this file's",
                hint="Name the file of the model that the swarm serves with --model.",
            )
        experts = said.experts.experts_of(number)
        if experts[-1] >= layer.n_expert:
            raise UnsupportedModel(f"{name} claims expert {experts[-1]} of {layer.n_expert} in layer {number}")
        held[number] = np.isin(np.arange(layer.n_expert), experts)
    if not held:
        raise NotReady(f"{name} holds no experts now", hint="It holds some once a placement gives it some.")
    return Share(peer, said.experts.model, held, sum(layer.n_expert for layer in manifest.layers))


@dataclass(eq=False)
class SharedExperts:
    """What LocalExperts needs of a backend: the peer's rows from there, the others from `rest`."""

    share: Share
    manifest: Manifest
    rest: ExpertBackend
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.share.peer.row.name

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        """See ExpertBackend.compute.

        Raises:
            SwarmError: the peer refuses, or cannot be reached any more.
        """
        share, n_out = self.share, self.manifest.experts_of(layer).n_out
        held = share.held.get(layer)
        there = np.zeros(len(experts), np.bool_) if held is None else held[experts]
        share.rows += int(there.sum())
        share.rows_all += len(experts)
        out = np.empty((len(experts), n_out), np.float32)
        here = np.flatnonzero(~there)
        if len(here):
            out[here] = self.rest.compute(layer, x, tokens[here], experts[here], ask_f32=ask_f32)
        for part in self._parts(np.flatnonzero(there), x.shape[1], n_out):
            out[part] = self._ask(layer, x, tokens[part], experts[part], n_out)
        return out

    @staticmethod
    def _parts(rows: NDArray[np.intp], n_in: int, n_out: int) -> Sequence[NDArray[np.intp]]:
        """Rows in pieces of which question and answer fit, even if each row has a token of its own."""
        answer = limits.COMPARE_PAYLOAD_BYTES_MAX // (4 * n_out)
        size = max(1, min(limits.COMPARE_ROWS_MAX, ASK_BYTES_MAX // (4 * n_in + 4), answer))
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _ask(self, layer: int, x: F32, tokens: I32, experts: I32, n_out: int) -> F32:
        used, places = np.unique(tokens, return_inverse=True)
        peer = self.share.peer
        header = messages.rows(peer.row.peer_id, self.share.model, layer, len(used), len(experts))
        payload = messages.rows_payload(x[used], places.astype(np.int32), experts)
        return messages.decode_rows_answer(peer.ask(peer.row.peer_id, header, payload), len(experts), n_out)
