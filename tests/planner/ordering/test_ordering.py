"""Every request comes out once, in bounded memory, in an order that is better than the input's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vasuki.base.config_values import Column, Quantile
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner.lengths import Lengths
from vasuki.planner.ordering.output_length import ENOUGH_ROWS, OutputLengths
from vasuki.planner.ordering.planned_order import (
    FIRST_ROWS,
    Capacity,
    PlannedOrder,
    order_requests,
    searched_order,
    solve_order,
)
from vasuki.planner.plan import Solver
from vasuki.simulator import simulate

CAPACITY = Capacity(kv_tokens=4000, max_num_seqs=32, chunk_tokens=256, block_tokens=16)
SETTINGS = EngineSettings(POLICIES["vasuki"], Limits(256, 32), 250, 16)


def requests_of(prompts: list[int], outputs: list[int]) -> list[Request]:
    return [Request(row, row, *pair) for row, pair in enumerate(zip(prompts, outputs, strict=True))]


def ended(prompt: int, output: int) -> Sequence:
    return Sequence(Request(0, 0, prompt, 10_000), output_token_ids=[0] * output)


@given(
    rows=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 900), st.booleans()), max_size=40),
    solver=st.sampled_from(["greedy", "fifo", "prompt_length", "local_search"]),
    window_rows=st.integers(1, 20),
    learns=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_request_comes_once_and_the_window_is_bounded(
    rows: list[tuple[int, int, bool]], solver: Solver, window_rows: int, learns: bool
) -> None:
    read = 0

    def source() -> Iterator[Request]:
        nonlocal read
        for row, (prompt, output, fails) in enumerate(rows):
            read += 1
            yield Request(row, row, prompt, output, error="broken" if fails else "")

    lengths = OutputLengths() if learns else None
    order = PlannedOrder(source(), CAPACITY, solver=solver, lengths=lengths, window_rows=window_rows)
    taken = []
    for request in order:
        taken.append(request)
        good_in_window = [r for r in range(read) if not rows[r][2]]
        assert len(good_in_window) - sum(not request.error for request in taken) <= window_rows
        order.learn([ended(request.num_prompt_tokens, request.max_tokens)], [])
    assert sorted(request.row for request in taken) == list(range(len(rows)))
    assert next(order, None) is None


def test_a_row_with_an_error_overtakes_the_window() -> None:
    rows = requests_of([10] * 50, [5] * 50)
    rows[20] = replace(rows[20], error="no prompt")
    order = PlannedOrder(rows, CAPACITY)
    assert next(order).row == 20


def test_the_first_rows_do_not_wait_for_a_full_window() -> None:
    read = 0

    def source() -> Iterator[Request]:
        nonlocal read
        while True:
            read += 1
            yield Request(read, read, 10, 10)

    order = PlannedOrder(source(), CAPACITY)
    next(order)
    assert read == FIRST_ROWS
    for _ in range(20 * FIRST_ROWS):
        next(order)
    assert read < 20 * FIRST_ROWS + 32_768 + 1


@pytest.mark.parametrize("more", [{}, {"carried_bytes": 4_000}, {"carried_bytes": 4_000, "error": "broken"}])
def test_the_window_is_bounded_in_bytes_too(more: dict[str, Any]) -> None:
    read = 0

    def source() -> Iterator[Request]:
        nonlocal read
        for row in range(100):
            read += 1
            yield Request(row, row, 1000, 5, **more)

    order = PlannedOrder(source(), CAPACITY, window_bytes=20_000)
    first = next(order)
    assert read == -(-20_000 // first.num_bytes)
    assert 1 + len(list(order)) == 100


def test_long_rows_start_early_enough() -> None:
    outputs = [20] * 200
    outputs[190] = 800
    order = [request.row for request in PlannedOrder(requests_of([100] * 200, outputs), CAPACITY)]
    assert order.index(190) < 20


def makespan_s(lengths: Lengths, solver: Solver) -> float:
    cost = CostModel(named_shape("llama-3-8b"), find_profile("a10"))
    order = order_requests(lengths.requests(known=True), SETTINGS, solver=solver, known=True)
    return simulate(order, lengths.output_tokens.tolist(), SETTINGS, cost).makespan_s


def test_planned_orders_beat_the_input_order() -> None:
    random = np.random.default_rng(0)
    outputs = np.sort(random.geometric(1 / 80, 150))  # the longest rows come last
    lengths = Lengths(random.integers(50, 800, 150), outputs)
    fifo_s = makespan_s(lengths, "fifo")
    assert makespan_s(lengths, "greedy") < 0.95 * fifo_s


@pytest.mark.parametrize("solver", ["milp", "local_search"])
def test_searched_orders_hold_every_row_once(solver: Any) -> None:
    prompts, outputs = np.array([30, 10, 20, 40, 10, 25]), np.array([4, 9, 6, 3, 8, 5])
    order = searched_order(prompts, outputs, Capacity(90, 8, 64), solver, time_limit_s=5.0)
    assert sorted(order) == list(range(6))


@pytest.mark.parametrize("solver", ["milp", "local_search"])
def test_while_the_run_waits_greedy_orders(solver: Any) -> None:
    prompts, outputs = np.array([30, 10, 20, 40, 10, 25]), np.array([4, 9, 6, 3, 8, 5])
    assert solve_order(prompts, outputs, Capacity(90, 8, 64), solver).solver == "greedy"


def test_what_may_be_longest_starts_first_while_nothing_is_known() -> None:
    """As many such rows as twice the memory holds; the others as they are."""
    limits = np.array([100, 60, 90, 5, 70, 80] + [50] * 30)
    prompts, capacity = np.full(len(limits), 10), Capacity(110, 8, 64)
    untold = solve_order(prompts, limits, capacity, "greedy", OutputLengths()).order
    taught = OutputLengths()
    for _ in range(ENOUGH_ROWS):
        taught.observe(10, 50)
    learned = solve_order(prompts, limits, capacity, "greedy", taught).order
    assert learned[:2] != [0, 2] == untold[:2]
    assert untold[2:] == [row for row in learned if row not in (0, 2)]
    assert solve_order(prompts, limits, capacity, "fifo", OutputLengths()).order == list(range(len(limits)))


def test_rows_like_those_that_became_long_start_early() -> None:
    """Their mean says little: of the short prompts one in ten is answered at length."""
    taught = OutputLengths()
    for row in range(100):
        taught.observe(10, 400 if row % 10 == 0 else 20)
        taught.observe(1000, 60)
    prompts, limits = np.array([10, 1000] * 100), np.full(200, 500)
    expected = taught.estimates(prompts, limits)
    assert set(taught.longest(prompts, limits).tolist()) == {400, 60}
    assert set(taught.longest(prompts, np.full(200, 90)).tolist()) == {90, 60}
    capacity = Capacity(20_000, 16, 256)
    blind, told = (solve_order(prompts, expected, capacity, "greedy", taught, given).order for given in (None, limits))
    last_short = [max(place for place, row in enumerate(order) if prompts[row] == 10) for order in (blind, told)]
    assert last_short[1] < 0.8 * last_short[0]
    assert sorted(told) == list(range(200))


def test_an_order_found_beforehand_is_taken_over_for_as_many_rows() -> None:
    found = (3, 1, 4, 5, 2, 0)
    order = PlannedOrder(requests_of([10] * 6, [5] * 6), CAPACITY, solver="milp", order=found)
    assert tuple(request.row for request in order) == found
    assert (order.solved.order, order.solved.solver) == (list(found), "milp")
    other = PlannedOrder(requests_of([10] * 7, [5] * 7), CAPACITY, solver="milp", order=found)
    assert sorted(request.row for request in other) == list(range(7))
    assert other.solved.solver == "greedy"


def test_rows_longer_than_the_memory_are_ordered_all_the_same() -> None:
    solved = solve_order(np.array([5000, 10]), np.array([10, 9000]), CAPACITY, "greedy")
    assert sorted(solved.order) == [0, 1]


def test_estimates_sharpen_as_rows_end() -> None:
    order = PlannedOrder(requests_of([100] * 200, [500] * 200), CAPACITY, lengths=OutputLengths())
    assert next(order).expected_tokens == 500
    order.learn([ended(100, 20)] * ENOUGH_ROWS, [])
    assert next(order).expected_tokens < 60


def test_estimates_of_rows_that_already_run_are_revised() -> None:
    scheduler = Scheduler(SETTINGS)
    order = PlannedOrder(requests_of([100] * 50, [500] * 50), CAPACITY, lengths=OutputLengths())
    scheduler.add(next(order))
    order.learn([ended(100, 20)] * ENOUGH_ROWS, scheduler.queues.live())
    assert scheduler.queues.waiting[0].expected_tokens < 60


@pytest.mark.parametrize(
    ("policy", "output_length", "learns"),
    [
        ("vasuki", "auto", True),
        ("vasuki", Quantile(quantile=0.9), True),
        ("vasuki", "max", False),
        ("vasuki", Column(column="n"), False),
        ("sarathi", "auto", False),
    ],
)
def test_who_learns(policy: str, output_length: Any, learns: bool) -> None:
    settings_ = replace(SETTINGS, policy=POLICIES[policy])
    order = order_requests(requests_of([100] * 200, [500] * 200), settings_, output_length=output_length)
    order.learn([ended(100, 20)] * 4 * ENOUGH_ROWS, [])
    assert (list(order)[-1].expected_tokens < 100) == learns


def test_other_policies_take_rows_as_they_come_or_by_prompt_length() -> None:
    rows = requests_of([30, 10, 20], [5, 5, 5])
    taken = order_requests(rows, replace(SETTINGS, policy=POLICIES["sarathi"]))
    assert [request.row for request in taken] == [0, 1, 2]
    taken = order_requests(rows, replace(SETTINGS, policy=POLICIES["static-sorted"]))
    assert [request.row for request in taken] == [1, 2, 0]


def prefixed(groups: int, members: int, shared: int, own: int, common: int = 0) -> list[Request]:
    """`groups` x `members` prompts, interleaved, that begin with `common` tokens of all and `shared` of their group."""
    rows = []
    for row in range(groups * members):
        tokens = [1] * common + [2 + row % groups] * shared + [100 + row] * own
        rows.append(Request(row, row, len(tokens), 20, np.array(tokens, dtype=np.int32)))
    return rows


@pytest.mark.parametrize("common", [0, 64])
def test_rows_that_begin_alike_stay_together_where_memory_is_tight(common: int) -> None:
    rows = prefixed(5, 6, 256, 30, common)
    tight = replace(CAPACITY, kv_tokens=600)
    order = [request.row % 5 for request in PlannedOrder(rows, tight)]
    changes = sum(before != after for before, after in itertools.pairwise(order))
    assert changes == 4


def test_rows_that_begin_alike_stay_together_when_lengths_are_learned() -> None:
    tight = replace(CAPACITY, kv_tokens=600)
    order = PlannedOrder(prefixed(5, 12, 256, 30), tight, lengths=OutputLengths())
    kinds = [next(order).row % 5 for _ in range(20)]
    order.learn([ended(286, 5)] * ENOUGH_ROWS, [])
    kinds += [request.row % 5 for request in order]
    assert sum(before != after for before, after in itertools.pairwise(kinds)) <= 5


def test_rows_are_not_compared_where_memory_keeps_all_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = prefixed(5, 6, 256, 30)
    searched = []

    def search(prompts: object, **limits: object) -> list[object]:
        searched.append(1)
        return []

    monkeypatch.setattr("vasuki.planner.ordering.planned_order.prefix_groups", search)
    ample = 30 * (286 + 16) + 30 * (286 + 16 + 20)
    for kv_tokens in (ample, ample - 1):
        list(PlannedOrder(rows, replace(CAPACITY, kv_tokens=kv_tokens)))
    assert len(searched) == 1


def test_rows_that_share_anyway_keep_their_order() -> None:
    """With room for all of them, a row of each kind always runs."""
    rows = prefixed(5, 6, 256, 30)
    bare = [replace(request, prompt_token_ids=()) for request in rows]
    assert [r.row for r in PlannedOrder(rows, CAPACITY)] == [r.row for r in PlannedOrder(bare, CAPACITY)]


def test_what_all_rows_share_does_not_change_the_order() -> None:
    rows = prefixed(1, 30, 128, 30)
    bare = [replace(request, prompt_token_ids=()) for request in rows]
    assert [r.row for r in PlannedOrder(rows, CAPACITY)] == [r.row for r in PlannedOrder(bare, CAPACITY)]


def test_a_few_shared_tokens_do_not_spoil_a_good_order() -> None:
    random = np.random.default_rng(3)
    rows = []
    for row in range(60):
        tokens = [2 + row % 6] * 16 + [1000 + row] * int(random.integers(100, 400))
        rows.append(Request(row, row, len(tokens), int(random.geometric(1 / 150)), np.array(tokens, dtype=np.int32)))
    bare = [replace(request, prompt_token_ids=()) for request in rows]
    assert [r.row for r in PlannedOrder(rows, CAPACITY)] == [r.row for r in PlannedOrder(bare, CAPACITY)]
