from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import write_trace

from vasuki.base.errors import InputError
from vasuki.io.location import Location
from vasuki.io.output.trace import StepRecord
from vasuki.report.timeline import Counts, Timeline, bin_traces, read_timeline


def steps_of(durations: list[float], seqs: list[int], run: int = 0) -> list[StepRecord]:
    ends = np.cumsum(durations)
    return [
        StepRecord(float(end), duration, 10 * n, n, n, 0, kv_device_bytes=n, run=run)
        for end, duration, n in zip(ends, durations, seqs, strict=True)
    ]


def built(*traces: list[StepRecord], num_bins: int = 512) -> Timeline:
    timeline = bin_traces(traces, num_bins)
    assert timeline is not None
    return timeline


STEPS = st.lists(st.tuples(st.floats(1e-4, 50.0), st.integers(0, 300)), min_size=1, max_size=60)


@given(STEPS, st.sampled_from([2, 8, 64, 512]))
def test_binning_loses_neither_time_nor_work_nor_the_maximum(pairs: list[tuple[float, int]], num_bins: int) -> None:
    durations, seqs = [duration for duration, _ in pairs], [n for _, n in pairs]
    timeline = built(steps_of(durations, seqs), num_bins=num_bins)
    assert timeline.covered_s.size <= num_bins
    assert timeline.total_s == pytest.approx(sum(durations))
    assert timeline.covered_s.sum() == pytest.approx(sum(durations))
    assert np.all(timeline.covered_s <= timeline.bin_s * (1 + 1e-9))
    area = sum(duration * n for duration, n in pairs)
    assert (timeline.mean["seqs"] * timeline.covered_s).sum() == pytest.approx(area, abs=1e-9)
    assert timeline.peak["seqs"].max() == max(seqs)
    assert timeline.peak["tokens"].max() == 11 * max(seqs)
    assert np.all(timeline.mean["seqs"] <= timeline.peak["seqs"] + 1e-9)
    assert timeline.seqs.counts.sum() == timeline.num_steps == len(pairs)
    assert list(timeline.seqs.values) == sorted(set(seqs))


def test_a_long_step_fills_every_bin_it_covers() -> None:
    timeline = built(steps_of([1.0, 6.0, 1.0], [4, 2, 8]), num_bins=8)
    assert timeline.bin_s == pytest.approx(1.024)
    expected = [(1.0 * 4 + 0.024 * 2) / 1.024, 2, 2, 2, 2, 2, ((7 - 6 * 1.024) * 2 + (7 * 1.024 - 7) * 8) / 1.024, 8]
    assert timeline.mean["seqs"] == pytest.approx(expected)
    assert list(timeline.peak["seqs"]) == [4, 2, 2, 2, 2, 2, 8, 8]


def test_runs_follow_each_other_and_shards_run_side_by_side(tmp_path: Path) -> None:
    write_trace(tmp_path, steps_of([1.0, 1.0], [4, 4]))
    write_trace(tmp_path, steps_of([2.0], [6]))
    timeline = read_timeline(Location.parse(str(tmp_path)))
    assert timeline is not None
    assert (timeline.total_s, timeline.earlier_s, timeline.earlier_steps) == (4.0, 2.0, 2)
    shards = built(steps_of([1.0, 1.0], [4, 4]), steps_of([3.0], [8]))
    assert (shards.total_s, shards.earlier_s) == (3.0, 0.0)
    assert shards.mean["seqs"][0] == 6
    assert shards.mean["seqs"][-1] == 8


def test_tail_is_the_end_with_less_than_half_the_mean_batch() -> None:
    timeline = built(steps_of([0.5] * 20, [10] * 16 + [1] * 4))
    assert timeline.tail_s == pytest.approx(2.0, abs=2 * timeline.bin_s)
    assert built(steps_of([0.5] * 20, [10] * 20)).tail_s == 0.0


def test_step_errors_are_those_of_predicted_steps_alone() -> None:
    steps = [StepRecord(float(i + 1), 1.0, 0, 1, 1, 0, predicted_s=p) for i, p in enumerate([0.0, 0.9, 1.1, 1.3])]
    assert built(steps).median_step_error == pytest.approx(0.1, abs=2e-3)
    assert built(steps[:1]).median_step_error is None


def test_quantiles_of_counts() -> None:
    counts = Counts(np.array([1.0, 5.0, 9.0]), np.array([1.0, 2.0, 1.0]))
    assert [counts.quantile(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1, 1, 5, 5, 9]
    assert Counts(np.array([]), np.array([])).quantile(0.5) == 0.0


def test_no_trace_and_damaged_traces(tmp_path: Path) -> None:
    assert read_timeline(Location.parse(str(tmp_path))) is None
    assert bin_traces([[]]) is None
    with pytest.raises(InputError, match="runs backwards"):
        built([StepRecord(5.0, 1.0, 0, 1, 1, 0), StepRecord(2.0, 1.0, 0, 1, 1, 0)])


def test_many_steps_are_read_in_pieces() -> None:
    num_steps = 40_000
    timeline = built(steps_of([0.01] * num_steps, [i % 7 for i in range(num_steps)]))
    assert timeline.num_steps == num_steps
    assert timeline.total_s == pytest.approx(400.0)
    assert 256 <= timeline.covered_s.size <= 512
    assert timeline.mean["seqs"] == pytest.approx(np.full(timeline.covered_s.size, 3.0), abs=0.1)
