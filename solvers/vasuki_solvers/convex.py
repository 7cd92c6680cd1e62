"""What many steps cost at least when only their totals are known.

If a step of x costs f(x), then n steps that come to X together cost at least n h(X / n), where h is the lower convex
hull of f, however X is divided among them (Jensen's inequality: the mean of h over the steps is at least h of their
mean, and f is nowhere below h). For a convex h, n h(X / n) is convex in n, too, so its least value over all numbers of
steps can be searched for.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

GOLDEN = (math.sqrt(5) - 1) / 2
SEARCH_STEPS = 80  # each leaves 62 % of the range: more than doubles can tell


@dataclass(frozen=True, slots=True)
class Hull:
    """A convex, piecewise linear function of x, constant before its first vertex.

    Args:
        x: of the vertices, rising.
        y: likewise.
        slope: after the last vertex.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    slope: float = math.inf

    def __call__(self, x: float) -> float:
        vertices, values = self.x, self.y
        right = bisect_right(vertices, x)
        if right == 0:
            return values[0]
        if right == len(vertices):
            beyond = x - vertices[-1]
            return values[-1] + beyond * self.slope if beyond else values[-1]
        low, low_value = vertices[right - 1], values[right - 1]
        return low_value + (values[right] - low_value) * (x - low) / (vertices[right] - low)

    def of_steps(self, steps: float, total: float) -> float:
        """What `steps` steps that come to `total` together cost at least."""
        return steps * self(total / steps)

    def cheapest(self, start: float) -> float:
        """The x for which each unit costs least beyond `start`, which is no more than the function; may be infinite."""
        x, each = min(((x, (y - start) / x) for x, y in zip(self.x, self.y, strict=True)), key=lambda place: place[1])
        return x if each <= self.slope else math.inf

    def slope_after(self, x: float) -> float:
        """How much the function rises for each unit right of x."""
        return self._slope_up_to(bisect_right(self.x, x))

    def slope_before(self, x: float) -> float:
        """How much the function rises for each unit left of x."""
        return self._slope_up_to(bisect_left(self.x, x))

    def _slope_up_to(self, right: int) -> float:
        """The slope of the piece that ends at a vertex, or begins at the last one."""
        if right == 0:
            return 0.0
        if right == len(self.x):
            return self.slope
        return (self.y[right] - self.y[right - 1]) / (self.x[right] - self.x[right - 1])

    def no_steeper(self, slope: float) -> Hull:
        """The largest convex function below this one that never rises by more than `slope`."""
        x, y = list(self.x), list(self.y)
        while len(x) > 1 and y[-1] - y[-2] > slope * (x[-1] - x[-2]):
            x.pop()
            y.pop()
        return Hull(tuple(x), tuple(y), min(slope, self.slope) if len(x) == len(self.x) else slope)

    def rising(self) -> Hull:
        """Cut off the part where the function falls: the cost of at least x."""
        start = min(range(len(self.y)), key=lambda index: (self.y[index], -index))
        return Hull(self.x[start:], self.y[start:], self.slope)


def lower_hulls(points: Iterable[tuple[float, float]], ends: Sequence[float]) -> Iterator[Hull]:
    """The lower convex hulls of all points up to each of `ends`, in one pass.

    Args:
        points: (x, y) by rising x; where several have one x, all count.
        ends: rising, none of them before the first point.
    """
    x: list[float] = []
    y: list[float] = []
    wanted = iter([*ends, math.inf])
    end = next(wanted)
    for px, py in points:
        while px > end:
            yield Hull(tuple(x), tuple(y))
            end = next(wanted)
        if x and px == x[-1]:
            if py >= y[-1]:
                continue
            x.pop()
            y.pop()
        while len(x) > 1 and (y[-1] - y[-2]) * (px - x[-1]) >= (py - y[-1]) * (x[-1] - x[-2]):
            x.pop()
            y.pop()
        x.append(px)
        y.append(py)
    while end < math.inf:
        yield Hull(tuple(x), tuple(y))
        end = next(wanted)


def lower_hull(points: Iterable[tuple[float, float]], slope: float) -> Hull:
    """The lower convex hull of points by rising x, and of a ray with this slope from each of them."""
    (hull,) = lower_hulls(points, [math.nextafter(math.inf, 0)])
    return hull.no_steeper(slope)


def least(function: Callable[[float], float], low: float, high: float) -> float:
    """The least value of a convex function between two places, by golden-section search."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    best = min(function(low), function(high))
    for _ in range(SEARCH_STEPS):
        if not left < right:  # closer than doubles can tell
            break
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = function(right)
    return min(best, at_left, at_right)
