"""Lower bounds on the makespan: no schedule is shorter, whatever the algorithm.

Each function states its argument. `lower_bound` takes the largest and says which one binds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vasuki_solvers.items import Instance, Ints

ENERGETIC_MAX_ITEMS = 20_000
ENERGETIC_WORK = 400_000  # items x windows that are looked at for one makespan
ENERGETIC_MIN_GRID = 12
MAX_CROWD = 16


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule takes fewer than `steps` steps, by the argument called `reason`."""

    steps: int
    reason: str


def longest_item_bound(instance: Instance) -> int:
    """Every item has to run to its end: the longest one, prefill wait included, is a bound."""
    return int((instance.durations + instance.min_waits).max(initial=0))


def area_bound(instance: Instance) -> int:
    """A step holds at most `capacity` tokens, so M steps hold at most M x capacity token-steps, and all items take the
    sum of their areas, wherever they are placed (the KV-area bound)."""
    return -(-int(instance.areas.sum()) // instance.capacity)


def parallel_bound(instance: Instance) -> int:
    """With at most m items at once, M steps hold at most M x m item-steps. And of the m + 1 longest items two never
    overlap (else all m + 1 would run in one step, as intervals that overlap pairwise share a point): the shortest two
    of them, one after the other, are a bound."""
    if instance.max_parallel is None:
        return 0
    spans = np.sort(instance.durations + instance.min_waits)[::-1]
    bound = -(-int(spans.sum()) // instance.max_parallel)
    if len(spans) > instance.max_parallel:
        bound = max(bound, int(spans[instance.max_parallel - 1] + spans[instance.max_parallel]))
    return bound


def dual_feasible_bound(instance: Instance) -> int:
    """The area bound with sizes measured so that room which whole items have to leave counts as well.

    A function f is dual feasible if sizes that fit into the capacity together always have f-sizes that fit into f(C)
    together. No step holds more than f(C) then, and M steps no more than M x f(C), for which the f-sizes of all items,
    summed over their steps, need room. Two families (Fekete and Schepers, "New classes of fast lower bounds for bin
    packing problems", Mathematical Programming 91, 2001), with x as a share of the capacity:

        U(e), 0 < e <= 1/2    x > 1 - e counts as 1, x < e as nothing, the rest as x: only what is smaller than e fits
                              together with such a large one
        u(k), k >= 1          floor((k + 1) x) / k, and x where (k + 1) x is whole: no more than k that are larger than
                              1 / (k + 1) fit into one step

    O(items + largest size): all that counts is for how many item-steps each size is held.
    """
    if not len(instance):
        return 0
    capacity, largest = instance.capacity, int(instance.peaks.max())
    sizes = np.arange(largest + 1)
    begin, end = (np.bincount(edge, minlength=largest + 2) for edge in (instance.prompts, instance.peaks + 1))
    held = (begin - end).cumsum()[:-1]  # item-steps at which each size is held
    np.add.at(held, instance.prompts, instance.min_waits)

    steps = 0
    e = np.arange(capacity - largest + 1, capacity // 2 + 1)  # for smaller ones no size is large
    if len(e):
        count, area = held.cumsum(), (held * sizes).cumsum()
        total = capacity * (count[-1] - count[capacity - e]) + area[capacity - e] - area[e - 1]
        steps = -(-int(total.max()) // capacity)
    for k in range(max(1, capacity // largest), MAX_CROWD + 1):
        whole, rest = np.divmod((k + 1) * sizes, capacity)
        total = held @ np.where(rest == 0, k * sizes, whole * capacity)
        steps = max(steps, -(-int(total) // (k * capacity)))
    return steps


def prefill_bound(instance: Instance) -> int:
    """The prefill budget is one machine, and an item's duration is what follows it there (a tail). Of the k items with
    the longest durations, the last to be taken in gets its last chunk in step ceil(prompts / budget) - 1 at the
    earliest, and then still runs for at least the shortest duration among the k (Jackson's rule, 1955)."""
    if instance.prefill_tokens_per_step is None or not len(instance):
        return 0
    longest_first = np.argsort(-instance.durations, kind="stable")
    taken_in = np.cumsum(instance.prompts[longest_first])
    last_chunks = -(-taken_in // instance.prefill_tokens_per_step) - 1
    return int((last_chunks + instance.durations[longest_first]).max())


def energetic_bound(instance: Instance, *, at_least: int = 1, grid_points: int | None = None) -> int:
    """If the schedule ended by step M, each item would have to spend a least amount of token-steps inside any window
    [a, b), and the sum of these must fit into (b - a) x capacity. An M for which some window overflows is refuted, and
    M + 1 is a bound (energetic reasoning).

    The tokens that an item spends in a window first rise and then fall as its start moves right from 0 to M - duration:
    the least is at one of these two ends. The windows are those between `grid_points` evenly spaced steps (as many as
    `ENERGETIC_WORK` allows: all windows of a small instance), and single steps in the middle, where the items longer
    than M / 2 must be. Prefill waits are left out, which only loosens it.

    Returns the largest bound found above `at_least`, itself a bound, or `at_least`.
    """
    if not len(instance):
        return 0
    if grid_points is None:
        grid_points = max(ENERGETIC_MIN_GRID, math.isqrt(2 * ENERGETIC_WORK // len(instance)))

    def refuted(makespan: int) -> bool:
        evenly = np.linspace(0, makespan, min(grid_points, makespan + 1)).astype(np.int64)
        middle = np.arange(makespan // 2 - 1, makespan // 2 + 3).clip(0, makespan)
        grid = np.union1d(evenly, middle)
        at_once = _area_before(instance, np.zeros(len(instance), np.int64), grid)
        at_last = _area_before(instance, makespan - instance.durations, grid)
        for k in range(len(grid) - 1):
            least = np.minimum(at_once[k + 1 :] - at_once[k], at_last[k + 1 :] - at_last[k]).sum(axis=1)
            if (least > (grid[k + 1 :] - grid[k]) * instance.capacity).any():
                return True
        return False

    # A window that refutes M refutes every shorter M as well, so that doubling and bisection find the threshold of
    # one set of windows; the grid moves with M, and only what was refuted is claimed.
    proved = max(at_least, int(instance.durations.max()))
    if not refuted(proved):
        return proved
    stride = 1
    while refuted(proved + stride):
        proved, stride = proved + stride, 2 * stride
    low, high = proved, proved + stride  # low is refuted, high is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low + 1


def _area_before(instance: Instance, starts: Ints, grid: Ints) -> Ints:
    """[len(grid), num_items] token-steps that each item, started without a wait at `starts`, has taken before a step of
    the grid."""
    steps = np.clip(grid[:, None] - starts, 0, instance.durations)
    area: Ints = steps * instance.prompts + steps * (steps - 1) // 2
    return area


def quick_bound(instance: Instance) -> Bound:
    """The largest of the bounds that take a moment, O(n log n), and which one it is: good enough to spread items by."""
    bounds = [
        Bound(longest_item_bound(instance), "longest item"),
        Bound(area_bound(instance), "area"),
        Bound(parallel_bound(instance), "max_parallel"),
        Bound(prefill_bound(instance), "prefill budget"),
    ]
    return max(bounds, key=lambda bound: bound.steps)


def lower_bound(instance: Instance) -> Bound:
    """The largest of all bounds, and which one it is.

    The energetic bound is skipped beyond 20,000 items, where the area bound leaves it nothing to gain.
    """
    best = max(
        quick_bound(instance),
        Bound(dual_feasible_bound(instance), "whole items"),
        key=lambda bound: bound.steps,
    )
    if 0 < len(instance) <= ENERGETIC_MAX_ITEMS:
        energetic = energetic_bound(instance, at_least=best.steps)
        if energetic > best.steps:
            best = Bound(energetic, "energetic")
    return best
