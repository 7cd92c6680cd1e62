"""Greedy orders and schedules: in O(n log n), a few per cent from the lower bound on large sets.

Two schedulers can execute an order, and they want different ones.

A scheduler that follows start steps (`reverse`) keeps the memory full with almost any order; longest first ends the
schedule with all long items side by side. `greedy_schedule` decodes a few such orders and keeps the shortest.

A scheduler that lives in the present (`forward`) starts everything as early as it can. If it is given the longest items
first, items of one length run side by side, grow together and end together, and the memory stands half empty while the
next crowd grows. It needs a mix of lengths, with no long item left for the end: `greedy_order`.
"""

from __future__ import annotations

import numpy as np

from vasuki_solvers.bounds import Bound, lower_bound
from vasuki_solvers.forward import forward_schedule
from vasuki_solvers.items import Instance, Ints
from vasuki_solvers.reverse import ReverseDecoder
from vasuki_solvers.schedule import Schedule

LOOKAHEAD = 16
PORTFOLIO_MAX_ITEMS = 50_000
SIMULATE_MAX_ITEMS = 1_000
SPREADS = ((0.8, 1.0), (0.9, 1.0), (1.1, 1.0), (0.9, 1.5), (1.1, 1.25), (1.1, 2.0))  # (share of the bound, head start)
GOLDEN_RATIO = (5**0.5 - 1) / 2


def fifo_schedule(instance: Instance, *, bound: Bound | None = None) -> Schedule:
    """First come, first served by the forward scheduler: the baseline."""
    starts, waits = forward_schedule(instance, range(len(instance)))
    return Schedule.build(instance, starts, waits, "fifo", bound)


def greedy_schedule(instance: Instance, *, bound: Bound | None = None) -> Schedule:
    """Start steps for every item: the shortest of a few reverse schedules.

    O(n log n). Beyond 50,000 items only one is built, longest first, which takes several seconds for a million.
    """
    bound = lower_bound(instance) if bound is None else bound
    decoder = ReverseDecoder(instance)
    longest_first = np.argsort(-instance.durations, kind="stable")
    orders, lookaheads = [longest_first], [1]
    if len(instance) <= PORTFOLIO_MAX_ITEMS:
        lookaheads.append(LOOKAHEAD)
        orders += [
            np.argsort(-instance.areas, kind="stable"),
            spread_order(instance, bound.steps),
            spread_order(instance, int(0.9 * bound.steps)),
        ]
        if instance.prefill_tokens_per_step is not None:
            # Shortest first puts the longest items at the start of the schedule: the best end for a busy prefill
            # budget.
            orders.append(longest_first[::-1])
    best: Schedule | None = None
    for order in orders:
        for lookahead in lookaheads:
            starts, waits = decoder.decode(order.tolist(), lookahead=lookahead)
            schedule = Schedule.build(instance, starts, waits, "greedy", bound)
            if best is None or schedule.makespan < best.makespan:
                best = schedule
            if best.optimal:
                return best
    assert best is not None
    return best


def greedy_order(instance: Instance, *, bound: Bound | None = None) -> Ints:
    """[num_items] the order to hand to an online step scheduler, such as `forward_schedule`.

    Long items start early enough, short ones fill the end, and lengths are mixed in between (`spread_order`). Up to
    1,000 items a few such orders are simulated, and the shortest is returned. Above, sorting is all: a million items
    take about a second.
    """
    steps = (lower_bound(instance) if bound is None else bound).steps
    spread = spread_order(instance, steps)
    if len(instance) > SIMULATE_MAX_ITEMS:
        return spread
    longest_first = np.argsort(-instance.durations, kind="stable")
    orders = [spread, longest_first]
    orders += [spread_order(instance, int(share * steps), head_start=head_start) for share, head_start in SPREADS]
    makespans = [
        int((starts + waits + instance.durations).max(initial=0))
        for starts, waits in (forward_schedule(instance, order.tolist()) for order in orders)
    ]
    return orders[int(np.argmin(makespans))]


def spread_order(instance: Instance, steps: int, *, head_start: float = 1.0, longest: Ints | None = None) -> Ints:
    """[num_items] the items by a target start, which is spread evenly over the `steps` of the schedule, but no later
    than the item can start to end in time, were it to take the `longest` that it may, if that is given:

        target_i = min(u_i x steps, steps - head_start x max(duration_i, longest_i)),

    where u_i is the low-discrepancy sequence of the golden ratio over the items sorted by duration, so that any stretch
    of the order has the same mix of durations, until only shorter ones are left. A head start above 1 brings the last
    long items forward: items that are due at the same step compete for memory just before it, and the last is late.
    """
    longest_first = np.argsort(-instance.durations, kind="stable")
    evenly = np.empty(len(instance))
    evenly[longest_first] = (0.5 + GOLDEN_RATIO * np.arange(len(instance))) % 1.0
    most = instance.durations if longest is None else np.maximum(instance.durations, longest)
    targets = np.minimum(evenly * steps, steps - head_start * most)
    return np.lexsort((-instance.durations, targets))
