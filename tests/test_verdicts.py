"""Verdicts of a leader reach every member by gossip and by asking, last over restarts, and pass to the next leader."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from capabilities.certificates import Mandate
from capabilities.errors import UsageError
from capabilities.verdict import Evidence
from swarmnode.explaining import Known, explain, find_peer
from swarmnode.identity import Identity
from swarmnode.net import gossip
from swarmnode.net.memory import open_memory_hub
from swarmnode.swarm.record import release_news
from swarmnode.swarm.releases import Release
from swarmnode.swarm.verdicts import Verdicts, topic_of
from tests.net_tools import eventually
from tests.swarm_members import Founder, quick_keys
from tests.swarm_nodes import SwarmNode, connect_all, make_node, memory_swarm
from tests.test_verdict_book import mandate_of, signed

BAD = [Evidence("audit", "wrong rows", 1, 4, "q4_K", 0.4, 0.9, 0.02)]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_keys():
        yield


def board_of(node: SwarmNode, mandate: Callable[[], Mandate | None] = lambda: None) -> Verdicts:
    return Verdicts(node.store, node.identity, mandate, wall_s=lambda: 1_700_000_000)


@asynccontextmanager
async def running(*pairs: tuple[SwarmNode, Verdicts]) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for node, board in pairs:
            await nursery.start(board.run, node.network, node.swarm.gossip)
        yield
        nursery.cancel_scope.cancel()


def release(founder: Founder, peer: str) -> bytes:
    record = founder.record
    number = record.releases.number_of(peer) + 1
    return release_news(Release.make(record.swarm, peer, number, 5, founder.key.sign))


async def test_a_verdict_reaches_all_and_a_release_takes_it_back(tmp_path: Path) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 3) as (founder, nodes):
        first, second, third = nodes
        leading = board_of(first, lambda: mandate_of(founder, 4))
        others = [board_of(second), board_of(third)]
        told: list[str] = []
        async with running((first, leading), (second, others[0])):
            with others[0].on_change(told.append):
                await connect_all([first, second])
                subject = third.peer
                leading.publish(subject, "fit", [], 10, 0)
                leading.publish(subject, "quarantined", BAD, 10, 6)
                await eventually(lambda: _fitness(others[0], subject) == "quarantined")
                found = others[0].verdict_of(subject)
                assert found == leading.verdict_of(subject)
                assert found is not None
                assert (found.order, found.audits_differed, found.evidence[0].at_s) == ((4, 2), 6, 1_700_000_000)

                async with running((third, others[1])):  # who was away asks
                    await third.network.connect(second.network.addresses[0])
                    await eventually(lambda: _fitness(others[1], subject) == "quarantined")

                    news = release(founder, subject)
                    first.store.hear([news])
                    first.swarm.spread([news])
                    await eventually(lambda: all(board.verdict_of(subject) is None for board in (leading, *others)))
                    assert [board.released(subject) for board in (leading, *others)] == [1, 1, 1]
                    await eventually(lambda: told[-1:] == [subject] and len(told) >= 2)

                    leading.publish(subject, "quarantined", BAD, 0, 6)  # after the release it counts again
                    await eventually(lambda: _fitness(others[1], subject) == "quarantined")
                    assert not leading.statistics().ignored.keys() - {"known", "older"}


async def test_what_is_not_true_is_counted_and_passed_on_to_nobody(tmp_path: Path) -> None:
    async with open_memory_hub() as hub, memory_swarm(hub, tmp_path, 2) as (founder, (first, second)):
        hearing, subject = board_of(second), Identity.generate().peer_id
        async with running((second, hearing)):
            await first.swarm.gossip.subscribe(topic_of(founder.record.swarm), lambda *_: _ignore(), bytes_max=9_999)
            await connect_all([first, second])
            await eventually(lambda: bool(second.swarm.gossip.neighbours()))
            true = signed(founder, subject, 5, 2)
            junk = {
                "forged": replace(true, verdict=replace(true.verdict, fitness="fit", sequence=3)).to_bytes(),
                "malformed": b"no verdict",
                "older": signed(founder, subject, 4, 9).to_bytes(),
                "known": true.to_bytes(),
            }
            first.swarm.gossip.publish(topic_of(founder.record.swarm), b"\1" + true.to_bytes())
            await eventually(lambda: _fitness(hearing, subject) == "quarantined")
            for each in ("forged", "malformed", "older"):
                first.swarm.gossip.publish(topic_of(founder.record.swarm), b"\1" + junk[each])
            await eventually(lambda: len(hearing.statistics().ignored) == 3)
            assert hearing.take([junk["known"], junk["older"], junk["malformed"]]) == ()
            found = hearing.verdict_of(subject)
            assert found == true.verdict


@asynccontextmanager
async def alone(founder: Founder, folder: Path) -> AsyncIterator[SwarmNode]:
    """The founder's node, started anew each time."""
    async with open_memory_hub() as hub, trio.open_nursery() as nursery:
        node = make_node(founder, folder, hub.join(founder.identity.peer_id), founder.identity)
        await nursery.start(node.run)
        yield node
        nursery.cancel_scope.cancel()


async def test_the_next_leader_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    founder = Founder.make(tmp_path / "founder")
    subject, other = Identity.generate().peer_id, Identity.generate().peer_id
    async with alone(founder, tmp_path) as node:
        before = board_of(node, lambda: mandate_of(founder, 2))
        async with running((node, before)):
            before.publish(other, "unfit", BAD, 3, 0)
            before.publish(subject, "quarantined", BAD, 17, 6)
            await eventually(node.store.files.verdicts.exists)
    kept, terms = founder.store.files.verdicts.read_bytes(), [0]
    async with alone(founder, tmp_path) as node:
        after = board_of(node, lambda: mandate_of(founder, terms[0]) if terms[0] else None)
        async with running((node, after)):
            found = after.verdict_of(subject)
            assert found is not None
            assert (found.order, found.audits_agreed, found.audits_differed) == ((2, 2), 17, 6)
            after.publish(subject, "fit", [], 0, 0)  # it does not lead
            assert after.verdict_of(subject) == found
            terms[0] = 3
            await eventually(lambda: {_term(after, subject), _term(after, other)} == {3})
            assert after.verdict_of(subject) == replace(found, term=3, sequence=1)
            await eventually(lambda: founder.store.files.verdicts.read_bytes() != kept)


# -- swarmctl peer -----------------------------------------------------------------------------------------------------


def _status(**rows: str) -> dict[str, Any]:
    return {"leader": None, "peers": [{"peer_id": peer, "name": name, "backends": []} for peer, name in rows.items()]}


def test_a_peer_is_found_by_name_id_or_a_piece_of_it() -> None:
    status = _status(Qabcdefgh="attic", Qabcdxyzw="cellar", Q3="attic")
    assert find_peer("cellar", status) == "Qabcdxyzw"
    assert find_peer("Q3", status) == "Q3"
    assert find_peer("Qabcdx", status) == "Qabcdxyzw"
    assert find_peer("cdefgh", status) == "Qabcdefgh"
    assert find_peer("QgoneX", status, ["QgoneXYZ"]) == "QgoneXYZ"
    for unclear in ("attic", "garage", "Q"):
        with pytest.raises(UsageError):
            find_peer(unclear, status)


def test_a_peer_that_only_the_record_knows_is_explained() -> None:
    found = explain("Qgone", _status(), Known(releases=(2, 77), banned=True))
    assert (found["peer_id"], found["name"], found["banned"]) == ("Qgone", None, True)
    assert found["releases"] == {"count": 2, "last_at_s": 77}


def _fitness(board: Verdicts, peer: str) -> str | None:
    found = board.verdict_of(peer)
    return None if found is None else found.fitness


def _term(board: Verdicts, peer: str) -> int | None:
    found = board.verdict_of(peer)
    return None if found is None else found.term


def _ignore() -> Any:
    return gossip.Verdict.IGNORE
