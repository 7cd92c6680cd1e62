"""How long an output will be: `max_tokens` at first, then what rows of similar prompt length have shown.

Rows that ended tell too little, because short outputs end first: of a thousand rows that have run for 50 steps, those
that ended all have at most 50 tokens. So rows that still run count with what they have produced. If outputs end at a
constant rate, the most likely mean is all tokens produced, divided by the number of rows that ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vasuki.base.arrays import Floats, Ints

BUCKETS_PER_OCTAVE = 4  # of prompt lengths
BINS_PER_OCTAVE = 8  # of output lengths: quantiles are exact to 9 %
ENOUGH_ROWS = 16  # that ended, before anything is estimated; that were seen, before neighbouring buckets are not asked
IMAGINED_ROWS = 1  # in every estimate: a row that ran to max_tokens


@dataclass(slots=True)
class _Bucket:
    """Rows of one range of prompt lengths."""

    ended: int = 0
    tokens: int = 0  # of rows that ended
    running: int = 0  # rows that still run and have produced something
    running_tokens: int = 0  # of those
    longest: int = 0  # that ended
    running_longest: int = 0  # so far
    bins: dict[int, int] = field(default_factory=dict)  # rows that ended, by the logarithm of their length

    def add(self, num_tokens: int) -> None:
        self.ended += 1
        self.tokens += num_tokens
        self.longest = max(self.longest, num_tokens)
        index = int(BINS_PER_OCTAVE * math.log2(num_tokens))
        self.bins[index] = self.bins.get(index, 0) + 1


class OutputLengths:
    """Learns from rows while they run and when they end. Memory is that of a few histograms.

    Args:
        quantile: what to estimate; None for the mean.
    """

    def __init__(self, quantile: float | None = None) -> None:
        self.rows = 0  # that ended
        self._quantile = quantile
        self._buckets: dict[int, _Bucket] = {}

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Learn from a row that ended."""
        if output_tokens > 0:
            self.rows += 1
            self._buckets.setdefault(_index(prompt_tokens), _Bucket()).add(output_tokens)

    def watch(self, running: Iterable[tuple[int, int]]) -> None:
        """Prompt and output tokens so far of all rows that run now."""
        for bucket in self._buckets.values():
            bucket.running = bucket.running_tokens = bucket.running_longest = 0
        for prompt_tokens, output_tokens in running:
            bucket = self._buckets.setdefault(_index(prompt_tokens), _Bucket())
            bucket.running += output_tokens > 0
            bucket.running_tokens += output_tokens
            bucket.running_longest = max(bucket.running_longest, output_tokens)

    @property
    def knows_enough(self) -> bool:
        """Whether estimates have learned anything."""
        return self.rows >= ENOUGH_ROWS

    def estimates(self, prompt_tokens: Ints, max_tokens: Ints) -> Ints:
        """`[rows]` tokens to expect, from 1 to `max_tokens`; `max_tokens` while too little is known."""
        if not self.knows_enough:
            return max_tokens
        expected = np.zeros(len(prompt_tokens))
        for rows, near in self._alike(prompt_tokens):
            expected[rows] = self._expected(near, max_tokens[rows])
        return np.clip(np.rint(expected).astype(np.int64), 1, max_tokens)

    def longest(self, prompt_tokens: Ints, max_tokens: Ints) -> Ints:
        """`[rows]` the most tokens that rows with such prompts have come to, up to `max_tokens`."""
        longest = np.zeros(len(prompt_tokens), np.int64)
        for rows, near in self._alike(prompt_tokens):
            longest[rows] = max([max(bucket.longest, bucket.running_longest) for bucket in near], default=0)
        return np.minimum(longest, max_tokens)

    def _alike(self, prompt_tokens: Ints) -> Iterator[tuple[Any, list[_Bucket]]]:
        """Rows whose prompts are about as long, as a mask, and the buckets that speak for them."""
        indices = np.floor(BUCKETS_PER_OCTAVE * np.log2(np.maximum(1, prompt_tokens))).astype(np.int64)
        for index in np.unique(indices).tolist():
            yield indices == index, list(self._near(index))

    def _expected(self, near: list[_Bucket], max_tokens: Ints) -> Floats:
        ended = sum([bucket.ended for bucket in near])
        if self._quantile is None:
            tokens = sum([bucket.tokens + bucket.running_tokens for bucket in near])
            return (tokens + IMAGINED_ROWS * max_tokens) / (ended + IMAGINED_ROWS)
        rows_below = self._quantile * (ended + IMAGINED_ROWS)
        for index in sorted({index for bucket in near for index in bucket.bins}):
            rows_below -= sum([bucket.bins.get(index, 0) for bucket in near])
            if rows_below <= 0:  # the upper end of the bin in which the wanted number of rows is reached
                return np.full(len(max_tokens), 2 ** ((index + 1) / BINS_PER_OCTAVE))
        return max_tokens.astype(np.float64)

    def _near(self, index: int) -> Iterator[_Bucket]:
        """The bucket and its neighbours, as far as it takes to have enough rows that ended or run.

        Where long outputs run, none has ended yet, and the short ones of distant buckets must not speak for them.
        """
        seen = 0
        for distance in range(64 * BUCKETS_PER_OCTAVE):
            for neighbour in {index - distance, index + distance}:
                if neighbour in self._buckets:
                    bucket = self._buckets[neighbour]
                    seen += bucket.ended + bucket.running
                    yield bucket
            if seen >= ENOUGH_ROWS:
                return


def _index(prompt_tokens: int) -> int:
    return int(BUCKETS_PER_OCTAVE * math.log2(max(1, prompt_tokens)))
