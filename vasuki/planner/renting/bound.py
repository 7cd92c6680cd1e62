"""Seconds that no schedule of a job on a fleet beats under the cost model.

For one kind of card that is the bound of a single one, shared among them: running all their steps on one card, one
after the other, is a schedule of the whole job. With several kinds that is not enough, since each may be given the rows
that it is best at.

The bound of one card, for steps of one range of sizes, is convex in what there is to do: tokens, samples, contexts, ...
(`vasuki.planner.schedule_bound`), and twice the work takes twice as long. So it lies nowhere below its tangent:

    B(q) >= sum_i p_i q_i    for all q,    with prices p_i = dB / dq_i at the work of the whole job

Work adds up over rows, so a row has a price on each kind of card, that of the cheapest range of sizes, and however rows
are dealt out, each card takes as long as its rows cost. What remains is `vasuki_solvers.machines`. Prices are slopes of
secants from below, which a convex function's tangents are no flatter than.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vasuki.base.arrays import Floats
from vasuki.machines.cost_model import CostModel
from vasuki.planner.any_schedule import AnySchedule
from vasuki.planner.job_sums import JobSums, Prompts, Sums, sums_of_rows
from vasuki.planner.lengths import Lengths
from vasuki.planner.schedule_bound import RoomBound, link_tokens_per_s, room_bounds
from vasuki_solvers import makespan_bound

_STEP = 0.01  # of an amount, that a secant reaches back


def row_prices(lengths: Lengths, schedules: AnySchedule) -> Floats:
    """`[rows]` seconds of a card that each row takes at least, whatever rows run with it and wherever weights are."""
    prompts, own = lengths.prompt_tokens, lengths.own_prompt_tokens
    outputs = np.minimum(lengths.output_tokens, lengths.limits)
    job = JobSums.of(schedules.shape, prompts, outputs, own)
    of_rows = sums_of_rows(schedules.shape, prompts, outputs, own)
    row_tokens = job.prompts.row_tokens
    of_rows = of_rows._replace(held=of_rows.held + row_tokens * of_rows.samples)
    each = Prompts(own, np.ones(len(own)), prompts.astype(np.float64), outputs, row_tokens)
    prices = np.full(len(lengths), math.inf)
    for layout in schedules.layouts:
        cost, rooms = CostModel(schedules.shape, schedules.profile, layout), schedules.rooms(layout)
        link = link_tokens_per_s(cost) if schedules.offload else 0.0
        for room, bound in zip(rooms, room_bounds(job, cost.terms(), rooms, link), strict=True):
            amounts = np.stack([*of_rows, each.begun(room.step_tokens), each.ends(room.step_tokens)])
            prices = np.minimum(prices, _slopes(bound, amounts.sum(axis=1)) @ amounts)
    return prices if np.isfinite(prices).all() else np.zeros(len(lengths))


def _slopes(bound: RoomBound, amounts: Floats) -> Floats:
    """`[amounts]` what each adds to the bound. No row asks for any steps of its own, but some there are."""
    job = bound.job._replace(chain=1e-9, longest_output=0.0, largest=0.0)

    def total_s(amounts: Floats) -> float:
        *sums, begun, ends = amounts.tolist()
        all_rows = Sums(*sums)
        return replace(bound, job=job._replace(sums=all_rows, area=all_rows.held + begun, ends=ends)).seconds()

    whole_s, slopes = total_s(amounts), np.zeros(len(amounts))
    for index in np.flatnonzero(amounts):
        less = amounts.copy()
        less[index] *= 1 - _STEP
        slopes[index] = max(0.0, (whole_s - total_s(less)) / (_STEP * amounts[index]))
    return slopes


def fleet_bound_s(prices: Sequence[Floats], counts: Sequence[int], alone_s: float) -> float:
    """Seconds that no schedule on `counts` cards of each kind beats.

    Args:
        prices: `[rows]` of each kind, from `row_prices`.
        counts: cards of each kind.
        alone_s: that the slowest row takes on any card.
    """
    return max(alone_s, makespan_bound(np.stack(prices), counts))
