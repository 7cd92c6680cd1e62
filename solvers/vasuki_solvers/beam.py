"""Beam search over reversed orders, guided by potentials; a proof where the beam is wide enough.

Items are placed backwards in time, each as early as it fits after the one before it, as `reverse` decodes an order. A
state is the set of items placed, the first step at which another fits, and the tokens that they hold from then on. The
bound of `potentials` holds from any state to the end: what is left is the area of what is left, the rises of what has
yet to arrive or to depart, and the potential between here and the end. So states are compared that have come far and
left much memory unused with others that have not. Of each number of items placed, the best `width` states are kept.

Left out without loss are states whose bound is no shorter than the best plan known, and those that another state of the
same items dominates: no later, and holding no more at any step, so that whatever follows the one can follow the other.
(Items only shrink, hence the tokens held in the steps to come say it all.) If the width never cut anything, then
nothing shorter than the best plan exists.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vasuki_solvers.items import Ints
from vasuki_solvers.plan import Plan
from vasuki_solvers.potentials import Potentials
from vasuki_solvers.reverse import reverse_schedule

WIDTH = 3_000
MAX_CELLS = 4_000_000  # states x items x steps of the longest item: a narrower beam where that is more
MAX_ITEMS = 62  # a set of items is a word of 64 bits
NEIGHBOURS = 8  # better states of the same items that may dominate one
SPARE = 3  # times the width: states that are kept until dominated ones are left out


@dataclass(frozen=True, slots=True)
class _States:
    """orders: [states, placed] items in order of arrival. now: [states] the first step at which another item fits.
    left: [states, items] steps that each placed item still runs. held: [states, longest] tokens held now, a step later,
    and so on."""

    orders: Ints
    now: Ints
    left: Ints
    held: Ints

    def take(self, chosen: NDArray[np.int64] | NDArray[np.bool_]) -> _States:
        return _States(self.orders[chosen], self.now[chosen], self.left[chosen], self.held[chosen])


def beam_search(
    plan: Plan, potentials: Potentials, *, width: int = WIDTH, deadline: float = float("inf")
) -> tuple[Plan, bool]:
    """A plan shorter than `plan`, or else `plan` itself, and whether it is proved that none is shorter.

    deadline: on the performance counter; the search gives up there. Not for a prefill budget, which potentials lack.
    """
    if not 0 < len(plan.instance) <= MAX_ITEMS:
        return plan, False
    width = min(width, MAX_CELLS // (len(plan.instance) * int(plan.instance.durations.max())))
    search = _Search(plan, potentials)
    states, complete = search.root(), True
    for _ in range(len(plan.instance)):
        states, values = search.children(states)
        best = np.argsort(values, kind="stable")
        complete &= len(best) <= SPARE * width
        states = search.undominated(states.take(best[: SPARE * width]))
        complete &= len(states.now) <= width
        states = states.take(np.arange(min(width, len(states.now))))
        if time.perf_counter() > deadline or not width:
            return plan, False
    if not len(states.now):
        return plan, complete
    order = states.orders[int((states.now + states.left.max(axis=1)).argmin())]
    starts, waits = reverse_schedule(plan.instance, order.tolist())
    return Plan.build(plan.instance, starts, waits, "beam", plan.bound), complete


class _Search:
    def __init__(self, plan: Plan, potentials: Potentials) -> None:
        self.instance = instance = plan.instance
        self.shorter_than = plan.makespan
        self.ages = np.arange(int(instance.durations.max()))
        self.shapes = np.where(self.ages < instance.durations[:, None], instance.peaks[:, None] - self.ages, 0)
        self.potentials, self.step = potentials, potentials.step(instance)
        self.arrivals, self.departures = potentials.rises(instance)
        same = (self.shapes[:, None] == self.shapes).all(axis=2)
        self.twins = np.array([max(np.flatnonzero(row[:i]), default=-1) for i, row in enumerate(same)])

    def root(self) -> _States:
        none = np.zeros((1, len(self.instance)), np.int64)
        return _States(none[:, :0], none[:, 0], none, np.zeros((1, len(self.ages)), np.int64))

    def children(self, states: _States) -> tuple[_States, Ints]:
        """Every state with one more item, unless it can lead to nothing shorter; and the bounds of the children, in
        units of the potentials."""
        placed = np.zeros_like(states.left, bool)
        np.put_along_axis(placed, states.orders, True, axis=1)
        ready = ~placed & (placed[:, self.twins] | (self.twins < 0))  # of identical items the first comes first
        parents, items = np.nonzero(ready)
        full = states.held[parents] > (self.instance.capacity - self.instance.peaks[items])[:, None]
        if self.instance.max_parallel is not None:
            running = (states.left[:, :, None] > self.ages).sum(axis=1)
            full |= running[parents] >= self.instance.max_parallel
        waits = full.sum(axis=1)  # what is held, and what runs, only falls

        left = np.maximum(states.left[parents] - waits[:, None], 0)
        left[np.arange(len(items)), items] = self.instance.durations[items]
        held = _later(states.held[parents], waits) + self.shapes[items]
        orders = np.column_stack([states.orders[parents], items])
        placed = placed[parents]
        placed[np.arange(len(items)), items] = True

        smallest = np.where(placed, 0, self.instance.peaks).max(axis=1)  # stays 0 where all are placed
        smallest = np.where(placed, smallest[:, None], self.instance.peaks).min(axis=1)
        idle = (held > (self.instance.capacity - smallest)[:, None]).sum(axis=1)
        now = states.now[parents] + waits + idle
        children = _States(orders, now, np.maximum(left - idle[:, None], 0), _later(held, idle))

        bounds = self._bounds(children, placed)
        ends = children.now + children.left.max(axis=1)
        hopeful = (ends < self.shorter_than) & (bounds <= (self.shorter_than - 1) * self.step)
        return children.take(hopeful), bounds[hopeful]

    def _bounds(self, states: _States, placed: NDArray[np.bool_]) -> Ints:
        """[states] what all steps are worth together, at least, in any plan that begins like this."""
        f, running = self.potentials.values, states.left > 0
        area = states.held.sum(axis=1) + (~placed @ self.instance.areas)
        rises = ~placed @ (self.arrivals + self.departures) + running @ self.departures
        change = f[0, 0] + self.potentials.lift - f[running.sum(axis=1), states.held[:, 0]]
        bounds: Ints = states.now * self.step + area * self.potentials.per_token_step + change - rises
        return bounds

    def undominated(self, states: _States) -> _States:
        """Without states that one of the `NEIGHBOURS` before them dominates among those with the same items."""
        sets = (1 << states.orders).sum(axis=1)
        together = np.argsort(sets, kind="stable")
        sets, now, held = sets[together], states.now[together], states.held[together]
        dominated = np.zeros(len(sets), bool)
        for distance in range(1, min(NEIGHBOURS + 1, len(sets))):
            other = slice(0, -distance)
            later = now[distance:] - now[other]
            no_more = (_later(held[other], np.maximum(later, 0)) <= held[distance:]).all(axis=1)
            dominated[distance:] |= (sets[distance:] == sets[other]) & (later >= 0) & no_more
        return states.take(np.sort(together[~dominated]))


def _later(held: Ints, steps: Ints) -> Ints:
    """[states, longest] what is held `steps` steps later, [states]; nothing beyond the longest item."""
    at = steps[:, None] + np.arange(held.shape[1])
    found: Ints = np.where(at < held.shape[1], np.take_along_axis(held, np.minimum(at, held.shape[1] - 1), axis=1), 0)
    return found
