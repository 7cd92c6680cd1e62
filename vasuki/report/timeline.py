"""A trace of any length in at most 512 bins of equal time, with memory that does not grow with the trace.

Steps are spread over the bins they cover, so a bin's mean is weighted by time and a long step shows as long as it was.
The maximum of each bin is kept as well as the mean: what binning smooths away stays visible. Bins start at a
millisecond; when a step ends beyond the last bin, neighbours are merged and bins are twice as wide.

    steps   |--a--|-b-|----------c----------|-d-|
    bins    |    0    |    1    |    2    |    3    |
    mean       a, b       b, c       c        c, d        weighted by overlap
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from vasuki.base.errors import InputError
from vasuki.io.location import Location
from vasuki.io.output.trace import TRACE, StepRecord, read_trace

Array = npt.NDArray[np.float64]

NUM_BINS = 512
_STEPS_AT_ONCE = 16384
_FIRST_BIN_S = 1e-3
_BINNED = ("prefill_tokens", "decode_tokens", "seqs", "waiting", "gathers", "kv_device_bytes", "kv_host_bytes")
_COLUMNS = ("t_s", "elapsed_s", "predicted_s", "swapped_blocks", "run", *_BINNED)
_ERROR_EDGES = np.append(np.linspace(0, 2, 2001), np.inf)  # |predicted / elapsed - 1| of a step


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Counts of how often each value occurred over steps."""

    values: Array  # [n], rising
    counts: Array  # [n]

    def quantile(self, share: float) -> float:
        """The smallest value that at least this share of steps does not exceed; 0 without steps."""
        if not self.values.size:
            return 0.0
        cumulative = np.cumsum(self.counts)
        index = int(np.searchsorted(cumulative, share * cumulative[-1]))
        return float(self.values[min(index, self.values.size - 1)])


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A trace in bins of equal time. Arrays are `[num_bins]`; bin i covers `i * bin_s` to `(i + 1) * bin_s`.

    Runs that went on where an earlier one was stopped follow each other without the gap between them. Shards, which
    run side by side, share the time axis: their means are averaged.
    """

    bin_s: float
    mean: dict[str, Array]  # by field of StepRecord, and `tokens`; weighted by time
    peak: dict[str, Array]
    covered_s: Array  # time in steps, of all shards
    elapsed_s: Array  # mean duration of the steps that ended in each bin; 0 where none did
    predicted_s: Array  # the same of what the cost model said
    seqs: Counts
    host_bytes: Counts
    num_steps: int
    total_s: float  # end of the last step
    earlier_s: float  # spent in steps of runs before the last
    earlier_steps: int
    median_step_error: float | None  # of |predicted / elapsed - 1|; None without predictions

    @property
    def t_s(self) -> Array:
        """Middle of each bin."""
        return np.asarray(self.bin_s * (np.arange(self.covered_s.size) + 0.5), np.float64)

    @property
    def tail_s(self) -> float:
        """Length of the end of the job that fewer than half of the mean number of sequences had to themselves."""
        seqs, weight = self.mean["seqs"], self.covered_s
        busy = np.flatnonzero(seqs >= 0.5 * np.average(seqs, weights=weight)) if weight.sum() else np.array([])
        return max(0.0, self.total_s - (int(busy[-1]) + 1) * self.bin_s) if busy.size else 0.0


def read_timeline(place: Location) -> Timeline | None:
    """Read the trace of a run folder, or its shards' traces. None if there is none.

    Raises:
        InputError: a line is not a step.
    """
    files = [place / TRACE]
    if not files[0].exists():
        files = [file for file in place.children() if file.name.startswith("trace-")]
    return bin_traces(read_trace(file) for file in files) if files else None


def bin_traces(traces: Iterable[Iterable[StepRecord]], num_bins: int = NUM_BINS) -> Timeline | None:
    """Bin the traces of shards that ran side by side, mostly one. None if there is no step.

    Raises:
        InputError: time runs backwards.
    """
    builder = _Builder(num_bins)
    for trace in traces:
        builder.add_trace(iter(trace))
    return builder.build() if builder.num_steps else None


@dataclass(slots=True)
class _Tally:
    """Occurrences of integers; grows with the number of distinct values."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, values: Array, weights: Array) -> None:
        distinct, inverse = np.unique(values, return_inverse=True)
        for value, number in zip(distinct, np.bincount(inverse, weights), strict=True):
            self.counts[int(value)] = self.counts.get(int(value), 0) + int(number)

    def build(self) -> Counts:
        pairs = sorted(self.counts.items())
        return Counts(np.array([value for value, _ in pairs], float), np.array([count for _, count in pairs], float))


class _Builder:
    def __init__(self, num_bins: int) -> None:
        self._num_bins = num_bins
        self._bin_s = _FIRST_BIN_S
        self._names = (*_BINNED, "tokens")
        self._area = np.zeros((len(self._names), num_bins))
        self._peak = np.zeros((len(self._names), num_bins))
        self._covered = np.zeros(num_bins)
        self._ended = np.zeros((3, num_bins))  # steps that end in the bin: their number, elapsed_s, predicted_s
        self._seqs = _Tally()
        self._host_bytes = _Tally()
        self._errors = np.zeros(_ERROR_EDGES.size - 1)
        self.num_steps = 0
        self._total_s = 0.0
        self._earlier_s = 0.0
        self._earlier_steps = 0

    def add_trace(self, steps: Iterator[StepRecord]) -> None:
        """Add one file. Its runs follow each other: each starts where the one before it ended."""
        columns = attrgetter(*_COLUMNS)
        run, run_start_s, end_s, run_steps = None, 0.0, 0.0, 0
        earlier_s, earlier_steps = 0.0, 0
        while chunk := [(*columns(step), _num_steps(step)) for step in islice(steps, _STEPS_AT_ONCE)]:
            table = np.array(chunk, float).T
            for first, last in _stretches(table[_COLUMNS.index("run")]):
                part = table[:, first:last]
                if run != part[_COLUMNS.index("run"), 0]:
                    run, run_start_s = part[_COLUMNS.index("run"), 0], end_s
                    earlier_s, earlier_steps = end_s, earlier_steps + run_steps
                    run_steps = 0
                end_s = self._add(part, run_start_s, end_s)
                run_steps += int(part[-1].sum())
        self._total_s = max(self._total_s, end_s)
        self._earlier_s = max(self._earlier_s, earlier_s)
        self._earlier_steps += earlier_steps

    def _add(self, table: Array, run_start_s: float, after_s: float) -> float:
        column = dict(zip((*_COLUMNS, "num_steps"), table, strict=True))
        num_steps = column["num_steps"]
        ends = column["t_s"] + run_start_s
        if np.any(np.diff(ends, prepend=after_s) < -1e-6):
            raise InputError("the trace is damaged: its time runs backwards")
        starts = np.maximum(ends - column["elapsed_s"], 0.0)
        while ends[-1] > self._num_bins * self._bin_s:
            self._merge_neighbours()
        values = np.vstack([*(column[name] for name in _BINNED), column["prefill_tokens"] + column["decode_tokens"]])
        self._spread(starts, ends, values)
        last = np.clip(np.ceil(ends / self._bin_s).astype(int) - 1, 0, self._num_bins - 1)
        for row, weight in enumerate((num_steps, column["elapsed_s"], column["predicted_s"])):
            self._ended[row] += np.bincount(last, weight, self._num_bins)
        self._seqs.add(column["seqs"], num_steps)
        self._host_bytes.add(column["kv_host_bytes"], num_steps)
        known = (column["predicted_s"] > 0) & (column["elapsed_s"] > 0)
        errors = np.abs(column["predicted_s"][known] / column["elapsed_s"][known] - 1)
        self._errors += np.histogram(errors, _ERROR_EDGES, weights=num_steps[known])[0]
        self.num_steps += int(num_steps.sum())
        return float(ends[-1])

    def _spread(self, starts: Array, ends: Array, values: Array) -> None:
        """Add each step to all bins that it overlaps: the first bin of every step, then the second, and so on."""
        first = np.clip((starts / self._bin_s).astype(int), 0, self._num_bins - 1)
        last = np.clip(np.ceil(ends / self._bin_s).astype(int) - 1, first, self._num_bins - 1)
        bins = first
        while bins.size:
            overlap = np.minimum(ends, (bins + 1) * self._bin_s) - np.maximum(starts, bins * self._bin_s)
            overlap = np.maximum(overlap, 0.0)
            self._covered += np.bincount(bins, overlap, self._num_bins)
            for row, value in enumerate(values):
                self._area[row] += np.bincount(bins, overlap * value, self._num_bins)
                np.maximum.at(self._peak[row], bins, value)
            longer = bins < last
            starts, ends, values, last = starts[longer], ends[longer], values[:, longer], last[longer]
            bins = bins[longer] + 1

    def _merge_neighbours(self) -> None:
        """Make bins twice as wide. The upper half becomes free."""
        half = self._num_bins // 2
        for sums in (self._area, self._covered, self._ended):
            merged = sums[..., 0::2] + sums[..., 1::2]
            sums[..., :half] = merged
            sums[..., half:] = 0.0
        merged = np.maximum(self._peak[:, 0::2], self._peak[:, 1::2])
        self._peak[:, :half] = merged
        self._peak[:, half:] = 0.0
        self._bin_s *= 2

    def build(self) -> Timeline:
        used = min(self._num_bins, max(1, int(np.ceil(self._total_s / self._bin_s - 1e-9))))
        covered = self._covered[:used]
        mean = self._area[:, :used] / np.where(covered > 0, covered, 1.0)
        ended, elapsed, predicted = self._ended[:, :used]
        return Timeline(
            bin_s=self._bin_s,
            mean=dict(zip(self._names, mean, strict=True)),
            peak=dict(zip(self._names, self._peak[:, :used], strict=True)),
            covered_s=covered,
            elapsed_s=elapsed / np.where(ended > 0, ended, 1.0),
            predicted_s=predicted / np.where(ended > 0, ended, 1.0),
            seqs=self._seqs.build(),
            host_bytes=self._host_bytes.build(),
            num_steps=self.num_steps,
            total_s=self._total_s,
            earlier_s=self._earlier_s,
            earlier_steps=self._earlier_steps,
            median_step_error=self._median_error(),
        )

    def _median_error(self) -> float | None:
        if not self._errors.sum():
            return None
        index = int(np.searchsorted(np.cumsum(self._errors), 0.5 * self._errors.sum()))
        return float(_ERROR_EDGES[index])


def _num_steps(step: StepRecord) -> int:
    """Steps that a record stands for: equal ones may share a record, and its times are then their sums."""
    return getattr(step, "num_steps", 1)


def _stretches(runs: Array) -> Iterator[tuple[int, int]]:
    """Intervals of equal run numbers."""
    edges = [0, *(np.flatnonzero(np.diff(runs)) + 1).tolist(), runs.size]
    yield from pairwise(edges)
