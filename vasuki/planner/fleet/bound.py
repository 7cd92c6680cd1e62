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
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from vasuki.base.arrays import Floats
from vasuki.machines.cost_model import CostModel
from vasuki.planner.lengths import Lengths
from vasuki.planner.schedule_bound import (
    JobSums,
    kv_tokens_beside,
    link_tokens_per_s,
    pairs_of,
    room_bounds,
    step_rooms,
)
from vasuki_solvers import makespan_bound

_STEP = 0.01  # of an amount, that a secant reaches back


@dataclass(frozen=True, slots=True)
class _Amounts:
    """What a job has to do, in place of `JobSums`, without what belongs to single rows.

    Args:
        sums: tokens, samples, contexts, those with a window, pairs, those with a window, tokens held in steps that
            sample, tokens held in the others, contexts that chunks end at.
        again: as in `JobSums`.
        prompts: that fit into memory side by side.
    """

    sums: Sequence[float]
    again: float
    prompts: float
    largest: float = 0.0
    longest_output: int = 0

    @property
    def tokens(self) -> float:
        return self.sums[0]

    @property
    def samples(self) -> float:
        return self.sums[1]

    @property
    def contexts(self) -> float:
        return self.sums[2]

    @property
    def windowed_contexts(self) -> float:
        return self.sums[3]

    @property
    def pairs(self) -> float:
        return self.sums[4]

    @property
    def windowed_pairs(self) -> float:
        return self.sums[5]

    @property
    def held(self) -> float:
        return self.sums[6]

    def chain(self, step_tokens: float) -> float:
        return 1e-9  # no row asks for any steps of its own, but some there are

    def ends(self, step_tokens: float) -> float:
        return self.sums[8]

    def area(self, step_tokens: float) -> float:
        return self.sums[6] + self.sums[7]

    def most_prompts(self, kv_tokens: float) -> float:
        return self.prompts


def _job(sums: Floats, again: float, prompts: float) -> JobSums:
    """Amounts as a `RoomBound` takes them, which asks for nothing that they lack."""
    return cast(JobSums, _Amounts(sums.tolist(), again, prompts))


def row_prices(lengths: Lengths, cost: CostModel, device_memory: float, offload: bool) -> Floats:
    """`[rows]` seconds of a card that each row takes at least, whatever rows run beside it."""
    job = JobSums.of(lengths, cost)
    rooms = step_rooms(partial(kv_tokens_beside, cost, device_memory, None))
    link = link_tokens_per_s(cost) if offload else 0.0
    prices = np.full(len(lengths), math.inf)
    for room, bound in zip(rooms, room_bounds(job, cost.terms(), rooms, link), strict=True):
        rows = _amounts(lengths, cost, room.step_tokens)
        sums = rows.sum(axis=1)
        prompts, slopes = job.most_prompts(room.kv_tokens), np.zeros(len(sums))
        whole_s = replace(bound, job=_job(sums, job.again, prompts)).seconds()
        for index in np.flatnonzero(sums):
            less = sums.copy()
            less[index] *= 1 - _STEP
            less_s = replace(bound, job=_job(less, job.again, prompts)).seconds()
            slopes[index] = (whole_s - less_s) / (_STEP * sums[index])
        prices = np.minimum(prices, np.maximum(0.0, slopes) @ rows)
    return prices if rooms else np.zeros(len(lengths))


def _amounts(lengths: Lengths, cost: CostModel, step_tokens: float) -> Floats:
    """`[amounts, rows]` what each row adds to the sums of `_Amounts`, as `JobSums` has it."""
    prompts, outputs = lengths.prompt_tokens, np.minimum(lengths.output_tokens, lengths.limits)
    own = lengths.own_prompt_tokens
    last, shared = prompts + outputs - 1, prompts - own
    window, row_tokens = cost.shape.sliding_window, cost.shape.state_bytes / cost.shape.kv_bytes_per_token
    chunks = np.maximum(1, np.ceil(own / step_tokens))
    missing = chunks * (chunks - 1) / 2 * step_tokens if step_tokens < math.inf else np.zeros(len(own))
    amounts = [
        own + outputs - 1,
        outputs,
        pairs_of(last) - pairs_of(prompts),
        pairs_of(last, window) - pairs_of(prompts, window),
        pairs_of(prompts) - pairs_of(shared),
        pairs_of(prompts, window) - pairs_of(shared, window),
        outputs * own + outputs * (outputs - 1) // 2 + row_tokens * outputs,
        (chunks - 1) * (own + row_tokens) - missing,
        chunks * prompts - missing,
    ]
    return np.array(amounts, np.float64)


def fleet_bound_s(prices: Sequence[Floats], counts: Sequence[int], alone_s: float) -> float:
    """Seconds that no schedule on so many cards of each kind beats.

    Args:
        prices: `[rows]` of each kind, from `row_prices`.
        counts: cards of each kind.
        alone_s: that the slowest row takes on any card.
    """
    return max(alone_s, makespan_bound(np.stack(prices), counts))
