"""The owner's key: sealed, copied, damaged and mistyped; and the chain of keys that a swarm accepts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import PeerMistake, UsageError
from swarmnode.swarm import owner_key
from swarmnode.swarm.errors import BadOwnerKey
from swarmnode.swarm.owner_key import OwnerKey, OwnerKeyFile, SealedKey, export_key, read_key_file
from swarmnode.swarm.ownership import OwnerChain, Rotation, swarm_id, verify_signature
from tests.swarm_members import PASSPHRASE, quick_keys

SWARM = "5a" * 32
REAL_COST = owner_key.SCRYPT_LOG2_N, owner_key.SCRYPT_P


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with quick_keys():
        yield


@pytest.fixture(scope="module")
def key() -> OwnerKey:
    return OwnerKey.generate()


def unsealed(text: str, passphrase: str = PASSPHRASE) -> OwnerKey:
    return SealedKey.from_text(text, "the file").unlock(passphrase)


# the file


def test_a_key_comes_back_with_its_passphrase(key: OwnerKey) -> None:
    text = key.seal(SWARM, PASSPHRASE).to_text()
    again = unsealed(f"From: me\n\n> quoted\n{text}\n-- \nsigned")
    assert again.public == key.public
    assert verify_signature(key.public, b"data", again.sign(b"data"))


def test_the_real_parameters_work(key: OwnerKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_key, "SCRYPT_LOG2_N", REAL_COST[0])
    monkeypatch.setattr(owner_key, "SCRYPT_P", REAL_COST[1])
    sealed = key.seal(SWARM, PASSPHRASE)
    assert (sealed.log2_n, sealed.p) == (15, 3)
    assert sealed.unlock(PASSPHRASE).public == key.public


def test_the_seed_is_nowhere_to_be_seen(key: OwnerKey) -> None:
    seed = key._private.private_bytes_raw()
    assert seed not in key.seal(SWARM, PASSPHRASE).to_bytes()
    assert seed.hex() not in repr(key)


def test_a_wrong_passphrase_is_one_clear_line(key: OwnerKey) -> None:
    with pytest.raises(BadOwnerKey, match=r"^wrong passphrase for the owner's key$"):
        unsealed(key.seal(SWARM, PASSPHRASE).to_text(), "something else")


def test_a_passphrase_is_the_same_from_every_keyboard(key: OwnerKey) -> None:
    sealed = key.seal(SWARM, "caf\u00e9 au lait").to_text()
    assert unsealed(sealed, "cafe\u0301 au lait").public == key.public


@pytest.mark.parametrize("passphrase", ["", "seven77", "x" * 2_000])
def test_a_passphrase_has_bounds(key: OwnerKey, passphrase: str) -> None:
    with pytest.raises(UsageError, match=f"not {len(passphrase)}"):
        key.seal(SWARM, passphrase)


@given(at=st.integers(40, 300), character=st.sampled_from("Aa0+/=*\x00é"))
def test_damage_is_told_from_a_wrong_passphrase(key: OwnerKey, at: int, character: str) -> None:
    text = key.seal(SWARM, PASSPHRASE).to_text()
    damaged = text[:at] + character + text[at + 1 :]
    if damaged == text:
        return
    with pytest.raises(BadOwnerKey, match=r"damaged|no owner key"):
        unsealed(damaged)


@given(st.text(max_size=300))
def test_junk_is_no_key(text: str) -> None:
    for each in (text, f"{owner_key._BEGIN}{text}{owner_key._END}"):
        with pytest.raises(BadOwnerKey):
            SealedKey.from_text(each, "the file")


def test_a_file_cannot_ask_for_much_memory(key: OwnerKey) -> None:
    greedy = SealedKey(SWARM, key.public, 30, 1, bytes(16), bytes(12), bytes(48))
    with pytest.raises(BadOwnerKey, match="scrypt n is 30"):
        SealedKey.from_text(greedy.to_text(), "the file")


def test_files_are_private_and_exports_replace_nothing(key: OwnerKey, tmp_path: Path) -> None:
    file = OwnerKeyFile(tmp_path / "owner" / "a.key")
    file.save(key.seal(SWARM, PASSPHRASE))
    assert file.path.stat().st_mode & 0o777 == 0o600
    export_key(file.read(key.public), tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    assert read_key_file(tmp_path / "copy") == file.read(key.public)
    with pytest.raises(UsageError, match="exists already"):
        export_key(file.read(key.public), tmp_path / "copy")
    with pytest.raises(UsageError, match="cannot write"):
        export_key(file.read(key.public), tmp_path / "nowhere" / "copy")


def test_a_missing_or_foreign_key_says_what_to_do(key: OwnerKey, tmp_path: Path) -> None:
    file = OwnerKeyFile(tmp_path / "a.key")
    with pytest.raises(BadOwnerKey, match="there is no owner key") as missing:
        file.read(key.public)
    assert "owner import" in missing.value.hint
    file.save(OwnerKey.generate().seal(SWARM, PASSPHRASE))
    with pytest.raises(BadOwnerKey, match="is not the swarm's owner key"):
        file.read(key.public)


def test_a_rotation_that_was_interrupted_is_finished(key: OwnerKey, tmp_path: Path) -> None:
    """Two files: before the swarm has heard of the rotation the old key counts, afterwards the new one."""
    file, new = OwnerKeyFile(tmp_path / "a.key"), OwnerKey.generate()
    file.save(key.seal(SWARM, PASSPHRASE))
    file.save_next(new.seal(SWARM, PASSPHRASE))
    assert file.read(key.public).public == key.public
    assert file.read(new.public).public == new.public
    assert [path.name for path in tmp_path.iterdir()] == ["a.key"]


# the chain


def chain_of(*keys: OwnerKey, kept: dict[int, list[bytes]] | None = None) -> OwnerChain:
    chain = OwnerChain(keys[0].public, bytes(16))
    for number, (old, new) in enumerate(pairwise(keys), 1):
        hashes = [hashlib.sha256(data).digest() for data in (kept or {}).get(number, [])]
        chain = chain.followed_by(chain.rotate(new.public, hashes, old.sign))
    return chain


def test_the_swarms_id_is_its_first_keys() -> None:
    first, second = OwnerKey.generate(), OwnerKey.generate()
    chain = chain_of(first, second)
    assert chain.swarm == swarm_id(first.public, bytes(16)) == hashlib.sha256(first.public + bytes(16)).hexdigest()
    assert (chain.current, chain.keys) == (second.public, (first.public, second.public))


def test_the_newest_key_signs_and_old_ones_only_what_was_kept() -> None:
    keys = [OwnerKey.generate() for _ in range(3)]
    chain = chain_of(*keys, kept={1: [b"kept"], 2: [b"later"]})
    assert chain.verify(b"any", keys[2].sign(b"any"))
    assert chain.verify(b"kept", keys[0].sign(b"kept"))
    assert chain.verify(b"later", keys[1].sign(b"later"))
    assert chain.verify(b"later", keys[0].sign(b"later")), "kept once more, still signed by the first key"
    assert not chain.verify(b"kept", keys[1].sign(b"kept")), "it was kept as the first key's word"
    assert not any(chain.verify(b"any", key.sign(b"any")) for key in keys[:2])
    assert not chain.verify(b"any", b"short")


def test_rotations_come_in_any_order_and_twice() -> None:
    keys = [OwnerKey.generate() for _ in range(3)]
    whole = chain_of(*keys)
    first, second = whole.rotations
    chain = OwnerChain(keys[0].public, bytes(16))
    assert chain.followed_by(second) is chain, "not heard the one before"
    chain = chain.followed_by(first)
    assert chain.followed_by(first) is chain
    assert chain.followed_by(second) == whole


def test_a_rotation_needs_the_newest_key() -> None:
    keys = [OwnerKey.generate() for _ in range(3)]
    chain, thief = chain_of(*keys[:2]), OwnerKey.generate()
    with pytest.raises(PeerMistake, match="not signed"):
        chain.followed_by(chain.rotate(thief.public, [], thief.sign))
    with pytest.raises(PeerMistake, match="not signed"):
        chain.followed_by(chain.rotate(thief.public, [], keys[0].sign))
    fork = OwnerChain(keys[0].public, bytes(16)).rotate(thief.public, [], keys[0].sign)
    with pytest.raises(PeerMistake, match="another rotation 1"):
        chain.followed_by(fork)
    foreign = chain_of(*keys).rotations[1]
    with pytest.raises(PeerMistake, match="does not follow"):
        OwnerChain(keys[0].public, b"x" * 16, chain.rotations).followed_by(foreign)
    with pytest.raises(ValueError, match="no rotation"):
        chain.rotate(keys[0].public, [], keys[1].sign)


def test_a_chain_is_checked_when_it_is_read() -> None:
    keys = [OwnerKey.generate() for _ in range(3)]
    whole = chain_of(*keys, kept={1: [b"a", b"b"]})
    assert OwnerChain.from_bytes(whole.to_bytes()) == whole
    gap = OwnerChain(whole.first_key, whole.salt, whole.rotations[1:])
    with pytest.raises(PeerMistake, match="missing or out of order"):
        OwnerChain.from_bytes(gap.to_bytes())
    forged = Rotation(whole.swarm, 1, keys[0].public, keys[2].public, (), bytes(64))
    with pytest.raises(PeerMistake, match="not signed"):
        OwnerChain.from_bytes(OwnerChain(whole.first_key, whole.salt, (forged,)).to_bytes())


@given(st.binary(max_size=300))
def test_junk_is_no_rotation_and_no_chain(data: bytes) -> None:
    for read in (Rotation.from_bytes, OwnerChain.from_bytes):
        with pytest.raises(PeerMistake):
            read(data)


def test_the_longest_chain_fits() -> None:
    keys = [OwnerKey.generate() for _ in range(17)]
    kept = {number: [bytes([number, each]) for each in range(32)] for number in range(1, 17)}
    chain = chain_of(*keys, kept=kept)
    assert OwnerChain.from_bytes(chain.to_bytes()) == chain
    with pytest.raises(ValueError, match="no rotation number 17"):
        chain.rotate(OwnerKey.generate().public, [], keys[16].sign)
