"""The decisions of a fetch: who takes what, who waits, who is out, and when to give up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.shards.fetch_plan import ExpertPart, FetchPlan, Job, Source, Transfer


def jobs(count: int, size: int = 1_000) -> list[Job]:
    return [Job(bytes([index]), size, ExpertPart(0, index)) for index in range(count)]


def take(plan: FetchPlan, source: Source, now: float) -> Transfer:
    transfer = plan.take(source, now, cancel=lambda: None)
    assert transfer is not None
    return transfer


def nothing(plan: FetchPlan, source: Source, now: float) -> bool:
    return plan.take(source, now, cancel=lambda: None) is None


def test_jobs_go_out_in_order_and_come_back_to_the_front() -> None:
    plan = FetchPlan(jobs(3), "ab", 0.0)
    a, b = plan.sources
    first, second = take(plan, a, 0.0), take(plan, b, 0.0)
    assert (first.job.digest[0], second.job.digest[0]) == (0, 1)
    plan.given_back(first, 1.0)
    again = take(plan, b, 1.0)
    assert again.job.digest[0] == 0
    plan.given_back(again, 1.0, later=True)
    assert take(plan, a, 1.0).job.digest[0] == 2
    assert sorted(job.digest[0] for job in plan.open_jobs()) == [0, 1, 2]
    assert not plan.done


def test_a_failing_source_waits_twice_as_long_each_time_until_something_comes() -> None:
    plan = FetchPlan(jobs(2), "a", 0.0)
    (a,) = plan.sources
    pauses = []
    for _ in range(8):
        plan.failed(a, "reset", now=100.0)
        pauses.append(a.retry_at - 100.0)
        a.retry_at = 0.0
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    plan.received(take(plan, a, 100.0), 10, 100.0)
    plan.failed(a, "reset", now=100.0)
    assert nothing(plan, a, 100.2)
    assert not nothing(plan, a, 100.25)
    for _ in range(5_000):
        plan.failed(a, "reset", now=0.0)
    assert a.retry_at < 200


def test_only_who_sent_every_byte_is_convicted() -> None:
    plan = FetchPlan(jobs(1), "ab", 0.0)
    a, b = plan.sources
    broken = take(plan, a, 0.0)
    plan.received(broken, 400, 1.0)
    plan.given_back(broken, 1.0)
    mixed = take(plan, b, 1.0)
    plan.received(mixed, 600, 2.0)
    assert not plan.wrong(mixed, 2.0)
    assert not a.banned
    assert not b.banned
    alone = take(plan, a, 2.0)
    assert alone.job.alone
    assert alone.job.contributors == set()
    plan.received(alone, 1_000, 3.0)
    assert plan.wrong(alone, 3.0)
    assert a.banned
    assert "expert 0 of layer 0" in a.reason
    assert nothing(plan, a, 9.0)
    plan.finished(take(plan, b, 9.0), 9.0)
    assert plan.done


def test_an_idle_source_takes_over_from_a_far_slower_one() -> None:
    plan = FetchPlan(jobs(2), "ab", 0.0)
    fast, slow = plan.sources
    cancelled: list[str] = []
    quick = take(plan, fast, 0.0)
    dragging = plan.take(slow, 0.0, cancel=lambda: cancelled.append("slow"))
    assert dragging is not None
    assert plan.take_over(fast, 0.0) is None, "nothing is known of its rate yet"
    plan.received(quick, 1_000, 0.5)
    plan.finished(quick, 0.5)
    assert plan.take_over(fast, 1.4) is None, "too early to tell"
    plan.received(dragging, 100, 1.4)
    assert plan.take_over(slow, 2.0) is None
    assert plan.take_over(fast, 2.0) is dragging
    assert plan.take_over(fast, 2.0) is None, "once is enough"
    dragging.cancel()
    assert cancelled == ["slow"]
    plan.given_back(dragging, 2.0)
    assert nothing(plan, slow, 2.0), "it is reserved"
    taken = take(plan, fast, 2.0)
    assert taken.job.digest[0] == 1
    plan.given_back(taken, 2.0)
    assert take(plan, slow, 2.0).job.digest[0] == 1


def test_an_even_source_is_left_in_peace() -> None:
    plan = FetchPlan(jobs(2), "ab", 0.0)
    fast, other = plan.sources
    quick, still = take(plan, fast, 0.0), take(plan, other, 0.0)
    plan.received(quick, 1_000, 10.0)
    plan.finished(quick, 10.0)
    plan.received(still, 500, 10.0)
    assert plan.take_over(fast, 12.0) is None


def test_a_reservation_ends_with_its_holder() -> None:
    for end in (lambda plan, holder: plan.ban(holder, "x"), lambda plan, holder: plan.failed(holder, "x", 5.0)):
        plan = FetchPlan(jobs(2), "ab", 0.0)
        fast, slow = plan.sources
        quick, dragging = take(plan, fast, 0.0), take(plan, slow, 0.0)
        plan.received(quick, 1_000, 0.1)
        plan.finished(quick, 0.1)
        assert plan.take_over(fast, 5.0) is dragging
        plan.given_back(dragging, 5.0)
        end(plan, fast)
        assert take(plan, slow, 5.0).job is dragging.job


def test_giving_up() -> None:
    plan = FetchPlan(jobs(2), "ab", 0.0)
    a, b = plan.sources
    assert plan.hopeless(59.9, 60.0) is None
    assert plan.hopeless(60.0, 60.0) is not None
    plan.received(take(plan, a, 60.0), 1, 60.0)
    assert plan.hopeless(119.0, 60.0) is None

    wanted = plan.open_jobs()[1]
    plan.lacking(a, wanted, "not here")
    assert plan.hopeless(100.0, 60.0) is None
    assert nothing(plan, a, 100.0)
    plan.lacking(b, wanted, "not here")
    assert plan.hopeless(100.0, 60.0) is wanted

    plan = FetchPlan(jobs(1), "ab", 0.0)
    for source in plan.sources:
        plan.ban(source, "wrong")
    assert plan.hopeless(0.0, 60.0) is plan.open_jobs()[0]
    assert FetchPlan(jobs(1), "", 0.0).hopeless(0.0, 60.0) is not None
    assert FetchPlan([], "a", 0.0).hopeless(99.0, 60.0) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.floats(0.0, 3.0)), max_size=80))
def test_no_job_is_ever_lost_or_doubled(steps: list[tuple[int, int, float]]) -> None:
    plan = FetchPlan(jobs(5), "abc", 0.0)
    active: list[Transfer] = []
    finished, now = set(), 0.0
    for which, action, pause in steps:
        now += pause
        source = plan.sources[which]
        mine = next((transfer for transfer in active if transfer.source is source), None)
        if action == 0 or mine is None:
            transfer = plan.take(source, now, cancel=lambda: None)
            active += [transfer] if transfer else []
        elif action == 1:
            plan.received(mine, min(300, mine.missing_bytes), now)
        elif action == 6:
            plan.failed(source, "failed", now)
        elif action == 7:
            plan.take_over(source, now)
        else:
            active.remove(mine)
            if action == 2:
                plan.finished(mine, now)
                finished.add(mine.job.digest[0])
            elif action == 3:
                plan.wrong(mine, now)
            else:
                plan.given_back(mine, now, later=action == 4)
        left = [job.digest[0] for job in plan.open_jobs()]
        assert sorted([*left, *finished]) == [0, 1, 2, 3, 4]
    assert plan.done == (len(finished) == 5)
