"""The schedule bound as a linear program, to check the closed form: a little higher, in a second, not a tenth.

It sees two things more. No step holds more than memory does, so that long contexts keep its batch small, and a step of
S samples has S tokens or more. And the smaller a step, the more chunks a prompt passes in, each of which holds what is
before it. Of N steps of at most M tokens, with room for C tokens of KV, and hulls as in `schedule_bound`, unknown are

    n[j]       steps on vertex j of the hull of `tokens`, of T[j] tokens; one between two vertices is on both, in part
    s[v], d[v] the same on vertices of the hulls of `samples`, of steps that have some, and of decodes; s[0] has none
    m[k], t[k] steps whose samples are in range k, from S[k] to U[k], and the time they take, without overheads
    x[k, c]    samples of these steps whose rows hold tokens of class c, at least L[c]
    p[j, c]    prompt tokens in the steps n[j] whose position is of class c, at least L'[c]
    a          tokens of context that are computed again instead of being read

    minimise    sum(t) + overhead N
    such that   sum(n) = sum(s) = sum(d) = sum(m) = N >= fewest of the closed form
                N - s[0] >= fewest that sample
                sum(T n) >= tokens + again a,   sum(S s) >= samples,   sum(D d) >= contexts - a
                sum(t) >= the closed form's seconds, at these places of the hulls
                t[k] >= max(floor, tokens^(S[k]) + r samples(S[k])) m[k]
                sum over k of x[k, c] = rows of the class,   sum over c of x[k, c] <= U[k] m[k]
                sum over c of L[c] x[k, c] <= C m[k]                                      offload: + link t[k]
                sum over j of p[j, c] = positions of the class,   sum over c of p[j, c] <= T[j] n[j]
                held - prompts + sum(L'[c] / T[j] p[j, c]) <= C N                         offload: + link sum(t)

A chunk of n tokens holds at its end more than the mean of its positions, which is an n-th of their sum, and no chunk of
a step of T tokens has more than T.

Holds up to the solver's tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from vasuki.base.arrays import Floats, Ints
from vasuki.machines.cost_model import CostModel
from vasuki.planner.job_sums import JobSums, Prompts
from vasuki.planner.lengths import Lengths
from vasuki.planner.schedule_bound import RoomBound, StepRoom, link_tokens_per_s, room_bounds
from vasuki_solvers.convex import Hull

CLASSES = 12  # of contexts, and of positions
RANGES_PER_OCTAVE = 6  # of samples
MOST_SAMPLES = 2048.0  # in a range with an end

Columns = Ints  # numbers of unknowns
Classes = tuple[Floats, Floats]  # the least size of each, and how many are in it
Terms = tuple[Columns, Floats | float]


def schedule_lp_s(lengths: Lengths, cost: CostModel, rooms: Sequence[StepRoom], offload: bool = False) -> float:
    """Seconds that no schedule beats, on one device. Arguments as for `schedule_bound_s`.

    Raises:
        ValueError: several devices.
    """
    if cost.layout.num_streams > 1:
        raise ValueError("stages and replicas have no linear program")
    job = JobSums.of_lengths(cost.shape, lengths)
    link = link_tokens_per_s(cost) if offload else 0.0
    bounds = [bound for bound in room_bounds(job, cost.terms(), rooms, link) if bound.fits]
    held, positions = _classes(*_held(lengths)), _classes(*_positions(lengths))
    return min(_Program(bound, job.prompts, held, positions).seconds() for bound in bounds) + cost.first_touch_s(
        job.longest
    )


def _held(lengths: Lengths) -> tuple[Ints, Ints]:
    """Sizes, and the samples in whose steps a row holds as many tokens of its own."""
    own, outputs = lengths.own_prompt_tokens, np.minimum(lengths.output_tokens, lengths.limits)
    return _occurrences(own, own + outputs)


def _positions(lengths: Lengths) -> tuple[Ints, Ints]:
    """Positions of own prompt tokens, counted from 1, and how many rows have them."""
    own = lengths.own_prompt_tokens
    return _occurrences(np.ones_like(own), own + 1)


def _occurrences(first: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The sizes from 1 on, and in how many of the ranges each is."""
    size = int(end.max()) + 1
    counts = np.cumsum(np.bincount(first, minlength=size) - np.bincount(end, minlength=size))
    return np.arange(1, size), counts[1:]


def _classes(sizes: Ints, counts: Ints) -> Classes:
    """`[CLASSES]` the least size of each class, and how many are in it; classes come to about the same sum."""
    filled = np.cumsum(sizes * counts)
    ends = np.unique(np.searchsorted(filled, filled[-1] * np.arange(1, CLASSES + 1) / CLASSES)) + 1
    starts = np.concatenate([[0], ends[:-1]])
    of_class = [(float(sizes[start]), float(counts[start:end].sum())) for start, end in zip(starts, ends, strict=True)]
    least, rows = np.array([each for each in of_class if each[1]]).T
    return least, rows


class _Program:
    """The program of one room, row by row."""

    def __init__(
        self, bound: RoomBound, prompts: Prompts, held: tuple[Floats, Floats], positions: tuple[Floats, Floats]
    ) -> None:
        self._costs: list[float] = []
        self._rows: list[tuple[Columns, Floats, float, float]] = []
        job, sums, terms, link = bound.job, bound.job.sums, bound.terms, bound.link
        step_tokens, kv_tokens = bound.room
        steps = self._columns(1, terms.overhead_s)
        again = self._columns(1)
        self._add([(steps, 1.0)], bound.fewest)
        self._add([(again, 1.0)], 0.0, sums.contexts)

        size, tokens, tokens_s = self._on_hull(bound.tokens, steps)
        self._add([(tokens, size), (again, -job.again)], sums.tokens)
        sampling, none = self._columns(1), self._columns(1)
        self._add([(steps, 1.0), (sampling, -1.0), (none, -1.0)], 0.0, 0.0)
        self._add([(sampling, 1.0)], bound.fewest_sampling)
        count, samples, samples_s = self._on_hull(bound.samples, sampling)
        self._add([(samples, count)], sums.samples)
        layers = bound.in_step * terms.full.layers, bound.in_step * terms.windowed.layers
        none_s = float(terms.samples_s[0])
        seconds: list[Terms] = [
            (tokens, tokens_s),
            (samples, bound.in_step * samples_s),
            (none, bound.in_step * none_s),
        ]
        for hull, contexts, of in (bound.full, sums.contexts, 0), (bound.windowed, sums.windowed_contexts, 1):
            read, decodes, decodes_s = self._on_hull(hull, steps)
            self._add([(decodes, read), (again, 1.0)], contexts)
            seconds.append((decodes, layers[of] * decodes_s))

        ranges = _ranges(step_tokens, sums.samples)
        fewest, most = np.array(ranges).T
        of_range, time = self._columns(len(ranges)), self._columns(len(ranges), 1.0)
        self._add([(of_range, 1.0), (steps, -1.0)], 0.0, 0.0)
        self._add([(time, 1.0), *_minus(seconds)], bound.chunks_s)
        samples_of = [bound.samples(s) if s else none_s for s in fewest]
        by_range_s = [
            max(terms.floor_s, bound.tokens(max(1.0, s)) + bound.in_step * of_samples_s)
            for s, of_samples_s in zip(fewest, samples_of, strict=True)
        ]
        for k, seconds_s in enumerate(by_range_s):
            self._add([(time[[k]], 1.0), (of_range[[k]], -seconds_s)], 0.0)

        least, rows = held[0] + prompts.row_tokens, held[1]
        rows_in = self._columns(len(ranges) * len(rows)).reshape(len(ranges), len(rows))
        for c, number in enumerate(rows):
            self._add([(rows_in[:, c], 1.0)], number, number)
        for k in range(len(ranges)):
            self._add([(rows_in[k], 1.0), (of_range[[k]], -most[k])], -math.inf, 0.0)
            room: list[Terms] = [(of_range[[k]], -kv_tokens), (time[[k]], -link)]
            self._add([(rows_in[k], least), *room], -math.inf, 0.0)

        position, number_at = positions
        prompts_in = self._columns(len(tokens) * len(position)).reshape(len(tokens), len(position))
        for c, number in enumerate(number_at):
            self._add([(prompts_in[:, c], 1.0)], number, number)
        for j, size_j in enumerate(size):
            self._add([(prompts_in[j], 1.0), (tokens[[j]], -size_j)], -math.inf, 0.0)
        earlier: list[Terms] = [(prompts_in[j], position / max(1.0, size_j)) for j, size_j in enumerate(size)]
        if step_tokens == math.inf:  # the ray stands for steps of any size
            earlier = earlier[:-1]
        begun = float(prompts.rows @ prompts.sizes)
        self._add([*earlier, (steps, -kv_tokens), (time, -link)], -math.inf, begun - sums.held)
        if link:
            self._add([(time, 1.0), (steps, kv_tokens / link - terms.weights_s)], job.area / link)

    def _on_hull(self, hull: Hull, steps: Columns) -> tuple[Floats, Columns, Floats]:
        """Places, unknowns and seconds of a hull's vertices, on which all steps stand, and last of its ray."""
        vertices = self._columns(len(hull.x))
        self._add([(vertices, 1.0), (steps, -1.0)], 0.0, 0.0)
        if hull.slope == math.inf:
            return np.array(hull.x), vertices, np.array(hull.y)
        ray = self._columns(1)
        return np.array([*hull.x, 1.0]), np.concatenate([vertices, ray]), np.array([*hull.y, hull.slope])

    def _columns(self, count: int, cost: float = 0.0) -> Columns:
        """Add this many unknowns, none of them negative."""
        start = len(self._costs)
        self._costs += [cost] * count
        return np.arange(start, start + count)

    def _add(self, terms: Iterable[Terms], lower: float, upper: float = math.inf) -> None:
        """A row: the terms come to no less than `lower` and no more than `upper`."""
        columns, values = zip(*[(each, np.broadcast_to(value, each.shape)) for each, value in terms], strict=True)
        self._rows.append((np.concatenate(columns), np.concatenate(values).astype(np.float64), lower, upper))

    def seconds(self) -> float:
        """The least cost. Raises RuntimeError if the solver finds none."""
        import highspy

        columns, values, lower, upper = zip(*self._rows, strict=True)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._costs), len(self._rows)
        lp.col_cost_, lp.col_lower_ = np.array(self._costs), np.zeros(len(self._costs))
        lp.col_upper_ = np.full(len(self._costs), np.inf)
        lp.row_lower_, lp.row_upper_ = np.array(lower), np.array(upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum([len(row) for row in columns])])
        lp.a_matrix_.index_, lp.a_matrix_.value_ = np.concatenate(columns), np.concatenate(values)
        highspy.Highs.resetGlobalScheduler(True)  # else it insists on the number of threads of the first solve
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 1)
        highs.passModel(lp)
        highs.run()
        if (status := highs.getModelStatus()) != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(f"the linear program has no solution: {highs.modelStatusToString(status)}")
        return float(highs.getInfo().objective_function_value)


def _minus(terms: Iterable[Terms]) -> list[Terms]:
    return [(columns, -np.asarray(values)) for columns, values in terms]


def _ranges(step_tokens: float, samples: float) -> list[tuple[float, float]]:
    """The fewest and the most samples of steps, range by range: 0, then each number while they are small."""
    most = min(step_tokens, samples)
    ends = [0.0, 1.0]
    while ends[-1] < min(most, MOST_SAMPLES):
        ends.append(min(most, max(ends[-1] + 1, math.floor(ends[-1] * 2 ** (1 / RANGES_PER_OCTAVE)))))
    if ends[-1] < most:
        ends.append(most)
    return [(0.0, 0.0), *((start + 1, end) for start, end in itertools.pairwise(ends))]
