"""Seconds that no schedule of a job can beat under the cost model: the gap to them is all that planning can save.

A schedule is any sequence of steps in any order of rows, with prompts cut and mixed with decodes at will, preemption,
and KV on the host if that is allowed. With the sums of `job_sums`, and steps of at most M tokens that leave memory for
C(M) tokens of KV, N steps, of which K sample, can do a job only if

    K C >= held      N C >= held + what chunks that sample nothing hold      K >= samples / most prompts side by side
    K >= O           N >= O + ceil(P / M) - 1                                N >= tokens / M, N >= K

and take, since the terms of a step (`cost_model.terms`) are nowhere below their hulls (`vasuki_solvers.convex`),

    N tokens^(tokens / N) + r [K samples^(samples / K) + (N - K) samples(0)]
        + r layers [N decode^(contexts / N) + roofline(pairs, ends)]

or more: a roofline is a norm, and so the rooflines of all steps add up to at least the roofline of their sums. `ends`
are the contexts that chunks end at. The whole is convex in N and K. Its least value over both, and then over M, is the
bound.

*Computing again.* A row that lost its KV may sample its next token with the last chunk of what it computes again, and
reads nothing in a decode then. It costs the tokens of its own prompt at least; where these are cheaper than the read,
the read counts no more than they do.

*Offload.* What is not on the device when a step begins comes over the link before it ends, in z seconds together:
held <= N C + z link / KV bytes of a token. That holds whether layers are streamed or rows are parked.

*Several devices.* Each kind of pipeline stage sees all micro-batches of its replica one after the other, each with a
stage's share of the memory; the least total of all replicas is divided by their number. Bubbles are not counted, but
that no row is faster than alone is.

*Models whose rows are not packed.* Those that fill rows up to rectangles, or run them one by one, take longer for their
tokens than the terms say: they get the bound of packed steps, which holds for them too and is weaker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vasuki.machines.cost_model import TABLE, CostModel, StepTerms, roofline
from vasuki.planner.job_sums import InSteps, JobSums
from vasuki_solvers.convex import Hull, least, lower_hull, lower_hulls

# Ends of the ranges of step sizes, up to which a bound is made: four to a doubling.
MOST_STEP_TOKENS = (*(quarters << octave for octave in range(2, 10) for quarters in (4, 5, 6, 7)), TABLE)


class StepRoom(NamedTuple):
    """Steps of no more than `step_tokens`, and the KV tokens that a device has room for then, at most.

    For steps of a range of sizes, the room that the smallest leaves.
    """

    step_tokens: float
    kv_tokens: float


def step_rooms(kv_tokens: Callable[[int], float]) -> list[StepRoom]:
    """Every step size in a few ranges. `kv_tokens` tells the room that steps of a number of tokens leave, 0 if they
    do not fit."""
    ends = (*MOST_STEP_TOKENS, math.inf)
    rooms = [StepRoom(end, kv_tokens(start + 1)) for start, end in zip((0, *MOST_STEP_TOKENS), ends, strict=True)]
    if rooms[0].kv_tokens == rooms[-1].kv_tokens:  # memory that somebody has set
        rooms = rooms[-1:]
    return [room for room in rooms if room.kv_tokens > 0]


def schedule_bound_s(job: JobSums, cost: CostModel, rooms: Sequence[StepRoom], offload: bool = False) -> float:
    """Seconds that no schedule of a job of known lengths beats under a cost model.

    Args:
        job: with recorded or expected lengths; every row fits into some of the rooms.
        cost: the model on its device or devices, with weights on the host where they are.
        rooms: of one micro-batch, by rising step sizes: any schedule is in one of them.
        offload: whether KV may pass over the link.
    """
    if job.is_empty:
        return 0.0
    layout = cost.layout
    if layout.num_streams == 1:
        return _least_s(job, [cost.terms()], rooms, cost, offload) + cost.first_touch_s(job.longest)
    together_s = _least_s(job, cost.stage_terms(), rooms, cost, offload) / layout.data_parallel
    return max(together_s, _least_s(job.slowest(cost.shape), [cost.terms()], rooms, cost, offload))


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
    """The bounds of a part of the model for each of the rooms, with a link of `link` tokens a second, or 0."""
    beyond = TABLE + 1
    by_samples = [*enumerate(terms.samples_s[1:].tolist(), 1), (beyond, beyond * terms.sample_s)]
    by_tokens = [*enumerate(terms.tokens_s.tolist(), 1), (beyond, beyond * terms.token_s)]
    samples = lower_hull(by_samples, terms.sample_s).rising()
    full, windowed = lower_hull(*terms.full.decode), lower_hull(*terms.windowed.decode)
    hulls = lower_hulls(by_tokens, [min(room.step_tokens, beyond) for room in rooms])
    for room, hull in zip(rooms, hulls, strict=True):
        tokens = (hull.no_steeper(terms.token_s) if room.step_tokens > TABLE else hull).rising()
        yield RoomBound(job.in_steps(*room), terms, room, link, tokens, samples, full, windowed)


@dataclass(frozen=True, slots=True, eq=False)
class RoomBound:
    """The bound of steps of one range of sizes, of one part of the model.

    Args:
        job: what there is to do in such steps.
        terms: of a step.
        room: most tokens of a step, and the memory that it leaves.
        link: tokens of KV that come over it in a second; 0 if none may.
        tokens: hull of what steps take by their tokens.
        samples: the same by samples, of steps that have some, before `in_step`, as the next.
        full: the same of a layer's decodes by their contexts.
        windowed: the same of a layer with a window.
    """

    job: InSteps
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
        """The least `in_step` ratio of these steps."""
        return float(self.terms.in_step[int(min(self.room.step_tokens, TABLE + 1)) - 1])

    @property
    def fewest(self) -> float:
        """The fewest steps that do the job."""
        job, (step_tokens, kv_tokens) = self.job, self.room
        full = job.sums.tokens / step_tokens * (1 + 1e-12)  # lest steps hold a token too many by rounding
        fewest = max(self.fewest_sampling, job.chain, full)
        return fewest if self.link else max(fewest, job.area / kv_tokens)

    @property
    def fewest_sampling(self) -> float:
        """The fewest steps that sample."""
        job = self.job
        if self.link:
            return job.longest_output
        return max(job.longest_output, job.sums.held / self.room.kv_tokens, job.sums.samples / job.side_by_side)

    @property
    def chunks_s(self) -> float:
        """Seconds of attention of longer chunks, whatever the number of steps."""
        sums, full, windowed = self.job.sums, self.terms.full, self.terms.windowed
        full_s = roofline(sums.pairs * full.pair_s, self.job.ends * full.read_s)
        # A query sees no more than all queries of its chunk together.
        read_s = sums.windowed_pairs / self.room.step_tokens * windowed.read_s
        windowed_s = roofline(sums.windowed_pairs * windowed.pair_s, read_s)
        return self.in_step * (full.layers * full_s + windowed.layers * windowed_s)

    def seconds(self) -> float:
        """The bound; infinite where not every row fits."""
        if not self.fits:
            return math.inf
        job, sums, terms, kv_tokens = self.job, self.job.sums, self.terms, self.room.kv_tokens
        in_step, chunks_s = self.in_step, self.chunks_s
        none_s, fewest, fewest_sampling = float(terms.samples_s[0]), self.fewest, self.fewest_sampling
        sampling = sums.samples / self.samples.cheapest(none_s)  # steps, if there may be any number
        full_layers, windowed_layers = in_step * terms.full.layers, in_step * terms.windowed.layers

        def tokens_and_reads_s(steps: float, again: float) -> float:
            """Seconds if `again` tokens of context are computed again instead of being read."""
            return (
                self.tokens.of_steps(steps, sums.tokens + job.again * again)
                + full_layers * self.full.of_steps(steps, sums.contexts - again)
                + windowed_layers * self.windowed.of_steps(steps, max(0.0, sums.windowed_contexts - again))
            )

        def total_s(steps: float) -> float:
            some = max(fewest_sampling, min(steps, sampling))
            device_s = in_step * (self.samples.of_steps(some, sums.samples) + (steps - some) * none_s) + chunks_s
            # What the first token saves that is computed again; the next ones save no more, and take no less.
            saved_s = full_layers * self.full.slope_before(sums.contexts / steps)
            saved_s += windowed_layers * self.windowed.slope_before(sums.windowed_contexts / steps)
            if job.again * self.tokens.slope_after(sums.tokens / steps) >= saved_s:
                device_s += tokens_and_reads_s(steps, 0.0)
            else:
                device_s += least(lambda again: tokens_and_reads_s(steps, again), 0.0, sums.contexts)
            busy_s = max(device_s, steps * terms.floor_s)
            if self.link:
                busy_s = max(busy_s, steps * terms.weights_s + (job.area - steps * kv_tokens) / self.link)
            return busy_s + steps * terms.overhead_s

        # More steps than these take longer by their first token alone.
        most = max(sums.tokens, total_s(fewest) / (self.tokens.y[0] + terms.overhead_s))
        return least(total_s, fewest, max(fewest, most))
