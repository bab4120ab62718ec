"""Who gets what in a step: the order of the passes, chunks of prompts, the three budgets, letting in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbengine.outputs import RequestStatus
from cbengine.scheduling.base import StepPlan
from cbengine.scheduling.fifo import FifoScheduler
from cbengine.scheduling.passes import PassScheduler
from cbengine.scheduling.prefill_first import PrefillFirstScheduler
from cbengine.scheduling.request import Request
from tests.scheduling.desk import Desk, row_owners

POLICIES = pytest.mark.parametrize("policy", [FifoScheduler, PrefillFirstScheduler])


def _shape(desk: Desk, plan: StepPlan) -> list[tuple[int, int, bool]]:
    """(request, tokens, samples) for each sequence of a plan."""
    sizes = [(1, True)] * plan.num_decodes + [(chunk.count, chunk.last) for chunk in plan.chunks]
    return [(owner, count, last) for owner, (count, last) in zip(row_owners(desk, plan), sizes, strict=True)]


# --- order ---------------------------------------------------------------------------------------------------------


def test_fifo_serves_decodes_then_prefills_then_newcomers() -> None:
    desk = Desk(tokens=8, depth=1)
    desk.add(2, 9)
    desk.turn()  # 0 decodes from here on
    desk.add(20, 9)
    desk.turn()  # 1 is being computed from here on
    desk.add(3, 9)
    assert _shape(desk, desk.plan()) == [(0, 1, True), (1, 7, False)]
    desk.commit()
    assert _shape(desk, desk.plan()) == [(0, 1, True), (1, 6, True), (2, 1, False)]
    desk.commit()
    assert _shape(desk, desk.plan()) == [(0, 1, True), (1, 1, True), (2, 2, True)]


def test_prefill_first_computes_a_prompt_that_was_begun_before_it_decodes() -> None:
    desk = Desk(PrefillFirstScheduler, tokens=8, depth=1)
    desk.add(2, 9)
    desk.turn()
    desk.add(20, 9)
    desk.turn()  # 7 of its 20 tokens are computed beside 0's decode
    desk.add(3, 9)
    assert _shape(desk, desk.plan()) == [(1, 8, False)]
    desk.commit()
    assert _shape(desk, desk.plan()) == [(0, 1, True), (1, 5, True), (2, 2, False)]


@POLICIES
def test_a_request_is_planned_once_a_step(policy: type[PassScheduler]) -> None:
    """Its last chunk and its first decode belong to two steps."""
    desk = Desk(policy, tokens=8)
    for length in (3, 9, 2, 17):
        desk.add(length, 5)
    desk.run(lambda plan: _distinct(row_owners(desk, plan)) if plan else None)


def _distinct(owners: list[int]) -> None:
    assert len(owners) == len(set(owners))


@POLICIES
def test_each_group_is_served_by_arrival(policy: type[PassScheduler]) -> None:
    desk = Desk(policy, tokens=6, requests=6)
    for length in (3, 7, 1, 9, 2, 5, 4):
        desk.add(length, 6)

    def by_arrival(plan: StepPlan) -> None:
        owners = row_owners(desk, plan)
        decodes, chunks = owners[: plan.num_decodes], owners[plan.num_decodes :]
        assert decodes == sorted(decodes) and chunks == sorted(chunks)

    desk.run(lambda plan: by_arrival(plan) if plan else None)


def test_a_prompt_is_computed_in_chunks_to_its_end() -> None:
    desk = Desk(tokens=8, depth=1)
    request = desk.add(20, 3)
    seen: list[tuple[int, int, bool]] = []
    while request.status is not RequestStatus.FINISHED:
        plan = desk.turn()
        seen += [(chunk.start, chunk.count, chunk.last) for chunk in plan.chunks]
    assert seen == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_a_decode_is_not_held_up_by_long_prompts() -> None:
    """B2: chunks take what decoding leaves of the budget, so who streams gets a token in every step."""
    desk = Desk(tokens=8, depth=1)
    streaming = desk.add(1, 30)
    desk.turn()
    prompts = [desk.add(40, 1) for _ in range(3)]
    for step in range(29):
        plan = desk.turn()
        assert plan.num_decodes == 1 and plan.num_tokens == (8 if step < 17 else 2 if step == 17 else 1)
    assert {request.status for request in (streaming, *prompts)} == {RequestStatus.FINISHED}


@POLICIES
def test_nothing_is_planned_past_a_length(policy: type[PassScheduler]) -> None:
    """I4: with two steps in flight an end by length is known ahead."""
    desk = Desk(policy)
    for new in (1, 2, 3, 7):
        desk.add(3, new)
    planned: dict[int, int] = {}

    def count(plan: StepPlan) -> None:
        for owner, _, samples in _shape(desk, plan):
            planned[owner] = planned.get(owner, 0) + samples

    while desk.alive:
        plan = desk.plan()
        if plan:
            count(plan)
        if not plan or desk.lifecycle.launched - desk.lifecycle.committed == 2:
            desk.commit()
    assert planned == {0: 1, 1: 2, 2: 3, 3: 7}


# --- budgets -------------------------------------------------------------------------------------------------------


def _hold_to_budgets(desk: Desk) -> None:
    """Look at every plan as it is made."""
    make, budgets = desk.scheduler.plan, desk.budgets

    def plan() -> StepPlan:
        plan = make()
        assert plan.num_tokens <= budgets.tokens
        assert plan.num_seqs <= budgets.requests
        assert len(desk.running) <= budgets.requests
        assert int(desk.cache.lengths[plan.rows].sum()) <= budgets.pages_read
        assert all(chunk.count >= 1 for chunk in plan.chunks)
        return plan

    desk.scheduler.plan = plan


@settings(max_examples=80)
@given(
    policy=st.sampled_from([FifoScheduler, PrefillFirstScheduler]),
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=9),
    tokens=st.integers(4, 24),
    requests=st.integers(1, 4),
    blocks=st.integers(11, 40),
    pages_read=st.integers(11, 30),
    margin=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    depth=st.integers(1, 2),
    gaps=st.lists(st.integers(0, 3), min_size=9, max_size=9),
)
def test_no_step_is_over_a_budget(
    policy: type[PassScheduler],
    sizes: list[tuple[int, int]],
    tokens: int,
    requests: int,
    blocks: int,
    pages_read: int,
    margin: float,
    depth: int,
    gaps: list[int],
) -> None:
    """B3; and whatever the budgets are, everybody who fits into the cache finishes."""
    desk = Desk(
        policy,
        blocks=blocks,
        tokens=tokens,
        requests=min(requests, tokens),
        pages_read=min(pages_read, blocks),
        margin=margin,
        depth=depth,
    )

    _hold_to_budgets(desk)
    for (prompt_len, new), gap in zip(sizes, gaps, strict=False):
        desk.add(prompt_len, new)
        for _ in range(gap):
            desk.turn()
    desk.run()
    assert {request.status for request in desk.requests} == {RequestStatus.FINISHED}
    desk.check_idle()


# --- letting in ----------------------------------------------------------------------------------------------------


@POLICIES
def test_the_head_of_the_queue_is_never_overtaken(policy: type[PassScheduler]) -> None:
    """B6: a request that needs most of the cache, in a stream of small ones that would always fit."""
    desk = Desk(policy, blocks=20, tokens=16, requests=4)
    let_in: list[int] = []
    desk.on_change = lambda r: (
        let_in.append(r.id) if r.status is RequestStatus.PREFILLING and not r.preemptions else None
    )
    for _ in range(3):
        desk.add(3, 6)
    desk.turn()
    large = desk.add(70, 2)
    for _ in range(60):
        desk.add(3, 6)
        desk.turn()
    assert let_in == sorted(let_in)
    assert large.status is RequestStatus.FINISHED
    desk.run()
    assert let_in == list(range(64))


@POLICIES
def test_nobody_is_let_in_past_an_older_one_that_waits(policy: type[PassScheduler]) -> None:
    """Whoever is let in is the oldest of the waiting at that moment, preempted ones included."""
    desk = Desk(policy, blocks=12, tokens=10)

    def check(request: Request) -> None:
        if request.status is RequestStatus.PREFILLING:
            head = desk.scheduler.head()
            assert head is None or request.id < head.id

    desk.on_change = check
    for i in range(20):
        desk.add(1 + i * 5 % 13, 3 + i * 7 % 11)
        desk.turn()
    desk.run()
    assert desk.lifecycle.preemptions > 0  # the case that matters did happen


@pytest.mark.parametrize(("margin", "let_in"), [(0.0, 3), (0.25, 2), (0.5, 1), (1.0, 1)])
def test_the_safety_margin_holds_newcomers_back(margin: float, let_in: int) -> None:
    """B5: beside running requests, nobody who would leave less than this share of the 16 pages free."""
    desk = Desk(blocks=16, tokens=64, margin=margin)
    for _ in range(3):
        desk.add(17, 2)  # 5 pages each: 11, 6 and 1 are left
    desk.turn()
    assert len(desk.running) == let_in
    desk.run()
    desk.check_idle()


def test_the_first_one_is_let_in_whatever_the_margin() -> None:
    desk = Desk(blocks=16, tokens=64, margin=1.0)
    request = desk.add(60, 2)  # 16 pages
    desk.turn()
    assert request.status is RequestStatus.DECODING


def test_a_newcomer_needs_room_for_all_its_tokens_and_one_more() -> None:
    desk = Desk(blocks=4, tokens=64)
    fits, not_yet = desk.add(7, 1), desk.add(8, 1)  # 8 and 9 tokens: 2 and 3 pages
    desk.turn()
    assert fits.status is RequestStatus.DECODING and not_yet.status is RequestStatus.PENDING
    assert desk.cache.num_free == 2
    desk.run()
    assert not_yet.status is RequestStatus.FINISHED


def test_one_that_leaves_the_queue_makes_way() -> None:
    desk = Desk(blocks=4, tokens=64)
    desk.add(8, 8)
    desk.turn()
    blocking, small = desk.add(12, 1), desk.add(2, 1)
    desk.turn()
    assert desk.scheduler.head() is blocking and desk.scheduler.num_waiting == 2
    desk.end(blocking)
    assert desk.scheduler.head() is small and desk.scheduler.num_waiting == 1
    desk.turn()
    assert small.status is RequestStatus.DECODING
    desk.run()
    desk.check_idle()


def test_an_empty_scheduler_plans_nothing() -> None:
    desk = Desk()
    plan = desk.plan()
    assert not plan and plan.num_tokens == plan.num_seqs == 0 and desk.scheduler.head() is None
