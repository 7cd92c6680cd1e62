"""The referee has to object to every kind of bad schedule."""

from __future__ import annotations

import numpy as np
import pytest

from vasuki_solvers import Bound, Instance, InvalidSchedule, Schedule, verify


def schedule_of(instance: Instance, starts: list[int], waits: list[int] | None = None) -> Schedule:
    return Schedule.build(instance, np.array(starts), None if waits is None else np.array(waits), "by hand")


def test_a_schedule_that_fills_a_step_exactly_is_right() -> None:
    verify(schedule_of(Instance.of([(4, 3), (4, 3)], 12), [0, 0]))


def test_growth_beyond_the_capacity_is_found_in_its_step() -> None:
    with pytest.raises(InvalidSchedule, match="step 2 holds 12 tokens, 1 more"):
        verify(schedule_of(Instance.of([(4, 3), (4, 3)], 11), [0, 0]))


def test_too_many_items_at_once() -> None:
    with pytest.raises(InvalidSchedule, match="step 1 runs 2 items, and max_parallel is 1"):
        verify(schedule_of(Instance.of([(1, 2), (1, 2)], 10, max_parallel=1), [0, 1]))


def test_a_start_before_the_beginning() -> None:
    with pytest.raises(InvalidSchedule, match="item 1 starts at step -1"):
        verify(schedule_of(Instance.of([(1, 2), (1, 2)], 10), [0, -1]))


def test_a_missing_item() -> None:
    with pytest.raises(InvalidSchedule, match="1 starts and 1 waits for 2 items"):
        verify(schedule_of(Instance.of([(1, 2), (1, 2)], 10), [0]))


def test_a_first_token_before_the_prompt_is_in() -> None:
    instance = Instance.of([(6, 2), (6, 2)], 100, prefill_tokens_per_step=4)
    verify(schedule_of(instance, [0, 0], [1, 2]))
    with pytest.raises(InvalidSchedule, match="step 1: item 1 still waits for 4 tokens"):
        verify(schedule_of(instance, [0, 0], [1, 1]))
    with pytest.raises(InvalidSchedule, match="step 0: item 0 still waits for 2 tokens"):
        verify(schedule_of(instance, [0, 0], [0, 2]))


def test_a_prompt_held_while_it_waits_takes_its_place() -> None:
    instance = Instance.of([(6, 2), (5, 2)], 11, prefill_tokens_per_step=100)
    with pytest.raises(InvalidSchedule, match="step 1 holds 12 tokens"):
        verify(schedule_of(instance, [0, 0], [0, 5]))


def test_a_bound_above_the_makespan_is_a_wrong_bound() -> None:
    instance = Instance.of([(1, 2)], 10)
    with pytest.raises(InvalidSchedule, match="bound of 3 steps exceeds the makespan of 2"):
        verify(Schedule.build(instance, np.array([0]), None, "by hand", Bound(3, "wishful")))
