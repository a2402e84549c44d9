"""Which version of the backbone acts for this peer, and how the next one comes to act.

The owner's next version is stored (in the vote file), confirmed with a signed word, and told to everybody concerned;
words are collected, and with majorities of both versions the next one acts. A peer that missed all this is convinced by
the proof alone. The words may come in any order, twice, or from the past: each is checked by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from capabilities.backbone import BackboneSet, Enactment, Sign, Stored, Verify, VerifyOwner
from capabilities.errors import PeerMistake, UsageError
from scheduler.election_messages import BackboneUpdate, Message
from scheduler.election_state import HardState
from scheduler.election_times import SHARE_S


@dataclass(frozen=True, slots=True)
class Keys:
    """Signing by this peer's key, checking other peers' signatures and the owner's."""

    sign: Sign
    verify: Verify
    verify_owner: VerifyOwner


@dataclass(slots=True)
class BackboneLedger:
    """See the module. `enactment` and `pending` are hard state; `words` are collected anew after a start."""

    peer: str
    swarm: str
    vote_file: bytes
    keys: Keys
    enactment: Enactment | None
    pending: BackboneSet | None
    words: dict[str, Stored] = field(default_factory=dict)
    _concerned: tuple[str, ...] | None = None
    _share_due: float = 0.0
    _told: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, peer: str, state: HardState, keys: Keys) -> BackboneLedger:
        return cls(peer, state.swarm, state.vote_file, keys, state.enactment, state.pending)

    @property
    def acting(self) -> BackboneSet | None:
        """The version that acts, None before any is known."""
        return None if self.enactment is None else self.enactment.current

    @property
    def version(self) -> int:
        return 0 if self.enactment is None else self.enactment.current.version

    @property
    def seated(self) -> bool:
        """Whether this peer may vote: a member of the acting version with the vote file that it has."""
        return self.acting is not None and self.acting.seats(self.peer, self.vote_file)

    def concerned(self) -> tuple[str, ...]:
        """Members of the acting, the previous and the pending version, but this peer; sorted."""
        if self._concerned is None:
            previous = None if self.enactment is None else self.enactment.previous
            known = [backbone for backbone in (self.acting, self.pending, previous) if backbone is not None]
            self._concerned = tuple(sorted({peer for backbone in known for peer in backbone.peers} - {self.peer}))
        return self._concerned

    # -- telling others -----------------------------------------------------------------------------------------

    def update(self) -> BackboneUpdate:
        """All that this peer knows."""
        return BackboneUpdate(self.enactment, self.pending, tuple(self.words[peer] for peer in sorted(self.words)))

    def tell_all(self, time: float) -> list[tuple[str, Message]]:
        """Everybody concerned: another version acts."""
        self._told = dict.fromkeys(self.concerned(), time)
        return [(peer, self.update()) for peer in self.concerned()]

    def share(self, time: float) -> list[tuple[str, Message]]:
        """A version that does not act yet, to those who have not said that they stored it; now and every SHARE_S."""
        if self.pending is None or self.acting is None or time < self._share_due:
            return []
        self._share_due = time + SHARE_S
        unaware = {*self.acting.peers, *self.pending.peers} - {self.peer, *self.words}
        return [(peer, self.update()) for peer in sorted(unaware)]

    def answer(self, peer: str, version: int, time: float) -> list[tuple[str, Message]]:
        """A peer said which version acts for it: tell one that is behind, and one that is ahead, so that it tells."""
        return self._tell(peer, time) if version != self.version else []

    def explain(self, peer: str, term: int, time: float) -> list[tuple[str, Message]]:
        """To a peer for which `term` matters, which the enactment rules out: the enactment."""
        return self._tell(peer, time) if self.enactment is not None and 0 < term <= self.enactment.floor else []

    def _tell(self, peer: str, time: float) -> list[tuple[str, Message]]:
        """At most every SHARE_S for each peer concerned, and for all strangers together: a member that was removed, or
        a new one, may not know the peers that it should."""
        turn = peer if peer in self.concerned() else ""
        if time - self._told.get(turn, -SHARE_S) < SHARE_S:
            return []
        self._told[turn] = time
        return [(peer, self.update())]

    # -- learning -----------------------------------------------------------------------------------------------

    def propose(self, backbone: BackboneSet, floor: int) -> None:
        """Store the owner's next version.

        Raises:
            PeerMistake: the owner did not sign it.
            UsageError: it does not follow the version that acts, or another one is pending.
        """
        backbone.verify(self.swarm, self.keys.verify_owner)
        if self.pending is not None and self.pending != backbone:
            raise UsageError(f"backbone version {self.pending.version} does not act yet; it cannot be replaced")
        if self.acting is None:
            if backbone.version != 1:
                raise UsageError(f"this node does not know the backbone before version {backbone.version}")
            self._enact(Enactment.of_first(backbone))
        elif backbone != self.acting and not self._store(backbone, floor):
            raise UsageError(f"backbone version {backbone.version} does not follow version {self.version}, which acts")

    def learn(self, update: BackboneUpdate, floor: int) -> None:
        """Take in what another peer knows. What is old or does not fit is passed over.

        Raises:
            PeerMistake: a proof or a signature in it is false.
        """
        proof, known = update.enactment, self.enactment
        if proof is not None and update.version > self.version:
            proof.verify(self.swarm, self.keys.verify, self.keys.verify_owner)
            self._enact(proof)
        elif proof is not None and known is not None and update.version == self.version and proof.floor > known.floor:
            proof.verify(self.swarm, self.keys.verify, self.keys.verify_owner)
            self.enactment = proof  # of the same version, by words that know of more terms
        if update.pending is not None and self.pending is None and update.pending.version == self.version + 1:
            update.pending.verify(self.swarm, self.keys.verify_owner)
            self._store(update.pending, floor)
        for word in update.words:
            self._hear(word)
        self._enact_if_stored()

    def _store(self, backbone: BackboneSet, floor: int) -> bool:
        """Keep the set that follows the acting one, and give the word for it. False if it does not follow."""
        assert self.acting is not None
        if backbone == self.pending:
            return True
        try:
            backbone.check_follows(self.acting)
        except PeerMistake:
            return False
        self.pending, self._concerned, self._share_due = backbone, None, 0.0
        self.confirm(floor)
        self._enact_if_stored()
        return True

    def confirm(self, floor: int) -> None:
        """Give this peer's own word that the pending version is stored, if it has a seat in either version.

        The word may be given again with a later floor; a peer that lost its votes gives none.
        """
        if self.pending is None or self.enactment is None:
            return
        if self.seated or self.pending.seats(self.peer, self.vote_file):
            floor = max(floor, self.enactment.floor)
            self.words[self.peer] = Stored.make(self.pending, self.peer, floor, self.keys.sign)

    def _hear(self, word: Stored) -> None:
        pending, acting = self.pending, self.acting
        if pending is None or acting is None or word.digest != pending.digest or word.peer in self.words:
            return
        if word.peer == self.peer or (word.peer not in pending.peers and word.peer not in acting.peers):
            return
        word.verify(pending, self.keys.verify)
        self.words[word.peer] = word

    def _enact_if_stored(self) -> None:
        if self.pending is not None and self.acting is not None:
            enactment = Enactment.of(self.acting, self.pending, self.words)
            if enactment is not None:
                self._enact(enactment)

    def _enact(self, enactment: Enactment) -> None:
        self.enactment, self._concerned = enactment, None
        if self.pending is not None and self.pending.version <= self.version:
            self.pending = None
        self.words.clear()
