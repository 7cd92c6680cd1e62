"""Hulls against every pair of points, and the search against calculus."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vasuki_solvers.convex import Hull, least, lower_hull, lower_hulls

values = st.lists(st.integers(-20, 20), min_size=1, max_size=12)


def on_some_line(points: list[tuple[int, int]], x: float) -> float:
    """The lowest place at x of any line between two of the points: what a lower hull is."""
    between: list[float] = [y for at, y in points if at == x]
    for (x1, y1), (x2, y2) in itertools.combinations(points, 2):
        if x1 < x < x2:
            between.append(y1 + (y2 - y1) * (x - x1) / (x2 - x1))
    return min(between)


@given(values)
def test_hulls_of_all_beginnings(ys: list[int]) -> None:
    points = list(enumerate(ys))
    ends = list(range(len(points)))
    for end, hull in zip(ends, lower_hulls(points, ends), strict=True):
        for x in range(end + 1):
            assert hull(x) == pytest.approx(on_some_line(points[: end + 1], x), abs=1e-9)


@given(values, st.lists(st.integers(0, 11), min_size=1, max_size=8))
def test_steps_cost_no_less_than_their_hull(ys: list[int], steps: list[int]) -> None:
    """Whatever their sizes, and of what is beyond the last point by the slope there."""
    steps = [min(step, len(ys) + 2) for step in steps]

    def cost(x: int) -> float:
        return ys[x] if x < len(ys) else ys[-1] + 3 * (x - len(ys) + 1)

    hull = lower_hull(enumerate(map(float, ys)), 3.0)
    total = sum(map(cost, steps))
    assert hull.of_steps(len(steps), sum(steps)) <= total + 1e-9
    assert hull.rising().of_steps(len(steps), sum(steps) / 2) <= total + 1e-9, "half of it is done as well"


@given(values)
def test_the_cheapest_place(ys: list[int]) -> None:
    start = float(min(ys))
    hull = lower_hull(enumerate(map(float, ys), 1), 3.0)
    cheapest = hull.cheapest(start)
    each = 3.0 if cheapest == math.inf else (hull(cheapest) - start) / cheapest
    assert all(each * x <= hull(x) - start + 1e-9 for x in range(1, 40))


def test_two_points_at_one_place_and_a_flat_end() -> None:
    hull = lower_hull([(0, 5), (2, 3), (2, 1), (4, 9)], 2.0)
    assert hull == Hull((0, 2), (5, 1), 2.0)
    assert [hull(x) for x in (0, 1, 2, 5)] == [5, 3, 1, 7]
    assert hull.rising() == Hull((2,), (1,), 2.0)
    assert hull.rising()(0) == 1
    assert (hull.slope_after(0), hull.slope_after(3), hull.rising().slope_after(0)) == (-2, 2, 0)
    assert hull.no_steeper(1.0)(5) == 4


def test_least_of_convex_functions() -> None:
    assert least(lambda x: (x - 3) ** 2 + 1, 0, 10) == pytest.approx(1)
    assert least(lambda x: abs(x - math.pi), 0, 1000) == pytest.approx(0, abs=1e-9)
    assert least(lambda x: -x, 2, 5) == -5
    assert least(lambda x: x, 2, 2) == 2
