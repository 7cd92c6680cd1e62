"""What any schedule of a job has to do, as sums over its rows.

Of rows of prompt P and output O, whatever the schedule,

    every position but the last sampled one passes a step           tokens   = sum(P + O - 1)
    every output token is sampled in a step of its own              samples  = sum(O)
    every one but the first by a decode, which reads its context    contexts = sum(P + 1, ..., P + O - 1)
    the prompt passes in chunks, whose queries see these keys       pairs    = sum(P (P + 1) / 2)
    a row that takes part in a step has its KV on the device        held     = sum(P, ..., P + O - 1) where they sample

What rows begin with in common is computed once, and held for nothing: `own` is the rest of a prompt. Sums of several
sets of rows add up, so a run can count the rows that end without keeping any of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from vasuki.base.arrays import Floats, Ints
from vasuki.models.shape import ModelShape
from vasuki.planner.lengths import Lengths

Number = TypeVar("Number", float, Floats)


class Sums(NamedTuple, Generic[Number]):
    """Sums over rows, or `[rows]` what each row adds to them. `windowed` is what a layer with a window sees of it."""

    tokens: Number
    samples: Number
    contexts: Number
    windowed_contexts: Number
    own_contexts: Number  # those that rows share with none
    windowed_own_contexts: Number
    pairs: Number
    windowed_pairs: Number
    held: Number


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Prompts by their own length, since how many chunks they pass in depends on the size of steps.

    Args:
        own: `[lengths]` the lengths that occur.
        rows: `[lengths]` how many prompts have each.
        tokens: `[lengths]` these prompts as a whole, summed.
        outputs: `[lengths]` the longest output among their rows.
        row_tokens: what a row keeps in addition to its KV, in tokens of KV memory.
    """

    own: Ints
    rows: Floats
    tokens: Floats
    outputs: Ints
    row_tokens: float

    @property
    def by_length(self) -> Prompts:
        """Prompts of one length put together, and sorted by length."""
        own, group = np.unique(self.own, return_inverse=True)
        outputs = np.zeros(len(own), np.int64)
        np.maximum.at(outputs, group, self.outputs)
        rows, tokens = (np.bincount(group, each, len(own)).astype(np.float64) for each in (self.rows, self.tokens))
        return Prompts(own, rows, tokens, outputs, self.row_tokens)

    def __add__(self, other: Prompts) -> Prompts:
        own, rows, tokens, outputs = (
            np.concatenate([getattr(self, name), getattr(other, name)]) for name in ("own", "rows", "tokens", "outputs")
        )
        return Prompts(own, rows, tokens, outputs, self.row_tokens).by_length

    @property
    def sizes(self) -> Floats:
        """`[lengths]` tokens of memory that a row of each takes once its prompt is computed."""
        return self.own.astype(np.float64) + self.row_tokens

    def chunks(self, step_tokens: float) -> Floats:
        """`[lengths]` steps that a prompt takes at least."""
        return np.ceil(self.own / step_tokens) if step_tokens < math.inf else np.ones(len(self.own))

    def ends(self, step_tokens: float) -> Floats:
        """`[lengths]` contexts that chunks of at most `step_tokens` end at, summed: no fewer than of chunks that end
        at P, P - M, P - 2 M, ..."""
        chunks = self.chunks(step_tokens)
        ends: Floats = chunks * self.tokens - self._missing(chunks, step_tokens)
        return ends

    def begun(self, step_tokens: float) -> Floats:
        """`[lengths]` tokens that rows hold in steps in which they sample nothing yet."""
        chunks = self.chunks(step_tokens)
        begun: Floats = (chunks - 1) * self.rows * self.sizes - self._missing(chunks, step_tokens)
        return begun

    def _missing(self, chunks: Floats, step_tokens: float) -> Floats:
        """What chunks before the last end short of their prompts."""
        missing: Floats = chunks * (chunks - 1) / 2 * self.rows * (step_tokens if step_tokens < math.inf else 0.0)
        return missing

    def side_by_side(self, kv_tokens: float) -> float:
        """Prompts that fit into memory together, if lengths rise."""
        sizes, rows = self.sizes, self.rows
        filled = np.cumsum(sizes * rows)
        full = int(np.searchsorted(filled, kv_tokens, side="right"))
        if full == len(sizes):
            return float(rows.sum())
        left = kv_tokens - (filled[full - 1] if full else 0.0)
        return float(rows[:full].sum()) + left / float(sizes[full])


class InSteps(NamedTuple):
    """A job as steps of limited size, with limited room for KV, have to do it.

    Args:
        sums: of its rows.
        area: tokens that rows hold, over all steps that they take part in.
        ends: contexts that chunks of prompts end at.
        chain: steps that the slowest row takes alone.
        longest_output: tokens of it.
        side_by_side: prompts that fit into memory together.
        largest: tokens that some row must find room for.
        again: own tokens for each token of context that a decode reads, at least.
    """

    sums: Sums[float]
    area: float
    ends: float
    chain: float
    longest_output: float
    side_by_side: float
    largest: float
    again: float


@dataclass(frozen=True, slots=True, eq=False)
class JobSums:
    """All that a bound asks about a job.

    Args:
        sums: over its rows.
        prompts: of its rows.
        longest: tokens of the longest row at its end.
        largest: the same without what it shares.
        again: see `InSteps`.
    """

    sums: Sums[float]
    prompts: Prompts
    longest: int = 0
    largest: int = 0
    again: float = math.inf

    @classmethod
    def of(
        cls, shape: ModelShape, prompts: npt.ArrayLike, outputs: npt.ArrayLike, own: npt.ArrayLike | None = None
    ) -> JobSums:
        """Sum up rows.

        Args:
            shape: of the model.
            prompts: `[rows]` tokens.
            outputs: `[rows]` tokens.
            own: `[rows]` tokens of the prompt that a row does not share; all if not given.

        Raises:
            ValueError: they differ in number, or one of them is below 1.
        """
        prompts, outputs = np.asarray(prompts, np.int64), np.asarray(outputs, np.int64)
        own = prompts if own is None else np.asarray(own, np.int64)
        if prompts.shape != outputs.shape or prompts.ndim != 1:
            raise ValueError(f"prompt and output lengths differ in shape: {prompts.shape} and {outputs.shape}")
        if len(prompts) and min(prompts.min(), own.min(), outputs.min()) < 1:
            raise ValueError("every request has at least one prompt token and one output token")
        row_tokens = shape.state_bytes / shape.kv_bytes_per_token
        return cls(
            Sums(*(float(each.sum()) for each in sums_of_rows(shape, prompts, outputs, own))),
            Prompts(own, np.ones(len(own)), prompts.astype(np.float64), outputs, row_tokens).by_length,
            longest=int((prompts + outputs - 1).max(initial=0)),
            largest=int((own + outputs - 1).max(initial=0)),
            again=float((own / (prompts + 1)).min(initial=math.inf)),
        )

    @classmethod
    def of_lengths(cls, shape: ModelShape, lengths: Lengths) -> JobSums:
        """Sum up rows whose outputs are as expected, of which nothing is computed yet."""
        outputs, own = np.minimum(lengths.output_tokens, lengths.limits), lengths.own_prompt_tokens
        job = cls.of(shape, lengths.prompt_tokens, outputs, own)
        if lengths.prefixes is None:
            return job
        starts, ends = lengths.prefixes.computed_once(lengths.prompt_tokens - own)
        sums, window = job.sums, shape.sliding_window
        once = Sums(*[0.0] * len(sums))._replace(
            tokens=float((ends - starts).sum()),
            pairs=float((pairs_of(ends) - pairs_of(starts)).sum()),
            windowed_pairs=float((pairs_of(ends, window) - pairs_of(starts, window)).sum()),
        )
        return replace(job, sums=Sums(*(a + b for a, b in zip(sums, once, strict=True))))

    def __add__(self, other: JobSums) -> JobSums:
        return JobSums(
            Sums(*(one + another for one, another in zip(self.sums, other.sums, strict=True))),
            self.prompts + other.prompts,
            max(self.longest, other.longest),
            max(self.largest, other.largest),
            min(self.again, other.again),
        )

    @property
    def is_empty(self) -> bool:
        return not self.sums.samples

    def slowest(self, shape: ModelShape) -> JobSums:
        """The sums of the row with the longest output alone, without what it shares."""
        prompts = self.prompts
        last = int(np.argmax(prompts.outputs))
        return JobSums.of(shape, prompts.own[[last]], prompts.outputs[[last]])

    def in_steps(self, step_tokens: float, kv_tokens: float) -> InSteps:
        """The job in steps of at most `step_tokens`, with room for `kv_tokens`."""
        sums, prompts = self.sums, self.prompts
        held = sums.held + prompts.row_tokens * sums.samples
        return InSteps(
            sums=sums._replace(held=held),
            area=held + float(prompts.begun(step_tokens).sum()),
            ends=float(prompts.ends(step_tokens).sum()),
            chain=float((prompts.outputs + prompts.chunks(step_tokens) - 1).max()),
            longest_output=float(prompts.outputs.max()),
            side_by_side=prompts.side_by_side(kv_tokens),
            largest=self.largest + prompts.row_tokens,
            again=self.again,
        )


def sums_of_rows(shape: ModelShape, prompts: Ints, outputs: Ints, own: Ints) -> Sums[Floats]:
    """`[rows]` what each row adds to the sums, without its state."""
    window, last, own_last, shared = shape.sliding_window, prompts + outputs - 1, own + outputs - 1, prompts - own
    amounts = (
        own_last,
        outputs,
        pairs_of(last) - pairs_of(prompts),
        pairs_of(last, window) - pairs_of(prompts, window),
        pairs_of(own_last) - pairs_of(own),
        pairs_of(own_last, window) - pairs_of(own, window),
        pairs_of(prompts) - pairs_of(shared),
        pairs_of(prompts, window) - pairs_of(shared, window),
        outputs * own + outputs * (outputs - 1) // 2,
    )
    return Sums(*(each.astype(np.float64) for each in amounts))


def pairs_of(tokens: Ints, window: int = 0) -> Ints:
    """(query, key) pairs of the first `tokens` positions, each of which sees itself and what is before it."""
    growing = np.minimum(tokens, window) if window else tokens
    pairs: Ints = growing * (growing + 1) // 2 + (tokens - growing) * window
    return pairs
