"""List scheduling forwards in time: what an online step scheduler makes of an order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from vasuki_solvers.items import Instance, Ints
from vasuki_solvers.occupancy import last_step_occupancy


def forward_schedule(instance: Instance, order: Iterable[int], *, lookahead: int = 1) -> tuple[Ints, Ints]:
    """Admit the items in `order`, each as soon as the peak of everything that runs stays within the capacity.

    This is a scheduler that lives in the present: in every step it starts whatever it may, and never holds an item back
    for a better moment. Admission is growth-aware (`occupancy.future_peak`): it reserves what the running items will
    hold at the same time, and not the sum of their maxima. Prompts go through the prefill budget first come, first
    served, and a new one is admitted while the step has some budget left.

    order: a permutation of the items. lookahead: the item admitted next is the first of this many that fits (1:
    strictly in order). Returns starts and waits, [num_items] each.
    """
    prompts, durations = instance.prompts, instance.durations
    max_parallel = instance.max_parallel or len(instance)
    budget = instance.prefill_tokens_per_step
    first_tokens, starts = np.zeros(len(instance), np.int64), np.zeros(len(instance), np.int64)
    running = np.zeros(0, np.int64)
    upcoming = iter(order)
    window = list(islice(upcoming, lookahead))
    now = 0
    reserved = 0  # prefill reserved so far, in tokens from step 0 on: what idle steps left unused counts as reserved
    while window:
        running = running[(first_tokens + durations)[running] > now]
        if budget is not None:
            reserved = max(reserved, now * budget)
            if reserved >= (now + 1) * budget:
                now += 1
                continue
        next_end = int((first_tokens + durations)[running].min()) if len(running) else now + 1
        if len(running) >= max_parallel:
            now = next_end
            continue

        delay = next_end - now
        for position, i in enumerate(window):
            starts[i] = now
            first_tokens[i] = now if budget is None else (reserved + int(prompts[i]) - 1) // budget
            candidates = np.append(running, i)
            growth = now - first_tokens[candidates]
            steps, occupancy = last_step_occupancy(
                prompts[candidates] + np.maximum(growth, 0),
                durations[candidates] - np.maximum(growth, 0),
                np.maximum(-growth, 0),
            )
            excess = occupancy - instance.capacity
            if int(excess.max()) <= 0:
                window.pop(position)
                window.extend(islice(upcoming, 1))
                running = candidates
                reserved += int(prompts[i])
                delay = 0
                break
            # Every step of delay takes at most one token off what item i adds to a last step that lies before its own.
            before_own_end = steps < first_tokens[i] + durations[i] - 1 - now
            delay = min(delay, max(1, int(excess[before_own_end].max(initial=1))))
        now += delay
    return starts, first_tokens - starts
