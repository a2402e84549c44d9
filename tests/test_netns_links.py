"""What lies between the hosts of a bed, without hosts: delays, rates, losses, cuts, and who a packet is for."""

from __future__ import annotations

import ipaddress
import math
import struct
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.netns.links import QUEUE_BYTES_MAX, QUEUE_BYTES_MIN, Links, destination, is_multicast, opens_connection

ADDRESSES = [[f"10.77.0.{i}", f"fd77::{i}"] for i in (1, 2, 3)]
SYN, ACK = 0x02, 0x10


def tcp(flags: int) -> bytes:
    return struct.pack(">HHIIBBHHH", 1, 2, 3, 4, 5 << 4, flags, 0, 0, 0)


def packet(to: str, payload: bytes = b"", protocol: int = 17, options: int = 0) -> bytes:
    """An IP packet as far as the bridge reads it; `options` are words of 4 bytes in an IPv4 header."""
    address = ipaddress.ip_address(to)
    if address.version == 4:
        return bytes([0x45 + options, *[0] * 8, protocol, *[0] * 6, *address.packed, *[0] * 4 * options]) + payload
    return bytes([0x60, *[0] * 5, protocol, *[0] * 17, *address.packed]) + payload


@pytest.fixture
def links() -> Links:
    return Links(ADDRESSES, Random(0))


@pytest.mark.parametrize("to", ["10.77.0.2", "fd77::2"])
def test_a_packet_arrives_after_its_delay(links: Links, to: str) -> None:
    links.set(0, 1, delay_s=0.01)
    sent = packet(to)
    links.send(0, sent, 5.0)
    assert links.next_due_s() == pytest.approx(5.01)
    assert links.receive(5.009) == []
    assert links.receive(5.011) == [(1, sent)]
    assert links.next_due_s() is None
    assert links.counts == {"delivered": 1}


def test_a_rate_spaces_packets(links: Links) -> None:
    links.set(0, 1, rate_bytes_s=1000.0, delay_s=1.0)
    for _ in range(3):
        links.send(0, packet("10.77.0.2", bytes(80)), 0.0)  # 100 bytes
    assert [len(links.receive(now)) for now in (1.09, 1.11, 1.19, 1.21, 1.31)] == [0, 1, 0, 1, 1]


@pytest.mark.parametrize(("rate", "room"), [(1e3, QUEUE_BYTES_MIN), (1e6, 600_000), (math.inf, QUEUE_BYTES_MAX)])
def test_a_queue_has_an_end_and_room_again(links: Links, rate: float, room: int) -> None:
    links.set(0, 1, rate_bytes_s=rate, delay_s=0.1)
    piece = packet("10.77.0.2", bytes(room // 8 - 20))
    for now in (0.0, 1e6):
        for _ in range(10):
            links.send(0, piece, now)
        assert len(links.receive(now + 1e5)) == 8
    assert links.counts == {"full": 4, "delivered": 16}


def test_a_cut_link_loses_what_is_on_it_and_only_in_its_direction(links: Links) -> None:
    links.set(0, 1, delay_s=1.0)
    links.send(0, packet("fd77::2"), 0.0)
    links.set(0, 1, cut=True)
    links.send(0, packet("fd77::2"), 0.5)
    links.send(1, packet("fd77::1"), 0.5)
    links.send(0, packet("fd77::3"), 0.5)
    assert sorted(to for to, _ in links.receive(9.0)) == [0, 2]
    assert links.counts == {"cut": 2, "delivered": 2}
    links.set(0, 1, cut=False)
    links.send(0, packet("fd77::2"), 10.0)
    assert len(links.receive(11.0)) == 1


def test_losses_are_a_share_and_come_from_the_seed() -> None:
    def lost(seed: int) -> list[int]:
        links = Links(ADDRESSES, Random(seed))
        links.set(0, 1, loss=0.2)
        sent = []
        for i in range(1000):
            links.send(0, packet("10.77.0.2"), i)
            sent.append(len(links.receive(i)))
        assert 150 < links.counts["lost"] < 250
        return sent

    assert lost(1) == lost(1) != lost(2)


def test_multicast_goes_to_all_others_and_the_unknown_nowhere(links: Links) -> None:
    links.send(1, packet("224.0.0.251"), 0.0)
    links.send(1, packet("ff02::fb"), 0.0)
    assert sorted(to for to, _ in links.receive(0.0)) == [0, 0, 2, 2]
    for stray in (packet("10.77.0.9"), packet("10.77.0.2"), b"", b"\x45\x00", bytes(60)):
        links.send(1, stray, 0.0)
    assert links.counts["nowhere"] == 5
    assert links.receive(0.0) == []


@pytest.mark.parametrize("to", ["10.77.0.2", "fd77::2"])
def test_a_shielded_host_can_dial_and_not_be_dialed(links: Links, to: str) -> None:
    links.shield(1, True)
    links.send(0, packet(to, tcp(SYN), 6), 0.0)
    assert links.receive(0.0) == []
    assert links.counts == {"shielded": 1}
    for sent in (packet(to, tcp(SYN | ACK), 6), packet(to, tcp(ACK), 6), packet(to, tcp(SYN), 17)):
        links.send(0, sent, 0.0)
    assert len(links.receive(0.0)) == 3
    links.shield(1, False)
    links.send(0, packet(to, tcp(SYN), 6), 0.0)
    assert len(links.receive(0.0)) == 1


def test_header_options_do_not_hide_a_syn() -> None:
    assert opens_connection(packet("10.77.0.2", tcp(SYN), 6, options=3))
    assert not opens_connection(packet("10.77.0.2", tcp(ACK), 6, options=3))


def test_what_no_link_can_be_is_refused_whole(links: Links) -> None:
    for changes in ({"delay_s": -1.0}, {"loss": 1.5}, {"rate_bytes_s": 0.0}, {"cut": 1}, {"colour": 1}):
        with pytest.raises(ValueError, match="a link has no"):
            links.set(0, 1, **{"delay_s": 9.0, **changes})
    for source, to in ((0, 0), (0, 3), (-1, 0)):
        with pytest.raises(ValueError, match="no link"):
            links.set(source, to, cut=True)
    with pytest.raises(ValueError, match="no host"):
        links.shield(3, True)
    links.send(0, packet("10.77.0.2"), 0.0)
    assert links.receive(0.0)


@given(st.binary(max_size=80), st.integers(0, 2))
def test_any_bytes_are_a_packet_or_go_nowhere(data: bytes, source: int) -> None:
    links = Links(ADDRESSES, Random(0))
    links.shield(1, True)
    links.send(source, data, 0.0)
    assert all(to != source for to, _ in links.receive(0.0))
    address = destination(data)
    assert address is None or (is_multicast(address) in (True, False) and not opens_connection(data[:20]))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 1)), max_size=40))
def test_a_link_keeps_its_packets_in_order_and_loses_none(sent: list[tuple[int, int, float]]) -> None:
    links, want = Links(ADDRESSES, Random(0)), []
    for a in range(3):
        for b in range(3):
            if a != b:
                links.set(a, b, delay_s=0.1 * (a + 1), rate_bytes_s=500.0)
    now = 0.0
    for number, (source, to, later) in enumerate(sent):
        now += later
        links.send(source, packet(ADDRESSES[to][0], number.to_bytes(2, "big")), now)
        if source != to:
            want.append((source, to, number))
    got = [(to, int.from_bytes(data[20:], "big")) for to, data in links.receive(1e6)]
    origin = {number: source for source, _, number in want}
    assert sorted(number for _, number in got) == sorted(origin)
    for a in range(3):
        for b in range(3):
            on_link = [number for to, number in got if to == b and origin[number] == a]
            assert on_link == sorted(on_link)
