"""Seconds that no schedule of a job can beat under the cost model: the gap to them is all that planning can save.

A schedule is any sequence of steps in any order of rows, with prompts cut and mixed with decodes at will, preemption,
and KV on the host if that is allowed. Of rows of prompt P and output O,

    every position but the last sampled one passes a step           tokens   = sum(P + O - 1)
    every output token is sampled in a step of its own              samples  = sum(O)
    every one but the first by a decode, which reads its context    contexts = sum(P + 1, ..., P + O - 1)
    the prompt passes in chunks, whose queries see these keys       pairs    = sum(P (P + 1) / 2)
    whoever takes part in a step has its KV on the device           held     = sum(P, ..., P + O - 1) where they sample

whatever the schedule, and steps of at most M tokens leave memory for C(M) tokens of KV. So N steps, of which K sample,
can do it only if

    K C >= held      N C >= held + what chunks that sample nothing hold      K >= samples / most prompts side by side
    K >= O           N >= O + ceil(P / M) - 1                                N >= tokens / M, N >= K

and take, since the terms of a step (`cost_model.terms`) are nowhere below their hulls (`vasuki_solvers.convex`),

    N tokens^(tokens / N) + r [K samples^(samples / K) + (N - K) samples(0)]
        + r layers [N decode^(contexts / N) + roofline(pairs, ends)]

or more: a roofline is a norm, and so the sum of those of all steps is at least that of their sums. `ends` are the
contexts that chunks end at, of which no chunks of at most M tokens have fewer than P, P - M, P - 2 M, ... The whole is
convex in N and K. Its least value over both, and then over M, is the bound.

*Computing again.* A row that lost its KV may sample its next token with the last chunk of what it computes again, and
reads nothing in a decode then. It costs the tokens of its own prompt at least; where these are cheaper than the read,
the read counts no more than they do.

*Offload.* What is not on the device when a step begins comes over the link before it ends, in z seconds together:
held <= N C + z link / KV bytes of a token. That holds whether layers are streamed or rows are parked.

*Several devices.* Each kind of pipeline stage sees all micro-batches of its replica one after the other, each with a
stage's share of the memory; the least total of all replicas is divided by their number. Bubbles are not counted, but
that no row is faster than alone is.

What rows begin with in common is computed and held for nothing. Nothing that arrives after some moment can start before
it: the bound is the greatest, over a few moments, of the moment and what those rows take that come from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from vasuki.base.arrays import Floats, Ints
from vasuki.base.errors import ModelError
from vasuki.machines.cost_model import TABLE, CostModel, StepTerms, roofline
from vasuki.machines.memory_budget import memory_budget
from vasuki.planner.lengths import Lengths
from vasuki_solvers.convex import Hull, least, lower_hull, lower_hulls

_MOMENTS = 8  # at which rows arrive, and the rest of a job begins

# Ends of the ranges of step sizes, up to which a bound is made: four to a doubling.
MOST_STEP_TOKENS = (*(quarters << octave for octave in range(2, 10) for quarters in (4, 5, 6, 7)), TABLE)


class StepRoom(NamedTuple):
    """Steps of no more than so many tokens, and the KV tokens that a device has room for beside them, at most.

    For steps of a range of sizes, what it has beside the smallest.
    """

    step_tokens: float
    kv_tokens: float


def step_rooms(kv_tokens: Callable[[int], float]) -> list[StepRoom]:
    """Every step size in a few ranges. `kv_tokens` tells the room beside steps of so many tokens, 0 if they do not
    fit."""
    ends = (*MOST_STEP_TOKENS, math.inf)
    rooms = [StepRoom(end, kv_tokens(start + 1)) for start, end in zip((0, *MOST_STEP_TOKENS), ends, strict=True)]
    if rooms[0].kv_tokens == rooms[-1].kv_tokens:  # memory that somebody has set
        rooms = rooms[-1:]
    return [room for room in rooms if room.kv_tokens > 0]


def bound_of_any_plan_s(
    lengths: Lengths,
    costs: Iterable[CostModel],
    device_memory: float,
    offload: bool,
    micro_batches: int = 1,
    beside_weights_bytes: int | None = None,
) -> float:
    """Seconds that no plan of a job beats, whatever its steps and wherever its weights are.

    Args:
        lengths: as below.
        costs: the model with its weights in every place that a plan may choose.
        device_memory: as in the job file.
        offload: as below.
        micro_batches: that share the KV memory of a device.
    """
    if lengths.arrived_at_s is not None:
        limits = list(costs), device_memory, offload, micro_batches, beside_weights_bytes
        return max(
            float(lengths.arrived_at_s[first])
            + bound_of_any_plan_s(lengths.take(np.arange(first, len(lengths))), *limits)
            for first in _moments(lengths)
        )
    bounds = []
    for cost in costs:
        rooms = step_rooms(partial(kv_tokens_beside, cost, device_memory, beside_weights_bytes))
        rooms = [StepRoom(room.step_tokens, room.kv_tokens / micro_batches) for room in rooms]
        if rooms:
            bounds.append(schedule_bound_s(lengths, cost, rooms, offload))
    return min(bounds, default=0.0)


def _moments(lengths: Lengths) -> list[int]:
    """The first row from some moments on: the start, the last arrival, and some between."""
    last = len(lengths) - 1
    return sorted({round(last * part / _MOMENTS) for part in range(_MOMENTS + 1)})


def kv_tokens_beside(
    cost: CostModel, device_memory: float, beside_weights_bytes: int | None, step_tokens: int
) -> float:
    """The room for KV and for all else that rows keep, beside steps that sample a single token."""
    shape, layout = cost.shape.without_states, cost.layout
    try:
        budget = memory_budget(
            shape,
            cost.profile,
            device_memory=device_memory,
            block_tokens=1,
            max_step_tokens=step_tokens,
            max_num_seqs=1,
            layout=layout,
            beside_weights_bytes=beside_weights_bytes,
        )
    except ModelError:
        return 0.0
    return budget.kv_bytes / budget.kv_bytes_per_token


def schedule_bound_s(lengths: Lengths, cost: CostModel, rooms: Sequence[StepRoom], offload: bool = False) -> float:
    """Seconds that no schedule of a job of known lengths beats under a cost model.

    Args:
        lengths: recorded or expected; every row fits into some of the rooms.
        cost: the model on its device or devices, with weights on the host where they are.
        rooms: of one micro-batch, by rising step sizes: any schedule is in one of them.
        offload: whether KV may pass over the link.
    """
    if not len(lengths):
        return 0.0
    layout, job = cost.layout, JobSums.of(lengths, cost)
    if layout.num_streams == 1:
        return _least_s(job, [cost.terms()], rooms, cost, offload) + cost.first_touch_s(job.longest)
    together_s = _least_s(job, cost.stage_terms(), rooms, cost, offload) / layout.data_parallel
    slowest = lengths.take(np.array([np.argmax(lengths.output_tokens)]))
    alone_s = _least_s(JobSums.of(slowest, cost), [cost.terms()], rooms, cost, offload)
    return max(together_s, alone_s)


@dataclass(frozen=True, slots=True, eq=False)
class JobSums:
    """What any schedule of a job has to do, as sums over its rows.

    Of prompts, only what a row does not share counts where something is computed or held. Sums by `own` prompt length:

    Args:
        own: `[lengths]` those that occur, rising.
        rows: `[lengths]` rows of each.
        prompts: `[lengths]` whole prompts of these rows, summed.
        outputs: `[lengths]` the longest output among them.
    """

    tokens: float
    samples: float
    contexts: float
    windowed_contexts: float
    pairs: float
    windowed_pairs: float
    held: float  # in steps that sample
    row_tokens: float  # KV memory of what a row keeps beside its KV, in tokens
    longest: int  # tokens of the longest row at its end
    largest: float  # that some row must find room for
    again: float  # own tokens for each token of context that a decode reads, at least
    longest_output: int
    own: Ints
    rows: Ints
    prompts: Floats
    outputs: Ints

    @classmethod
    def of(cls, lengths: Lengths, cost: CostModel) -> JobSums:
        prompts, outputs = lengths.prompt_tokens, np.minimum(lengths.output_tokens, lengths.limits)
        own = lengths.own_prompt_tokens
        shared, last = prompts - own, prompts + outputs - 1
        window, row_tokens = cost.shape.sliding_window, cost.shape.state_bytes / cost.shape.kv_bytes_per_token
        every, group = np.unique(own, return_inverse=True)
        longest_output = np.zeros(len(every), np.int64)
        np.maximum.at(longest_output, group, outputs)
        return cls(
            tokens=float((own + outputs - 1).sum()),
            samples=float(outputs.sum()),
            contexts=float((pairs_of(last) - pairs_of(prompts)).sum()),
            windowed_contexts=float((pairs_of(last, window) - pairs_of(prompts, window)).sum()),
            pairs=float((pairs_of(prompts) - pairs_of(shared)).sum()),
            windowed_pairs=float((pairs_of(prompts, window) - pairs_of(shared, window)).sum()),
            held=float((outputs * own + outputs * (outputs - 1) // 2).sum() + row_tokens * outputs.sum()),
            row_tokens=row_tokens,
            longest=int(last.max()),
            largest=float((own + outputs - 1).max()) + row_tokens,
            again=float((own / (prompts + 1)).min()),
            longest_output=int(outputs.max()),
            own=every,
            rows=np.bincount(group),
            prompts=np.bincount(group, weights=prompts).astype(np.float64),
            outputs=longest_output,
        )

    def chunks(self, step_tokens: float) -> Floats:
        """`[lengths]` steps that a prompt of each own length takes at least."""
        return np.ceil(self.own / step_tokens) if step_tokens < math.inf else np.ones(len(self.own))

    def chain(self, step_tokens: float) -> float:
        """Steps that the slowest row takes alone."""
        return float((self.outputs + self.chunks(step_tokens) - 1).max())

    def ends(self, step_tokens: float) -> float:
        """Contexts that chunks of at most so many tokens end at, summed."""
        chunks = self.chunks(step_tokens)
        return float((chunks * self.prompts).sum()) - self._missing(chunks, step_tokens)

    def area(self, step_tokens: float) -> float:
        """Tokens of KV that rows hold in all steps that they take part in."""
        earlier = self.chunks(step_tokens) - 1  # chunks, that sample nothing
        begun = float((earlier * self.rows * (self.own + self.row_tokens)).sum())
        return self.held + begun - self._missing(earlier + 1, step_tokens)

    def _missing(self, chunks: Floats, step_tokens: float) -> float:
        """What chunks before the last end short of their prompts."""
        return float((chunks * (chunks - 1) / 2 * self.rows).sum()) * step_tokens if chunks.max() > 1 else 0.0

    def most_prompts(self, kv_tokens: float) -> float:
        """Rows whose prompts fit into memory side by side."""
        sizes, rows = self.own + self.row_tokens, self.rows
        filled = np.cumsum(sizes * rows)
        full = int(np.searchsorted(filled, kv_tokens, side="right"))
        if full == len(sizes):
            return float(rows.sum())
        left = kv_tokens - (filled[full - 1] if full else 0.0)
        return float(rows[:full].sum()) + left / float(sizes[full])


def pairs_of(tokens: Ints, window: int = 0) -> Ints:
    """(query, key) pairs of so many leading positions, each of which sees itself and what is before it."""
    growing = np.minimum(tokens, window) if window else tokens
    pairs: Ints = growing * (growing + 1) // 2 + (tokens - growing) * window
    return pairs


def _least_s(
    job: JobSums, parts: Sequence[StepTerms], rooms: Sequence[StepRoom], cost: CostModel, offload: bool
) -> float:
    """The least total of all steps, over all ranges of step sizes, of the part that takes longest there."""
    link = link_tokens_per_s(cost) if offload else 0.0
    by_part = [[bound.seconds() for bound in room_bounds(job, part, rooms, link)] for part in parts]
    of_rooms: list[float] = [max(of_parts) for of_parts in zip(*by_part, strict=True)]
    return min(of_rooms)


def link_tokens_per_s(cost: CostModel) -> float:
    """Tokens of KV that come over the link in a second, at most: no copy is faster than one of a measured size."""
    link, shape = cost.profile.link, cost.shape
    fastest = max(point.bytes / min(point.copy_s("h2d"), point.copy_s("both")) for point in link.curve)
    stage_layers = shape.num_layers / cost.layout.pipeline_parallel
    token_bytes = shape.kv_bytes_per_token_per_layer * stage_layers * shape.kv_share(cost.layout.tensor_parallel)
    return fastest / token_bytes


def room_bounds(job: JobSums, terms: StepTerms, rooms: Sequence[StepRoom], link: float) -> Iterator[RoomBound]:
    """The bounds of a part of the model for each of the rooms, with a link of so many tokens a second, or 0."""
    beyond = TABLE + 1
    by_samples = [*enumerate(terms.samples_s[1:].tolist(), 1), (beyond, beyond * terms.sample_s)]
    by_tokens = [*enumerate(terms.tokens_s.tolist(), 1), (beyond, beyond * terms.token_s)]
    samples = lower_hull(by_samples, terms.sample_s).rising()
    full, windowed = lower_hull(*terms.full.decode), lower_hull(*terms.windowed.decode)
    hulls = lower_hulls(by_tokens, [min(room.step_tokens, beyond) for room in rooms])
    for room, hull in zip(rooms, hulls, strict=True):
        tokens = (hull.no_steeper(terms.token_s) if room.step_tokens > TABLE else hull).rising()
        yield RoomBound(job, terms, room, link, tokens, samples, full, windowed)


@dataclass(frozen=True, slots=True, eq=False)
class RoomBound:
    """The bound of steps of one range of sizes, of one part of the model.

    Args:
        job: what there is to do.
        terms: of a step.
        room: most tokens of a step, and memory beside it.
        link: tokens of KV that come over it in a second; 0 if none may.
        tokens: hull of what steps take by their tokens.
        samples: the same by samples, of steps that have some, before `in_step`, as the next.
        full: the same of a layer's decodes by their contexts.
        windowed: the same of a layer with a window.
    """

    job: JobSums
    terms: StepTerms
    room: StepRoom
    link: float
    tokens: Hull
    samples: Hull
    full: Hull
    windowed: Hull

    @property
    def fits(self) -> bool:
        return bool(self.link) or self.room.kv_tokens >= self.job.largest

    @property
    def in_step(self) -> float:
        """The least of these steps."""
        return float(self.terms.in_step[int(min(self.room.step_tokens, TABLE + 1)) - 1])

    @property
    def fewest(self) -> float:
        """Steps that it takes at least."""
        job, (step_tokens, kv_tokens) = self.job, self.room
        full = job.tokens / step_tokens * (1 + 1e-12)  # lest steps hold a token too many by rounding
        fewest = max(self.fewest_sampling, job.chain(step_tokens), full)
        return fewest if self.link else max(fewest, job.area(step_tokens) / kv_tokens)

    @property
    def fewest_sampling(self) -> float:
        """The fewest steps that sample."""
        job, longest, kv_tokens = self.job, float(self.job.longest_output), self.room.kv_tokens
        return longest if self.link else max(longest, job.held / kv_tokens, job.samples / job.most_prompts(kv_tokens))

    @property
    def context_s(self) -> float:
        """Seconds for each token of context that decodes read, at most."""
        full, windowed = self.terms.full.layers * self.full.slope, self.terms.windowed.layers * self.windowed.slope
        return self.in_step * (full + windowed)

    @property
    def chunks_s(self) -> float:
        """What longer chunks take of attention, whatever the number of steps."""
        job, full, windowed, most = self.job, self.terms.full, self.terms.windowed, self.room.step_tokens
        full_s = roofline(job.pairs * full.pair_s, job.ends(most) * full.read_s)
        # A query sees no more than all those of its chunk together.
        windowed_s = roofline(job.windowed_pairs * windowed.pair_s, job.windowed_pairs / most * windowed.read_s)
        return self.in_step * (full.layers * full_s + windowed.layers * windowed_s)

    def seconds(self) -> float:
        """The bound; infinite where not every row fits."""
        if not self.fits:
            return math.inf
        job, terms, (step_tokens, kv_tokens) = self.job, self.terms, self.room
        in_step, context_s, chunks_s, area = self.in_step, self.context_s, self.chunks_s, job.area(step_tokens)
        none_s, fewest, fewest_sampling = float(terms.samples_s[0]), self.fewest, self.fewest_sampling
        sampling = job.samples / self.samples.cheapest(none_s)  # steps, if there may be any number
        full_layers, windowed_layers = in_step * terms.full.layers, in_step * terms.windowed.layers

        def tokens_and_reads_s(steps: float, again: float) -> float:
            """Where so many tokens of context are computed again instead of being read."""
            return (
                self.tokens.of_steps(steps, job.tokens + job.again * again)
                + full_layers * self.full.of_steps(steps, job.contexts - again)
                + windowed_layers * self.windowed.of_steps(steps, max(0.0, job.windowed_contexts - again))
            )

        def total_s(steps: float) -> float:
            some = max(fewest_sampling, min(steps, sampling))
            device_s = in_step * (self.samples.of_steps(some, job.samples) + (steps - some) * none_s) + chunks_s
            if job.again * self.tokens.slope_after(job.tokens / steps) >= context_s:
                device_s += tokens_and_reads_s(steps, 0.0)
            else:
                device_s += least(lambda again: tokens_and_reads_s(steps, again), 0.0, job.contexts)
            busy_s = max(device_s, steps * terms.floor_s)
            if self.link:
                busy_s = max(busy_s, steps * terms.weights_s + (area - steps * kv_tokens) / self.link)
            return busy_s + steps * terms.overhead_s

        # More steps than these take longer by their first token alone.
        most = max(job.tokens, total_s(fewest) / (self.tokens.y[0] + terms.overhead_s))
        return least(total_s, fewest, max(fewest, most))
