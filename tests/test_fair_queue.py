"""Whose turn it is: nobody's many requests keep another's only one waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.batching import Batcher
from scheduler.fair_queue import FairQueue
from scheduler.requests import QueuedEffect, Request
from scheduler.sampling import SamplingParams


def queue_of(*requests: str) -> FairQueue[str]:
    """Each named for its client and a number."""
    queue: FairQueue[str] = FairQueue()
    for request in requests:
        queue.put(request, request[0])
    return queue


def test_the_many_of_one_do_not_keep_the_one_of_another_waiting() -> None:
    queue = queue_of("m0", "m1", "m2", "m3", "f0", "n0")
    assert queue.order() == ["m0", "f0", "n0", "m1", "m2", "m3"]
    assert queue.take() == "m0"
    queue.put("f1", "f")
    assert queue.order() == ["f0", "n0", "m1", "f1", "m2", "m3"]
    queue.drop("m0")
    assert queue.order()[0] == "f0", "nobody's place grows since another's request has ended"


def test_a_client_is_forgotten_with_its_last_request() -> None:
    queue = queue_of("m0", "m1")
    queue.take()
    assert queue.of("m") == 2
    for request in ("m0", "m1", "m1"):
        queue.drop(request)
    assert (queue.of("m"), len(queue)) == (0, 0)
    queue.put("m2", "m")
    queue.put("n0", "n")
    assert queue.order() == ["m2", "n0"]


@given(st.lists(st.tuples(st.sampled_from(["put", "take", "drop"]), st.sampled_from("abc")), max_size=40))
def test_nobody_waits_behind_two_of_anothers(steps: list[tuple[str, str]]) -> None:
    """A client that has nothing here and asks one thing waits behind one request of each other client, at most."""
    queue: FairQueue[str] = FairQueue()
    served: list[str] = []
    for number, (step, client) in enumerate(steps):
        if step == "put":
            queue.put(f"{client}{number}", client)
        elif step == "take" and queue:
            served.append(queue.take())
        elif step == "drop" and served:
            queue.drop(served.pop(0))
        before = [request for request in queue.order() if request[0] == client]
        assert before == sorted(before, key=lambda request: int(request[1:])), "one's own are served as they came"
    queue.put("new", "new")
    ahead = [request[0] for request in queue.order()[: queue.order().index("new")]]
    assert len(ahead) == len(set(ahead))


class Letters:
    """A vocabulary whose tokens never end."""

    n_tokens = 10

    def piece(self, token: int) -> bytes:
        return b"x"

    def is_end(self, token: int) -> bool:
        return False


def request(name: str, client: str) -> Request:
    return Request(name, (1,), SamplingParams(), 4, client=client)


def test_the_leader_gives_slots_in_that_order() -> None:
    batcher = Batcher(1, 64, 8, 8, Letters())  # type: ignore[arg-type]
    for name in ("m0", "m1", "m2"):
        batcher.submit(request(name, "many"), 0.0)
    told = batcher.submit(request("f0", "few"), 0.0)
    assert QueuedEffect("f0", 1) in told
    assert {"m1": 2, "m2": 3}.items() <= {n: batcher.queue_position(n) for n in ("m1", "m2")}.items()
    assert QueuedEffect("f0", 0) in batcher.cancel("m0", "done", 1.0)
