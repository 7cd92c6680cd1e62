"""What a job takes as a whole, simulated on every row where planning has time for that, else told from a sample.

Ways to run a job are compared by small samples, and what they say of the whole hangs on arithmetic (`prediction`): a
sample of long outputs does not fill memory as the job does. So the chosen way is simulated once more, on every row.
Where that takes too long, a sample of n rows and its two halves tell what the job takes beyond its bound, which knows
every row:

    e(n) = T(n) - bound(n)
    T(job) = bound(job) + e(n) + (rows - n) x (e(n) - e(n / 2)) / (n / 2)

Start and tail are in e(n) and in e(n / 2), so their difference is what more rows add in the midst. It is never below
the bound, since the whole never takes less beyond it than the sample does.

The halves have no row in common, and differ by chance alone. If e(n) varies as they do, by s = |e(a) - e(b)| / sqrt(2),
the slope above varies by sqrt(3 / 2) s / (n / 2), since it has the mean of both halves. Twice that is the prediction's
`spread`, but no less than `LEAST_SPREAD` of what was not simulated, as a single pair may agree by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vasuki.planner.candidates import Problem
from vasuki.planner.lengths import Lengths
from vasuki.planner.prediction import (
    PLANNING_SHARE,
    Prediction,
    by_work,
    predict,
    sample_rows,
    simulated_row_s,
)

# What this may take: a share of the makespan, the other half of what planning may take, and no more than a second.
SHARE, MOST_S = PLANNING_SHARE / 2, 1.0
LEAST_SPREAD = 0.06  # told from 1,000 of 4,000 rows six jobs were 0.5 to 5 % off, where halves said 1.8 to 20


@dataclass(frozen=True, slots=True)
class Whole:
    """What all rows of a job take.

    Args:
        makespan_s: simulated, or told from a sample.
        rows: that were simulated.
        spread: the share of the makespan by which it may be off, since other rows might have been in the sample: two
            standard deviations.
    """

    makespan_s: float
    rows: int
    spread: float = 0.0


def with_all_rows(problem: Problem, chosen: Prediction, least_s: Callable[[Lengths], float]) -> Prediction:
    """The prediction of the chosen candidate, for every row of the job.

    Args:
        problem: the job.
        chosen: predicted from a sample, or as if rows that are gathered were there from the start.
        least_s: seconds that no schedule of some rows beats.
    """
    job, rows = problem.lengths, chosen.simulated_requests
    gathered = job.arrived_at_s is not None and problem.policy.gathers
    if rows == len(job) and not gathered:
        return chosen
    most_rows = affordable_rows(chosen.makespan_s, simulated_row_s(chosen.result))
    if len(job) <= most_rows and not gathered:
        return predict(problem, chosen.candidate, rows=len(job))

    def simulated_s(some: Lengths) -> float:
        if len(some) == rows:
            return chosen.result.makespan_s
        return predict(replace(problem, lengths=some), chosen.candidate, rows=len(some)).result.makespan_s

    whole = told_from(job, min(len(job), max(rows, most_rows // 2)), simulated_s, least_s)
    return replace(chosen, makespan_s=whole.makespan_s, simulated_requests=whole.rows, spread=whole.spread)


def affordable_rows(makespan_s: float, row_s: float, least_s: float = 0.0) -> int:
    """Rows that may be simulated once more for a plan of `makespan_s`, in at least `least_s` of planning."""
    return int(max(least_s, min(MOST_S, SHARE * makespan_s)) / row_s)


def told_from(
    job: Lengths, rows: int, simulated_s: Callable[[Lengths], float], least_s: Callable[[Lengths], float]
) -> Whole:
    """What a job takes, from a sample of `rows` of its rows, two at least.

    Args:
        job: all rows.
        rows: of the sample.
        simulated_s: seconds that some rows take by themselves.
        least_s: seconds that no schedule of some rows beats.
    """
    sample, missing = job.take(sample_rows(job, rows)), len(job) - rows
    of_sample_s = simulated_s(sample) - least_s(sample)
    added_s = [0.0, 0.0]  # by a row, as each half says
    if missing:
        ranks = by_work(sample)
        halves = [ranks[np.isin(np.arange(rows) % 4, every)] for every in ((0, 3), (1, 2))]  # neighbours part
        for index, half in enumerate(sample.take(np.sort(half)) for half in halves):
            added_s[index] = (of_sample_s - simulated_s(half) + least_s(half)) / (rows - len(half))
    makespan_s = least_s(job) + of_sample_s + missing * max(0.0, sum(added_s) / 2)
    by_chance = missing * math.sqrt(3) * abs(added_s[0] - added_s[1]) / makespan_s
    return Whole(makespan_s, rows, max(by_chance, LEAST_SPREAD * missing / len(job)))
