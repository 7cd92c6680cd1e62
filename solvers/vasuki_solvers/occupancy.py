"""Tokens held over time: the growth-aware peak, and the profile of a whole schedule."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from vasuki_solvers.exceptions import HorizonTooLong
from vasuki_solvers.items import Instance, Ints

MAX_PROFILE_STEPS = 100_000_000


def future_peak(held: ArrayLike, remaining: ArrayLike, waits: ArrayLike | None = None) -> int:
    """The most that the running items will ever hold together, if none is added (0 if none runs).

    held: [num_running] tokens that each holds in the current step. remaining: [num_running] steps in which each will
    still produce a token. waits: [num_running] steps that each first waits, holding its prompt without growing; None
    for no waits. The current step counts: an item with remaining = 1 and no wait is in its last step.

    An item only grows until it leaves, so the sum can peak nowhere but in the last step of some item. k steps from now
    the items with w_j + r_j > k are present, and

        occupancy(k) = sum over { j : w_j + r_j > k } of  h_j + max(0, k - w_j),
        peak         = max over i of  occupancy(w_i + r_i - 1).

    The sum of the single maxima, sum of h_j + r_j - 1, is never smaller: it reserves memory for items that will never
    be large at the same time. O(n log n).
    """
    return int(last_step_occupancy(held, remaining, waits)[1].max(initial=0))


def last_step_occupancy(held: ArrayLike, remaining: ArrayLike, waits: ArrayLike | None = None) -> tuple[Ints, Ints]:
    """The terms of `future_peak`: every item's last step, counted from now and latest first, and the tokens then held.

    Returns two [num_running] arrays. Of several items with the same last step only the last entry is their occupancy,
    and the entries before it are smaller.
    """
    held, remaining = np.asarray(held, np.int64), np.asarray(remaining, np.int64)
    waiting = np.zeros(len(held), np.int64) if waits is None else np.asarray(waits, np.int64)
    last_steps = waiting + remaining - 1
    # Sorted by end, latest first, the items present in a last step are a prefix of the list: a prefix sum does it.
    latest_first = np.argsort(-last_steps, kind="stable")
    steps = last_steps[latest_first]
    occupancy = np.cumsum((held - waiting)[latest_first]) + np.arange(1, len(held) + 1) * steps
    for j in np.flatnonzero(waiting):  # k - w_j was counted even where it is negative: give that back
        occupancy += np.maximum(0, waiting[j] - steps) * (steps < last_steps[j])
    return steps, occupancy


def occupancy_profile(instance: Instance, starts: Ints, waits: Ints, *, max_steps: int = MAX_PROFILE_STEPS) -> Ints:
    """[makespan] tokens held in each step of a schedule, by second differences: O(num_items + makespan).

    starts, waits: [num_items]. Raises HorizonTooLong beyond `max_steps`.
    """
    grows_from = starts + waits
    ends = grows_from + instance.durations
    makespan = int(ends.max(initial=0))
    if makespan > max_steps:
        raise HorizonTooLong(f"a schedule of {makespan} steps is too long for a profile of at most {max_steps}")
    level = np.zeros(makespan + 1, np.int64)  # jumps of the occupancy
    slope = np.zeros(makespan + 2, np.int64)  # jumps of its growth per step
    np.add.at(level, starts, instance.prompts)
    np.add.at(level, ends, -instance.peaks)
    np.add.at(slope, grows_from + 1, 1)
    np.add.at(slope, ends, -1)
    profile: Ints = np.cumsum(level + np.cumsum(slope)[: makespan + 1])[:makespan]
    return profile
