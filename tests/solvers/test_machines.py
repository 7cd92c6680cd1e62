"""The bound for machines of several kinds lies below every schedule, and close to the best one in pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vasuki_solvers import makespan_bound


def shortest(times: np.ndarray, counts: list[int]) -> float:
    """The best makespan, by trying every assignment."""
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    best = np.inf
    for chosen in itertools.product(range(len(kinds)), repeat=times.shape[1]):
        loads = np.zeros(len(kinds))
        for item, machine in enumerate(chosen):
            loads[machine] += times[kinds[machine], item]
        best = min(best, loads.max())
    return float(best)


@given(
    arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(1, 5)), elements=st.floats(0.1, 10)),
    st.lists(st.integers(1, 2), min_size=3, max_size=3),
)
def test_no_schedule_beats_it(times: np.ndarray, counts: list[int]) -> None:
    counts = counts[: len(times)]
    while sum(counts) > 4:
        counts = [1] * len(counts)
    assert makespan_bound(times, counts) <= shortest(times, counts) * (1 + 1e-9)


@given(st.lists(st.floats(0.2, 5), min_size=1, max_size=4), st.integers(1, 9))
def test_machines_that_differ_by_speed_share_the_work_by_it(speeds: list[float], count: int) -> None:
    work = np.linspace(1, 3, 50)
    times = np.array([work / speed for speed in speeds])
    assert makespan_bound(times, [count] * len(speeds)) == pytest.approx(work.sum() / (count * sum(speeds)), rel=1e-3)


def test_each_kind_does_what_it_is_best_at() -> None:
    times = np.array([[1.0] * 10 + [9.0] * 10, [9.0] * 10 + [1.0] * 10])
    assert makespan_bound(times, [2, 2]) == pytest.approx(5.0, rel=0.01)
    assert makespan_bound(times, [1, 5]) == pytest.approx(50 / 7, rel=0.01)
