"""What a job has to do adds up over its rows, and is counted while they end in memory that does not grow."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from hybrid import HYBRID
from hypothesis import given
from hypothesis import strategies as st

from vasuki.base.errors import Interrupted
from vasuki.engine.loop import drain
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Progress, Request
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lengths import Lengths
from vasuki.planner.rows_done import KEPT_ROWS, RowsDone
from vasuki.simulator.simulate import CountingSink
from vasuki.simulator.simulated_executor import SimulatedExecutor

LLAMA = replace(named_shape("llama-3-8b"), num_layers=4)
WINDOWED = replace(LLAMA, sliding_window=50, num_windowed_layers=2)
rows = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200), st.integers(1, 90)), min_size=1, max_size=30)


def numbers(job: JobSums) -> list[float]:
    prompts = job.prompts
    columns = np.concatenate([prompts.own, prompts.rows, prompts.tokens, prompts.outputs])
    return [*job.sums, job.longest, job.largest, job.again, prompts.row_tokens, *columns.tolist()]


@given(rows, st.sampled_from([LLAMA, WINDOWED, HYBRID]), st.sampled_from([7.0, 64.0, np.inf]))
def test_sums_of_parts_add_up(rows: list[tuple[int, int, int]], shape: ModelShape, step_tokens: float) -> None:
    shared, own, outputs = np.array(rows).T
    whole = JobSums.of(shape, shared + own, outputs, own)
    parts = [JobSums.of(shape, [a + b], [c], [b]) for a, b, c in rows]
    added = reduce(JobSums.__add__, parts, JobSums.of(shape, [], []))
    assert numbers(added) == pytest.approx(numbers(whole))
    assert added.in_steps(step_tokens, 500.0)[1:] == pytest.approx(whole.in_steps(step_tokens, 500.0)[1:])


def test_each_sum_by_hand() -> None:
    """A row of a window of 50 tokens: 20 shared, 40 of its own, 3 of output."""
    job = JobSums.of(WINDOWED, [60], [3], [40])
    assert job.sums._asdict() == {
        "tokens": 42,
        "samples": 3,
        "contexts": 61 + 62,
        "windowed_contexts": 50 + 50,
        "own_contexts": 41 + 42,
        "windowed_own_contexts": 41 + 42,
        "pairs": sum(range(21, 61)),
        "windowed_pairs": sum(range(21, 51)) + 10 * 50,
        "held": 40 + 41 + 42,
    }
    in_steps = job.in_steps(16, 100.0)
    assert in_steps.chain == 3 + 3 - 1
    assert in_steps.area == 40 + 41 + 42 + (40 - 16) + (40 - 32)
    assert in_steps.ends == 60 + (60 - 16) + (60 - 32)
    assert in_steps.side_by_side == 1


class Stops:
    """Ends a run after a number of looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __call__(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def run(requests: list[Request], outputs: list[int], looks: int = 10**9) -> tuple[RowsDone, Scheduler]:
    """Rows in virtual time, step by step, perhaps not to the end."""
    settings = EngineSettings(POLICIES["vasuki"], Limits(64, 16), 400, 4)
    scheduler, done = Scheduler(settings), RowsDone(LLAMA)
    executor = SimulatedExecutor(CostModel(LLAMA, find_profile("a10")), outputs, settings, None)
    try:
        drain(requests, scheduler, executor, CountingSink(), [done], Stops(looks))
    except Interrupted:
        done.count(scheduler.unfinished())
    return done, scheduler


def test_rows_count_as_far_as_they_came() -> None:
    outputs = [4 + 3 * row for row in range(12)]
    requests = [Request(row, row, 30 + row, 60) for row in range(12)]
    done, scheduler = run(requests, outputs, looks=20)
    lengths = done.lengths
    assert lengths is not None
    came = dict(zip((lengths.prompt_tokens - 30).tolist(), lengths.output_tokens.tolist(), strict=True))
    ended = {row for row, output in came.items() if output == outputs[row]}
    assert 0 < len(ended) < len(came)
    left = {row.request.row: len(row.output_token_ids) for row in scheduler.unfinished()}
    assert came == {row: outputs[row] for row in ended} | {row: count for row, count in left.items() if count}


def test_a_row_that_goes_on_counts_what_was_left_of_it() -> None:
    done, _ = run([Request(0, 0, 30, 60, progress=Progress((1,) * 5)), Request(1, 1, 8, 60)], [20, 3])
    lengths = done.lengths
    assert lengths is not None
    columns = (lengths.prompt_tokens, lengths.output_tokens, lengths.limits)
    assert sorted(np.stack(columns).T.tolist()) == [[8, 3, 60], [35, 15, 55]]
    assert numbers(done.sums) == pytest.approx(numbers(JobSums.of_lengths(LLAMA, lengths)))


def test_what_rows_find_in_memory_counts_once() -> None:
    text = np.arange(40, dtype=np.int32)
    requests = [Request(row, row, 50, 60, prompt_token_ids=text) for row in range(5)]
    done, _ = run(requests, [10] * 5)
    assert done.sums.sums.tokens == 5 * 59 - 4 * 40
    assert done.sums.sums.held == JobSums.of(LLAMA, [50, *[10] * 4], [10] * 5).sums.held


def test_many_rows_take_no_more_memory() -> None:
    random, done = np.random.default_rng(0), RowsDone(LLAMA)
    requests = [Request(row, row, int(random.integers(1, 30)), 9) for row in range(2 * KEPT_ROWS + 10)]
    outputs = random.integers(1, 10, len(requests)).tolist()
    done, _ = run(requests, outputs)
    assert done.lengths is None
    assert len(done._rows) <= KEPT_ROWS
    assert len(done.sums.prompts.own) <= 30
    prompts = np.array([request.num_prompt_tokens for request in requests])
    assert numbers(done.sums) == pytest.approx(numbers(JobSums.of_lengths(LLAMA, Lengths(prompts, np.array(outputs)))))
