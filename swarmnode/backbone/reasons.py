"""Why nobody leads, in one line for people, from what the backbone peers say and from who does not answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from swarmnode.backbone.leadership_messages import Word
from swarmnode.printable import printable_line

_PEERS_NAMED_MAX: Final = 3
DISABLED: Final = ("this peer lost", "this peer takes no part")
"""Members that answer and cannot vote: without them said, the rest of the story makes no sense."""

MAY_NOT_LEAD: Final = "this peer may not lead"
"""How the word of a peer begins that could be elected and must not: scheduler/election_status.py."""

_LACKS_MODEL: Final = "a model to serve"
_NO_MODEL: Final = "no backbone peer holds a model: `swarmctl model add FILE` on one"


def why_nobody_leads(
    own: str, members: Sequence[str], words: Mapping[str, Word], unreached: Callable[[str], str]
) -> str:
    """`words`: what holds now, by peer, this node's own among them; `unreached` says why a peer is not connected."""
    if not any(peer in members for peer in words):
        return _nobody_answers(members, unreached)
    heard = {peer: word for peer, word in words.items() if peer in members}
    for word in heard.values():
        if word.leader and word.leader not in heard:
            why = unreached(word.leader) or "it does not answer"
            return f"{word.leader} leads, and cannot be reached from here: {why}"
    for word in heard.values():
        if word.leader:
            return f"{word.leader} is about to lead"
    if not any(word.eligible for word in heard.values()) and all(_may_not_lead(word) for word in heard.values()):
        return _nobody_may_lead(own, members, heard)
    disabled = [peer for peer in sorted(heard) if heard[peer].why.startswith(DISABLED)]
    speaker = min(heard, key=lambda peer: (peer in disabled, not heard[peer].eligible, peer != own, peer))
    disabled = [peer for peer in disabled if peer != speaker]
    return "; ".join(_said_by(peer, heard[peer], own) for peer in (speaker, *disabled))


def _nobody_may_lead(own: str, members: Sequence[str], heard: Mapping[str, Word]) -> str:
    """Of those that are here. What one of them waits for says more than that others have no model."""
    quorum = len(members) // 2 + 1
    if len(heard) < quorum:
        return f"{len(heard)} of {len(members)} backbone peers answer, and {quorum} are needed"
    waiting = [peer for peer in heard if ":" in heard[peer].why and _LACKS_MODEL not in heard[peer].why]
    if not waiting:
        return _NO_MODEL
    speaker = min(waiting, key=lambda peer: (peer != own, peer))
    return _said_by(speaker, heard[speaker], own)


def _said_by(peer: str, word: Word, own: str) -> str:
    why = printable_line(word.why) or "an election is under way"
    return why if peer == own else why.replace("this peer", f"the backbone peer {peer}")


def _may_not_lead(word: Word) -> bool:
    """Whether its sender has no other reason than that it may not lead itself."""
    return word.why.startswith(MAY_NOT_LEAD)


def _nobody_answers(members: Sequence[str], unreached: Callable[[str], str]) -> str:
    named = [f"{peer}: {unreached(peer) or 'it does not answer'}" for peer in members[:_PEERS_NAMED_MAX]]
    more = len(members) - len(named)
    return f"no backbone peer can be reached: {'; '.join(named)}" + (f"; and {more} more" if more > 0 else "")
