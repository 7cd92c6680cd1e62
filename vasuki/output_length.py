"""How long an output will be: `max_tokens` at first, then what finished rows of similar prompt length took.

Finished rows tell too little at the start, because short outputs end first. Two imagined rows that ran to `max_tokens`
stand against that; with a few dozen real ones they no longer count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BUCKETS_PER_OCTAVE = 4  # of prompt lengths
BINS_PER_OCTAVE = 8  # of output lengths: quantiles are exact to 9 %
ENOUGH_ROWS = 16  # before a bucket speaks for itself
IMAGINED_ROWS = 2


@dataclass(slots=True)
class _Histogram:
    """Lengths seen, in logarithmic bins."""

    rows: int = 0
    tokens: int = 0
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, num_tokens: int) -> None:
        self.rows += 1
        self.tokens += num_tokens
        index = int(BINS_PER_OCTAVE * math.log2(num_tokens))
        self.bins[index] = self.bins.get(index, 0) + 1

    def mean(self, limit: int) -> float:
        return (self.tokens + IMAGINED_ROWS * limit) / (self.rows + IMAGINED_ROWS)

    def quantile(self, share: float, limit: int) -> float:
        """The upper end of the bin that holds the quantile."""
        wanted = share * (self.rows + IMAGINED_ROWS)
        for index in sorted(self.bins):
            wanted -= self.bins[index]
            if wanted <= 0:
                return float(2 ** ((index + 1) / BINS_PER_OCTAVE))
        return limit


class OutputLengths:
    """Learns from rows that ended. Memory is that of a few histograms.

    Args:
        quantile: what to estimate; None for the mean.
    """

    def __init__(self, quantile: float | None = None) -> None:
        self._quantile = quantile
        self._buckets: dict[int, _Histogram] = {}
        self._all = _Histogram()

    @property
    def rows(self) -> int:
        """Rows learned from."""
        return self._all.rows

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Learn from a row that ended."""
        if output_tokens > 0:
            self._all.add(output_tokens)
            self._buckets.setdefault(_bucket(prompt_tokens), _Histogram()).add(output_tokens)

    def estimate(self, prompt_tokens: int, max_tokens: int) -> int:
        """Tokens to expect, from 1 to `max_tokens`; `max_tokens` while too little is known."""
        seen = self._buckets.get(_bucket(prompt_tokens), self._all)
        if seen.rows < ENOUGH_ROWS:
            seen = self._all
        if seen.rows < ENOUGH_ROWS:
            return max_tokens
        expected = seen.mean(max_tokens) if self._quantile is None else seen.quantile(self._quantile, max_tokens)
        return max(1, min(max_tokens, round(expected)))


def _bucket(prompt_tokens: int) -> int:
    return int(BUCKETS_PER_OCTAVE * math.log2(max(1, prompt_tokens)))
