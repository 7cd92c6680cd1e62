from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vasuki_solvers import HorizonTooLong, Instance, future_peak, occupancy_profile

running_items = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20), st.integers(0, 8)), max_size=12)


def peak_step_by_step(running: list[tuple[int, int, int]]) -> int:
    return max(
        (
            sum(held + max(0, k - wait) for held, remaining, wait in running if k < wait + remaining)
            for k in range(max((wait + remaining for _, remaining, wait in running), default=0))
        ),
        default=0,
    )


@given(running_items)
def test_the_future_peak_is_that_of_a_simulation(running: list[tuple[int, int, int]]) -> None:
    held, remaining, waits = ([item[column] for item in running] for column in range(3))
    assert future_peak(held, remaining, waits) == peak_step_by_step(running)
    assert future_peak(held, remaining) == peak_step_by_step([(h, r, 0) for h, r, _ in running])


def test_the_peak_is_less_than_the_sum_of_the_maxima() -> None:
    # The first leaves after this step, before the second has grown: 20 tokens now, and at most 19 later.
    assert future_peak([10, 10], [1, 10]) == 20
    assert future_peak([10, 10], [10, 10]) == 38


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(0, 20), st.integers(0, 4)), max_size=8))
def test_the_profile_counts_every_item_in_every_step(items: list[tuple[int, int, int, int]]) -> None:
    instance = Instance.of([(prompt, duration) for prompt, duration, _, _ in items], 100)
    starts, waits = (np.array([item[column] for item in items], np.int64) for column in (2, 3))
    profile = occupancy_profile(instance, starts, waits)
    assert len(profile) == max((s + w + d for _, d, s, w in items), default=0)
    for t, held in enumerate(profile.tolist()):
        assert held == sum(p + max(0, t - s - w) for p, d, s, w in items if s <= t < s + w + d)


def test_a_profile_has_a_longest_length() -> None:
    instance = Instance.of([(1, 1)], 10)
    with pytest.raises(HorizonTooLong, match="schedule of 1001 steps"):
        occupancy_profile(instance, np.array([1000]), np.array([0]), max_steps=1000)
