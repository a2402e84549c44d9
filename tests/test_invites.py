"""Invites: the word that people copy, the proof of its secret, the book that counts, the addresses that go in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from capabilities.errors import NotReady, Overloaded, UsageError
from scheduler.election_state import DamagedState
from swarmnode import limits
from swarmnode.net.interface import DialFailed
from swarmnode.swarm.errors import NotAdmitted
from swarmnode.swarm.invite_book import KEPT_SECONDS, InviteBook
from swarmnode.swarm.invites import PREFIX, Invite, duration, moment, proof_fits
from swarmnode.swarm.reachability import find_reachable, scope_of

PEER = "12D3KooWBhSrGJeT5RQc6KsaYCsKu1R8R3Yk3zPpJ1CBhCsVYM2W"
NEWCOMER = "12D3KooWNewcomer" + "1" * 36
NOW_S = 1_800_000_000
INVITE = Invite(
    swarm="5a" * 32,
    name="attic",
    owner_key=bytes(range(32)),
    psk=bytes(range(32, 64)),
    issuer=PEER,
    addresses=(f"/ip4/192.0.2.7/tcp/11436/p2p/{PEER}", f"/ip6/2001:db8::7/tcp/11436/p2p/{PEER}"),
    invite_id=bytes(range(8)),
    secret=bytes(range(16)),
    issued_at_s=NOW_S,
    expires_at_s=NOW_S + 3_600,
    uses=2,
)
TOKEN = INVITE.token


# the word


def test_a_token_is_one_word_that_says_all() -> None:
    assert Invite.parse(TOKEN) == INVITE
    assert TOKEN.startswith("swn1")
    assert TOKEN.isascii()
    assert len(TOKEN) < 400
    assert INVITE.psk.hex() not in repr(INVITE)
    assert "secret" not in repr(INVITE)


def test_what_copying_brings_in_does_not_matter() -> None:
    assert Invite.parse(f"  {TOKEN[:70]}\r\n  {TOKEN[70:150]}\n\t{TOKEN[150:]}\n") == INVITE


def test_the_longest_token_fits() -> None:
    longest = replace(
        INVITE,
        name="n" * 63,
        addresses=tuple(
            f"/dns/{number}{'h' * 180}/tcp/11436/p2p/{PEER}" for number in range(limits.INVITE_ADDRESSES_MAX)
        ),
    )
    assert Invite.parse(longest.token) == longest
    assert len(longest.token) < limits.INVITE_TOKEN_CHARS_MAX


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "begins with swn1"),
        ("hello", "begins with swn1"),
        ("swn2" + TOKEN[4:], "another kind"),
        (TOKEN[:-1], "cut off"),
        (TOKEN[:100], "cut off"),
        ("swn1", "cut off"),
        ("swn1A", "cut off"),
        (TOKEN + "A", "longer than it says"),
        (TOKEN + TOKEN, "longer than it says"),
        (TOKEN[:50] + "." + TOKEN[51:], "character 51 is '.'"),
        (TOKEN[:50] + "é" + TOKEN[51:], "character 51 is 'é'"),
        (TOKEN[:50] + ("A" if TOKEN[50] != "A" else "B") + TOKEN[51:], "checksum"),
        (TOKEN[:50] + TOKEN[51] + TOKEN[50] + TOKEN[52:], "checksum"),
        ("x" * 10_000, "too many"),
    ],
)
def test_what_is_wrong_with_a_token_is_said(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        Invite.parse(text)
    assert reason in error.value.message
    assert error.value.hint


@given(at=st.integers(0, len(TOKEN) - 1), character=st.characters())
def test_no_mistyped_character_goes_unnoticed(at: int, character: str) -> None:
    mistyped = TOKEN[:at] + character + TOKEN[at + 1 :]
    if mistyped == TOKEN:
        return
    with pytest.raises(UsageError):
        Invite.parse(mistyped)


@pytest.mark.parametrize("name", ["n", "nn", "nnn"])
def test_the_last_character_has_no_second_form(name: str) -> None:
    """Where a token's bytes are no multiple of three, base64 leaves bits of it unused."""
    token = replace(INVITE, name=name).token
    for character in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_":
        if character != token[-1]:
            with pytest.raises(UsageError, match="checksum"):
                Invite.parse(token[:-1] + character)


@given(st.text(max_size=300))
def test_junk_is_no_invite(text: str) -> None:
    for each in (text, PREFIX + text):
        with pytest.raises(UsageError):
            Invite.parse(each)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "\x1b[2J"},
        {"addresses": ()},
        {"addresses": (f"no address/p2p/{PEER}",)},
        {"addresses": (f"/ip4/1.2.3.4/tcp/1\n/p2p/{PEER}",)},
        {"uses": 0},
        {"uses": 10**6},
        {"issuer": "not base58 0OIl"},
        {"expires_at_s": 2**50},
        {"secret": bytes(15)},
        {"psk": bytes(31)},
        {"addresses": INVITE.addresses * 9},
    ],
)
def test_a_token_that_somebody_forged_is_read_within_bounds(change: dict[str, object]) -> None:
    """Its checksum fits: whoever can make a token can make any."""
    with pytest.raises(UsageError, match="no valid invite"):
        Invite.parse(replace(INVITE, **change).token)  # type: ignore[arg-type]


def test_an_expired_invite_hints_at_the_clock() -> None:
    INVITE.check_time(NOW_S + 3_599)
    INVITE.check_time(NOW_S - 10**8)  # a clock that is behind is the issuer's to judge
    with pytest.raises(NotAdmitted, match="expired 3 hours ago, by this machine's clock") as error:
        INVITE.check_time(NOW_S + 4 * 3_600)
    assert "2027-01-15 12:00 (UTC)" in error.value.hint
    assert "2027-01-15 08:00" in error.value.hint
    assert error.value.details["cause"] == "expired"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 seconds"), (119, "119 seconds"), (120, "2 minutes"), (5_400, "90 minutes"), (200_000, "2 days")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert moment(10**30)


# the proof


def test_a_proof_fits_its_challenge_peers_and_invite_alone() -> None:
    challenge, proof = b"c" * 32, INVITE.prove(b"c" * 32, NEWCOMER)
    fitting = (INVITE.verifier, proof, challenge, INVITE.invite_id, NEWCOMER, PEER)
    assert proof_fits(*fitting)
    others = (b"v" * 32, b"p" * 32, b"d" * 32, b"i" * 8, PEER, NEWCOMER)
    for at, other in enumerate(others):
        changed: list[bytes | str] = list(fitting)
        changed[at] = other
        assert not proof_fits(*changed), at  # type: ignore[arg-type]
    assert not proof_fits(INVITE.verifier, proof[:-1], challenge, INVITE.invite_id, NEWCOMER, PEER)


def test_the_verifier_alone_proves_nothing() -> None:
    """Who steals the issuer's file knows the verifier, and every proof that can be made of it is wrong."""
    thief = replace(INVITE, secret=INVITE.verifier[:16])
    challenge = b"c" * 32
    assert not proof_fits(
        INVITE.verifier, thief.prove(challenge, NEWCOMER), challenge, INVITE.invite_id, NEWCOMER, PEER
    )


# the book


@pytest.fixture
def book(tmp_path: Path) -> InviteBook:
    book = InviteBook(tmp_path / "invites", INVITE.swarm)
    book.add(INVITE, NOW_S)
    return book


def redeem(book: InviteBook, newcomer: str = NEWCOMER, invite: Invite = INVITE, now_s: float = NOW_S) -> None:
    challenge = b"c" * 32
    book.redeem(invite.invite_id, newcomer, PEER, challenge, invite.prove(challenge, newcomer), clock=lambda: now_s)


def newcomer(number: int) -> str:
    return f"12D3KooW{number:044d}".replace("0", "z")


def test_uses_are_counted_and_kept(book: InviteBook, tmp_path: Path) -> None:
    redeem(book, newcomer(1))
    again = InviteBook(tmp_path / "invites", INVITE.swarm)
    redeem(again, newcomer(2))
    with pytest.raises(NotAdmitted, match="used up: it was for 2") as error:
        redeem(again, newcomer(3))
    assert error.value.details["cause"] == "used_up"
    (shown,) = InviteBook(tmp_path / "invites", INVITE.swarm).listed(NOW_S)
    assert (shown["state"], shown["used"], shown["used_by"]) == ("used_up", 2, [newcomer(1), newcomer(2)])
    assert (tmp_path / "invites").stat().st_mode & 0o777 == 0o600


def test_the_same_newcomer_may_ask_again(book: InviteBook) -> None:
    """Its answer may have been lost. It costs no use, and works after the last one."""
    for number in (1, 1, 2, 1, 2):
        redeem(book, newcomer(number))
    assert book.listed(NOW_S)[0]["used"] == 2


def test_ten_at_once_for_three_places(tmp_path: Path) -> None:
    book, invite = InviteBook(tmp_path / "invites", INVITE.swarm), replace(INVITE, uses=3)
    book.add(invite, NOW_S)
    start = threading.Barrier(10)

    def ask(number: int) -> bool:
        start.wait()
        try:
            redeem(book, newcomer(number), invite)
        except NotAdmitted:
            return False
        return True

    with ThreadPoolExecutor(10) as pool:
        admitted = list(pool.map(ask, range(1, 11)))
    assert sum(admitted) == 3
    (shown,) = InviteBook(tmp_path / "invites", INVITE.swarm).listed(NOW_S)
    assert shown["used_by"] == book.listed(NOW_S)[0]["used_by"]
    assert {newcomer(at) for at, let_in in enumerate(admitted, 1) if let_in} == set(shown["used_by"])


def test_an_end_is_an_end(book: InviteBook) -> None:
    with pytest.raises(NotAdmitted, match="expired 2 hours ago, by the inviting peer's clock"):
        redeem(book, now_s=NOW_S + 3 * 3_600)
    assert book.revoke(INVITE.invite_id, NOW_S)["state"] == "revoked"
    with pytest.raises(NotAdmitted, match="revoked"):
        redeem(book)
    with pytest.raises(UsageError, match="no invite"):
        book.revoke(bytes(8), NOW_S)


def test_revoked_also_for_who_used_it(book: InviteBook) -> None:
    redeem(book)
    book.revoke(INVITE.invite_id, NOW_S)
    with pytest.raises(NotAdmitted, match="revoked"):
        redeem(book)


def test_who_lacks_the_secret_learns_nothing(book: InviteBook) -> None:
    book.revoke(INVITE.invite_id, NOW_S)
    wrong = replace(INVITE, secret=bytes(16))
    unknown = replace(INVITE, invite_id=bytes(8))
    for invite in (wrong, unknown):
        with pytest.raises(NotAdmitted, match="does not know this invite") as error:
            redeem(book, invite=invite)
        assert error.value.details["cause"] == "unknown"
    assert book.listed(NOW_S)[0]["used"] == 0


def test_a_use_that_cannot_be_written_is_not_given(book: InviteBook, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space"):
            redeem(book)
    assert book.listed(NOW_S)[0]["used"] == 0
    redeem(book)


def test_the_book_is_bounded_and_forgets_what_ended_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INVITES_MAX", 8)
    book = InviteBook(tmp_path / "invites", INVITE.swarm)
    invites = [replace(INVITE, invite_id=number.to_bytes(8, "big")) for number in range(limits.INVITES_MAX + 1)]
    for invite in invites[:-1]:
        book.add(invite, NOW_S)
    with pytest.raises(Overloaded, match="8 invites are open"):
        book.add(invites[-1], NOW_S)
    book.revoke(invites[5].invite_id, NOW_S)
    book.add(invites[-1], NOW_S)
    listed = {each["id"] for each in book.listed(NOW_S)}
    assert invites[5].invite_id.hex() not in listed
    assert invites[-1].invite_id.hex() in listed
    late = INVITE.expires_at_s + KEPT_SECONDS
    book.add(replace(INVITE, invite_id=b"laterlat", issued_at_s=late, expires_at_s=late + 60), late)
    assert len(book.listed(late)) == 1


def test_invites_of_another_swarm_do_not_count(book: InviteBook, tmp_path: Path) -> None:
    assert InviteBook(tmp_path / "invites", "00" * 32).listed(NOW_S) == []


@given(data=st.data())
def test_a_damaged_book_is_reported(book: InviteBook, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "invites"
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(DamagedState) as error:
        InviteBook(path, INVITE.swarm)
    assert error.value.message.startswith(str(path))
    assert "Move the file away" in error.value.hint
    path.write_bytes(whole)


# addresses


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("/ip4/8.8.8.8/tcp/1", "public"),
        ("/dns/example.org/tcp/1", "public"),
        ("/ip6/2606:4700::1/tcp/1", "public"),
        ("/ip4/192.168.1.2/tcp/1", "private"),
        ("/ip4/10.0.0.1/tcp/1", "private"),
        ("/ip4/100.64.0.1/tcp/1", "private"),
        ("/ip6/fd00::1/tcp/1", "private"),
        ("/ip4/127.0.0.1/tcp/1", "local"),
        ("/ip6/::1/tcp/1", "local"),
        ("/ip4/169.254.1.1/tcp/1", "local"),
        ("/ip4/0.0.0.0/tcp/1", "local"),
        ("/ip4/nonsense/tcp/1", "local"),
        ("/ip4", "local"),
    ],
)
def test_how_far_an_address_reaches(address: str, scope: str) -> None:
    assert scope_of(f"{address}/p2p/{PEER}") == scope


class Dialer:
    def __init__(self, **faults: str) -> None:
        self.faults = {key.replace("_", "."): fault for key, fault in faults.items()}

    async def __call__(self, address: str) -> None:
        for part, fault in self.faults.items():
            if part in address:
                if fault == "silence":
                    await trio.sleep_forever()
                raise DialFailed(address, fault)


def of(*hosts: str) -> list[str]:
    return [f"/ip4/{host}/tcp/11436/p2p/{PEER}" for host in hosts]


async def test_addresses_that_answer_go_in_the_furthest_first() -> None:
    found = await find_reachable(Dialer(), of("127.0.0.1", "192.168.1.2", "8.8.8.8"))
    assert list(found.addresses) == of("8.8.8.8", "192.168.1.2")
    assert found.warnings == ()


async def test_those_that_do_not_are_named(autojump_clock: MockClock) -> None:
    started = trio.current_time()
    dial = Dialer(**{"10_0_0_1": "refused", "10_0_0_2": "silence", "10_0_0_3": "silence"})
    found = await find_reachable(dial, of("10.0.0.1", "10.0.0.2", "10.0.0.3", "192.168.1.2"))
    assert list(found.addresses) == of("192.168.1.2")
    reasons = {warned.address.split("/")[2]: warned.reason for warned in found.warnings}
    assert "refused" in reasons["10.0.0.1"]
    assert "silent for 5 s" in reasons["10.0.0.2"]
    assert "same local network" in reasons["192.168.1.2"]
    assert trio.current_time() - started == pytest.approx(limits.INVITE_DIAL_SECONDS_MAX), "all at once"


async def test_loopback_alone_is_said_to_be_so() -> None:
    found = await find_reachable(Dialer(), of("127.0.0.1"))
    assert list(found.addresses) == of("127.0.0.1")
    assert [warned.reason for warned in found.warnings] == ["reachable on this machine only"]


async def test_a_named_address_goes_in_whatever_it_answers() -> None:
    found = await find_reachable(Dialer(**{"8_8_8_8": "refused"}), of("192.168.1.2"), of("8.8.8.8"))
    assert list(found.addresses) == of("8.8.8.8", "192.168.1.2")
    assert [warned.address for warned in found.warnings] == of("8.8.8.8")


async def test_nothing_to_put_in_says_why() -> None:
    with pytest.raises(NotReady, match=r"no address of this peer answers .*refused") as error:
        await find_reachable(Dialer(**{"10_0_0_1": "refused"}), of("10.0.0.1"))
    assert "node.listen" in error.value.hint
    with pytest.raises(NotReady, match="listens on none"):
        await find_reachable(Dialer(), [])


async def test_addresses_are_few() -> None:
    many = await find_reachable(Dialer(), of(*(f"10.0.0.{number}" for number in range(1, 30))))
    assert len(many.addresses) == limits.INVITE_ADDRESSES_MAX
