"""Local search between greedy and exact: better orders, one move at a time."""

from __future__ import annotations

import random
import time

import numpy as np

from vasuki_solvers.reverse import ReverseDecoder
from vasuki_solvers.schedule import Schedule

NEAR = 12  # most moves of a long order are local: a far one changes the tightness of two places at once
SQUEEZE_SHARE = 0.02
SQUEEZE_LOOKAHEADS = (2, 4, 8, 16, 32, 64)


def local_search(
    schedule: Schedule, *, iterations: int = 2_000, time_budget_s: float | None = None, seed: int = 0
) -> Schedule:
    """Improve `schedule` by changing its order, decoded backwards (`reverse`); never returns a longer schedule.

    A move swaps two items or puts one elsewhere; now and then it squeezes the whole order, by decoding it with a
    look-ahead and taking over the order of arrivals that comes out. Late acceptance (Burke and Bykov, 2017) keeps a
    neighbour that is no longer than the current schedule, or than the schedule of some moves ago, which leaves shallow
    hollows without a temperature to tune; how many moves ago follows from the iterations per item.

    The search ends when the makespan meets the bound, after `iterations` moves, or after `time_budget_s` seconds,
    whichever is first. With iterations alone the result depends on nothing but the arguments. A move costs O(n log n).
    """
    deadline = float("inf") if time_budget_s is None else time.perf_counter() + time_budget_s
    if len(schedule.instance) < 2 or schedule.optimal:
        return schedule
    rng = random.Random(seed)
    decoder = ReverseDecoder(schedule.instance)

    order: list[int] = np.argsort(-schedule.ends, kind="stable").tolist()
    best = order
    cost = best_cost = max(decoder.place(order)[1])
    history = [cost] * max(1, min(100, iterations // (5 * len(order))))
    for iteration in range(iterations):
        if best_cost == schedule.bound.steps or time.perf_counter() >= deadline:
            break
        neighbour = _squeezed(order, decoder, rng) if rng.random() < SQUEEZE_SHARE else moved(order, rng)
        neighbour_cost = max(decoder.place(neighbour)[1])
        remembered = iteration % len(history)
        if neighbour_cost <= max(cost, history[remembered]):
            order, cost = neighbour, neighbour_cost
            if cost < best_cost:
                best, best_cost = order, cost
        history[remembered] = cost
    if best_cost >= schedule.makespan:
        return schedule
    starts, waits = decoder.decode(best)
    return Schedule.build(schedule.instance, starts, waits, f"{schedule.method} + local search", schedule.bound)


def moved(order: list[int], rng: random.Random) -> list[int]:
    """The order with two items swapped, or one moved elsewhere; nearby half of the time."""
    i = rng.randrange(len(order))
    low, high = (0, len(order)) if rng.random() < 0.5 else (max(0, i - NEAR), min(len(order), i + NEAR + 1))
    j = rng.randrange(low, high)
    neighbour = order[:]
    if rng.random() < 0.5:
        neighbour[i], neighbour[j] = neighbour[j], neighbour[i]
    else:
        neighbour.insert(j, neighbour.pop(i))
    return neighbour


def _squeezed(order: list[int], decoder: ReverseDecoder, rng: random.Random) -> list[int]:
    """The order in which the items arrive when later ones may fill the gaps."""
    arrivals, _ = decoder.place(order, lookahead=rng.choice(SQUEEZE_LOOKAHEADS))
    return sorted(order, key=arrivals.__getitem__)
