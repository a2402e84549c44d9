"""What this node knows of the swarm that it belongs to: one value, changed by functions without side effects.

A record comes into being by founding a swarm or by being admitted to one, and then hears *news*: the owner's rotations,
bans and releases, and proofs of which backbone acts. News may come from anybody, in any order, twice, or from the
past; each carries its own proof, and what is older than the record's changes nothing. store.py keeps the record on
disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from capabilities.backbone import ENACTMENT_BYTES_MAX, BackboneSet, Enactment
from capabilities.errors import PeerMistake, UsageError
from capabilities.membership_certificate import MEMBERSHIP_BYTES_MAX, MembershipCertificate
from capabilities.packing import Fields, OtherFormat, check_not_newer, decode, pack
from scheduler.election_state import DamagedState, NewerState, seal, unseal
from swarmnode import limits
from swarmnode.identity import verify
from swarmnode.swarm.bans import BANS_BYTES_MAX, Ban, BanList
from swarmnode.swarm.blobs import join_blobs, split_blobs
from swarmnode.swarm.ownership import CHAIN_BYTES_MAX, OwnerChain, Rotation
from swarmnode.swarm.releases import RELEASES_BYTES_MAX, Release, ReleaseList

PSK_BYTES: Final = 32
NAME_CHARS_MAX: Final = 63
FORMER_MAX: Final = 64
"""Peers that once were in the backbone and whose word for members still counts (until they are banned)."""

NEWS_BYTES_MAX: Final = ENACTMENT_BYTES_MAX + 1
NEWS_MAX: Final = limits.BANS_MAX + limits.RELEASES_MAX + limits.ROTATIONS_MAX + 1

RECORD_BYTES_MAX: Final = CHAIN_BYTES_MAX + BANS_BYTES_MAX + RELEASES_BYTES_MAX + 32 * 1024
_BLOB_BYTES_MAX: Final = max(CHAIN_BYTES_MAX, BANS_BYTES_MAX)
_FORMAT: Final = 1
_FORMAT_RELEASES: Final = 2  # of a record with releases; one without is written as versions before them read it
_BAN, _ROTATION, _BACKBONE, _RELEASE = b"b", b"r", b"k", b"l"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ADDRESS = re.compile(r"/[!-~]{1,200}/p2p/[1-9A-HJ-NP-Za-km-z]{1,64}")


def is_name(text: str) -> bool:
    """Whether a swarm may be called that."""
    return bool(_NAME.fullmatch(text))


def check_name(name: str) -> str:
    """UsageError unless a swarm may be called that."""
    if not is_name(name):
        raise UsageError(f"a swarm's name has 1 to {NAME_CHARS_MAX} letters, digits, dots, dashes or underscores")
    return name


def is_address(text: str) -> bool:
    """Whether this may be an address with a peer id. Whether it can be dialed is for the network to say."""
    return len(text) <= limits.ADDRESS_CHARS_MAX and bool(_ADDRESS.fullmatch(text))


def peer_of(address: str) -> str:
    """The peer id that an address ends in."""
    return address.rpartition("/p2p/")[2]


@dataclass(frozen=True)
class SwarmRecord:
    """A swarm, and this node's place in it. The repr leaves the network key out."""

    name: str
    psk: bytes = field(repr=False)
    chain: OwnerChain
    enactment: Enactment
    """Proof of the newest backbone that acts, as far as this node knows."""
    certificate: MembershipCertificate
    """This node's own."""
    addresses: tuple[str, ...] = ()
    """Where to look for the swarm, best first, each with its peer id."""
    bans: BanList = field(default_factory=BanList)
    former: tuple[str, ...] = ()
    releases: ReleaseList = field(default_factory=ReleaseList)

    @property
    def swarm(self) -> str:
        """The swarm's id."""
        return self.certificate.swarm

    @property
    def peer(self) -> str:
        """This node's own peer id."""
        return self.certificate.peer

    @property
    def backbone(self) -> BackboneSet:
        """The newest backbone set that acts."""
        return self.enactment.current

    @property
    def issuers(self) -> frozenset[str]:
        """The peers whose membership certificates count: all that this node ever knew in the backbone, but banned ones.

        Removal alone does not take the word back, or members that sleep meanwhile would lose their place; a ban does.
        """
        return frozenset(peer for peer in (*self.backbone.peers, *self.former) if not self.bans.is_banned(peer))

    @property
    def needs_renewal(self) -> bool:
        """Whether this node should have its certificate renewed: its issuer has left the backbone."""
        return self.certificate.issuer not in self.backbone.peers

    def verify_member(self, peer: str, certificate: MembershipCertificate, *, now_s: int | None = None) -> None:
        """PeerMistake unless `peer` (its identity proven) is a member, and not banned."""
        if self.bans.is_banned(peer):
            raise PeerMistake(f"{peer} is banned from the swarm")
        certificate.verify(self.swarm, peer, self.issuers, verify, now_s=now_s)

    @classmethod
    def from_news(
        cls, name: str, psk: bytes, first: OwnerChain, certificate: MembershipCertificate, news: Iterable[bytes]
    ) -> SwarmRecord:
        """A newcomer's first record, from what `news()` of a member gave. `first` is the owner's key before rotations.

        Raises:
            PeerMistake: something in it is false, or there is no backbone in it.
        """
        chain, enactment, others = first, None, []
        for each in news:
            if each[:1] == _ROTATION:
                chain = chain.followed_by(Rotation.from_bytes(each[1:]))
            elif each[:1] == _BACKBONE:
                enactment = Enactment.from_bytes(each[1:])
            else:
                others.append(each)
        if enactment is None:
            raise PeerMistake("an admission without a backbone")
        enactment.verify(chain.swarm, verify, chain.verify)
        record, _ = cls(name, psk, chain, enactment, certificate).hear_all(others)
        return record.renewed(certificate)

    # -- news ---------------------------------------------------------------------------------------------------

    def hear(self, news: bytes) -> SwarmRecord:
        """The record after a piece of news; the same object if nothing is new.

        Raises:
            PeerMistake: it is no news of this swarm, or its proof is false. A proof by an owner key whose rotation has
                not been heard yet counts as false; the news comes again.
        """
        match parse_news(news):
            case Ban() as ban:
                return self._hear_ban(ban)
            case Release() as release:
                return self._hear_release(release)
            case Enactment() as enactment:
                return self._hear_backbone(enactment)
            case rotation:
                chain = self.chain.followed_by(rotation)
                return self if chain is self.chain else replace(self, chain=chain)

    def hear_all(self, news: Iterable[bytes]) -> tuple[SwarmRecord, tuple[bytes, ...]]:
        """The record after all of it, and which of it was new. PeerMistake as `hear`."""
        record, new = self, []
        for each in news:
            before, record = record, record.hear(each)
            if record is not before:
                new.append(each)
        return record, tuple(new)

    def news(self) -> tuple[bytes, ...]:
        """All that this node can tell another one, in the order in which it can be checked.

        Bans and releases that only a former owner key signed are left out: nobody could check them. They go on to count
        here.
        """
        return (
            *(_ROTATION + rotation.to_bytes() for rotation in self.chain.rotations),
            backbone_news(self.enactment),
            *(ban_news(ban) for ban in self.bans if self.chain.verify(ban.payload(), ban.signature)),
            *(release_news(each) for each in self.releases if self.chain.verify(each.payload(), each.signature)),
        )

    def _hear_ban(self, ban: Ban) -> SwarmRecord:
        if not self.bans.is_news(ban):
            return self
        ban.verify(self.swarm, self.chain.verify)
        return replace(self, bans=self.bans.with_(ban))

    def _hear_release(self, release: Release) -> SwarmRecord:
        if not self.releases.is_news(release, self.chain.verify):
            return self
        release.verify(self.swarm, self.chain.verify)
        return replace(self, releases=self.releases.with_(release))

    def _hear_backbone(self, enactment: Enactment) -> SwarmRecord:
        if enactment.current.version <= self.backbone.version:
            return self
        enactment.verify(self.swarm, verify, self.chain.verify)
        left = [peer for peer in (*self.backbone.peers, *self.former) if peer not in enactment.current.peers]
        return replace(self, enactment=enactment, former=tuple(dict.fromkeys(left))[:FORMER_MAX])

    # -- the rest of its life -----------------------------------------------------------------------------------

    def renewed(self, certificate: MembershipCertificate) -> SwarmRecord:
        """With another certificate for this node. PeerMistake if it makes this node no member."""
        self.verify_member(self.peer, certificate)
        return replace(self, certificate=certificate)

    def with_addresses(self, addresses: Iterable[str]) -> SwarmRecord:
        """With these first, less what is no address, banned or this node's own; the same object if nothing changes."""
        kept: list[str] = []
        for address in dict.fromkeys((*addresses, *self.addresses)):
            peer = peer_of(address)
            if not is_address(address) or peer == self.peer or self.bans.is_banned(peer):
                continue
            if sum(peer_of(other) == peer for other in kept) < limits.SWARM_ADDRESSES_PER_PEER_MAX:
                kept.append(address)
        found = tuple(kept[: limits.SWARM_ADDRESSES_MAX])
        return self if found == self.addresses else replace(self, addresses=found)

    # -- as a file ----------------------------------------------------------------------------------------------

    def to_file(self) -> bytes:
        """What to keep, with a checksum."""
        return seal(self.to_bytes())

    @classmethod
    def from_file(cls, data: bytes) -> SwarmRecord:
        """What `to_file` gave. DamagedState if it is not that."""
        try:
            return decode(unseal(data), "swarm record", RECORD_BYTES_MAX, cls._read)
        except OtherFormat as other:
            raise NewerState(other.message) from None
        except PeerMistake as mistake:
            raise DamagedState(mistake.message) from None

    def to_bytes(self) -> bytes:
        return pack(
            (
                _FORMAT_RELEASES if self.releases else _FORMAT,
                self.name.encode(),
                self.psk,
                self.chain.to_bytes(),
                self.enactment.to_bytes(),
                self.certificate.to_bytes(),
                join_blobs(address.encode() for address in self.addresses),
                self.bans.to_bytes(),
                tuple(self.former),
                *((self.releases.to_bytes(),) if self.releases else ()),
            )
        )

    @classmethod
    def _read(cls, value: object) -> SwarmRecord:
        check_not_newer(value, _FORMAT_RELEASES, "swarm record")
        with_releases = isinstance(value, tuple) and value[:1] == (_FORMAT_RELEASES,)
        fields = Fields(value, 10 if with_releases else 9, "swarm record")
        fields.format(_FORMAT_RELEASES if with_releases else _FORMAT)
        name = fields.blob("name", NAME_CHARS_MAX, 1).decode("ascii", "replace")
        psk = fields.blob("network key", PSK_BYTES, PSK_BYTES)
        chain = OwnerChain.from_bytes(fields.blob("owner keys", CHAIN_BYTES_MAX))
        enactment = Enactment.from_bytes(fields.blob("backbone", ENACTMENT_BYTES_MAX))
        certificate = MembershipCertificate.from_bytes(fields.blob("certificate", MEMBERSHIP_BYTES_MAX))
        blobs = split_blobs(fields.blob("addresses", _BLOB_BYTES_MAX), "addresses", limits.SWARM_ADDRESSES_MAX)
        addresses = tuple(blob.decode("ascii", "replace") for blob in blobs)
        bans = BanList.from_bytes(fields.blob("bans", BANS_BYTES_MAX))
        former = fields.array("former", FORMER_MAX)
        releases = ReleaseList()
        if with_releases:
            releases = ReleaseList.from_bytes(fields.blob("releases", RELEASES_BYTES_MAX, 1))
        if not is_name(name) or not all(map(is_address, addresses)):
            raise PeerMistake("swarm record: a name or an address is none")
        if {chain.swarm, enactment.current.swarm} != {certificate.swarm}:
            raise PeerMistake("swarm record: its parts are of different swarms")
        return cls(name, psk, chain, enactment, certificate, addresses, bans, tuple(map(str, former)), releases)


def parse_news(news: bytes) -> Ban | Enactment | Rotation | Release:
    """What a piece of news says, its proof not looked at. PeerMistake if it is none."""
    kind, body = news[:1], news[1:]
    if kind == _BAN:
        return Ban.from_bytes(body)
    if kind == _BACKBONE:
        return Enactment.from_bytes(body)
    if kind == _ROTATION:
        return Rotation.from_bytes(body)
    if kind == _RELEASE:
        return Release.from_bytes(body)
    raise PeerMistake(f"news of kind {kind!r}")


def ban_news(ban: Ban) -> bytes:
    """A ban as a piece of news."""
    return _BAN + ban.to_bytes()


def release_news(release: Release) -> bytes:
    """A release as a piece of news."""
    return _RELEASE + release.to_bytes()


def rotation_news(rotation: Rotation) -> bytes:
    """A rotation as a piece of news."""
    return _ROTATION + rotation.to_bytes()


def backbone_news(enactment: Enactment) -> bytes:
    """The proof of an acting backbone as a piece of news."""
    return _BACKBONE + enactment.to_bytes()
