"""What steps cost whose rows don't share one packed forward: columns of rectangles, or calls row by row."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vasuki.base.config import EngineConfig, JobConfig
from vasuki.base.errors import ModelError
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.policy import POLICIES
from vasuki.engine.rectangles import MOST_PADDING, Rows, rectangles
from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.named import named_shape
from vasuki.models.shape import BACKENDS, Backend, Recurrent
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.report.plan_table import plan_table
from vasuki.runs.placement import placed_on
from vasuki.simulator import simulate

SHAPE = replace(named_shape("llama-3-8b"), num_layers=4)
CARD = find_profile("a10")
SKEWED = Lengths(np.array([50, 60, 70, 4000] * 20), np.array([40, 50, 400, 40] * 20))


def cost_of(backend: Backend) -> CostModel:
    return CostModel(replace(SHAPE, backend=backend), CARD)


def batch_of(decodes: list[int], prompts: list[tuple[int, int]]) -> Batch:
    """Decodes at these positions, and whole prompts or last chunks of them: (start, tokens)."""

    def sequence(row: int) -> Sequence:
        return Sequence(Request(row, row, 1, 1, np.zeros(1, np.int32)))

    chunks = [ScheduledChunk(sequence(100 + i), start, count, True) for i, (start, count) in enumerate(prompts)]
    return Batch([sequence(i) for i in range(len(decodes))], decodes, chunks, [])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), max_size=12), st.integers(0, 5))
def test_every_chunk_is_in_one_rectangle_of_little_padding(prompts: list[tuple[int, int]], num_decodes: int) -> None:
    chunks = [(9, 1)] * num_decodes + prompts
    groups = list(rectangles(chunks, num_decodes))
    assert sorted(i for group in groups for (i,) in group) == list(range(len(chunks)))
    for group in groups:
        counts = [chunks[i][1] for (i,) in group]
        assert len(group) * max(counts) <= MOST_PADDING * sum(counts)
    later = [i for group in groups for (i,) in group if i >= num_decodes and chunks[i][0]]
    assert later == sorted(later)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 300)), max_size=12), st.integers(0, 300))
def test_prompts_share_rows_where_that_costs_less(chunks: list[tuple[int, int]], longest_packed: int) -> None:
    def price(rows: int, new: int, width: int) -> float:
        return 100 + rows * new

    def cost(groups: list[Rows]) -> float:
        return sum(price(len(rows), max(sum(chunks[i][1] for i in row) for row in rows), 0) for rows in groups)

    apart, packed = (list(rectangles(chunks, 0, longest_packed, each)) for each in (None, price))
    assert sorted(i for rows in packed for row in rows for i in row) == list(range(len(chunks)))
    shared = [row for rows in packed for row in rows if len(row) > 1]
    assert all(chunks[i][0] == 0 and chunks[i][1] <= longest_packed for row in shared for i in row)
    for rows in packed:
        sizes = [sum(chunks[i][1] for i in row) for row in rows]
        assert len(rows) * max(sizes) <= MOST_PADDING * sum(sizes)
        assert max(sizes) == max(chunks[i][1] for row in rows for i in row), "no row is longer than the longest prompt"
    limits = [count for start, count in chunks if not start and count <= longest_packed]
    assert not limits or cost(packed) <= cost(apart) + 100  # those above the limit are a group of their own


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(0, 300))
def test_prompts_that_may_share_rows_do_where_they_always_do(lengths: list[int], longest_packed: int) -> None:
    packed, *others = rectangles([(0, length) for length in lengths], 0, longest_packed, None, always=True)
    may = sorted(length for length in lengths if length <= longest_packed)
    if may:
        rows = [[lengths[i] for i in row] for row in packed]
        assert sorted(length for row in rows for length in row) == may
        assert all(sum(row) <= may[-1] for row in rows)
        assert all(sum(first) + sum(second) > may[-1] for first, second in itertools.combinations(rows, 2))
    assert all(len(row) == 1 for rows in (others if may else [packed, *others]) for row in rows)


def test_prompts_share_rows_in_the_same_steps_as_their_price_says() -> None:
    """Calls of few tokens read the weights once each: one call is better. With many tokens each, padding decides."""
    cost = cost_of("padded")
    small = cost.batch_work(batch_of([], [(0, 60), (0, 38), (0, 22), (0, 30), (0, 28)]))
    assert (small.calls, small.num_chunks, small.num_tokens, small.num_samples) == (1, 3, 180, 5)
    assert small.chunk_pairs == 3 * 60 * 60
    large = cost.batch_work(batch_of([], [(0, 2400), (0, 1300), (0, 1250), (0, 1210)]))
    assert large.calls == 2


def test_decodes_read_the_columns_of_the_widest() -> None:
    work = cost_of("padded").batch_work(batch_of([9, 99], [(0, 40), (0, 50), (0, 500)]))
    assert work.decode_context_tokens == 2 * 100
    assert work.num_tokens == 2 + 2 * 50 + 500
    assert work.chunk_context_tokens == 2 * 50 + 500
    assert work.chunk_pairs == 2 * 50 * 50 + 500 * 500, "masked pairs are computed, too"
    assert (work.num_samples, work.calls) == (5, 3)


def test_rows_alone_are_calls_alone_and_prompts_start_over() -> None:
    work = cost_of("alone").batch_work(batch_of([9, 99], [(30, 10)]))
    assert (work.num_tokens, work.calls) == (2 + 40, 3)
    assert work.decode_context_tokens == 10 + 100


def test_rows_of_which_nothing_is_kept_are_computed_anew() -> None:
    work = cost_of("uncached").batch_work(batch_of([9, 99], [(30, 10)]))
    assert (work.num_tokens, work.num_samples, work.num_decodes, work.calls) == (10 + 100 + 40, 3, 0, 3)
    assert work.chunk_pairs == 10 * 10 + 100 * 100 + 40 * 40


@pytest.mark.parametrize("backend", ["alone", "uncached"])
def test_simulated_steps_of_such_rows_take_what_each_costs(backend: Backend) -> None:
    """Steps may be taken many at a time only where they follow from the first."""
    cost, settings = cost_of(backend), EngineSettings(POLICIES["vasuki"], Limits(64, 2), 40, 16)
    requests = [Request(row, row, 40, 20, np.zeros(40, np.int32), SamplingParams(max_tokens=20)) for row in range(3)]
    one, many = (simulate(requests, [20] * 3, settings, cost, one_by_one=each) for each in (True, False))
    assert many.makespan_s == pytest.approx(one.makespan_s)


@pytest.mark.parametrize("backend", ["padded", "alone", "uncached"])
@given(decodes=st.lists(st.integers(0, 900), max_size=9), prompts=st.lists(st.integers(2, 900), max_size=4))
def test_no_way_is_cheaper_than_packed(backend: Backend, decodes: list[int], prompts: list[int]) -> None:
    batch = batch_of(decodes, [(0, count) for count in prompts])
    packed, other = cost_of("ragged"), cost_of(backend)
    packed_s = packed.step_time_s(packed.batch_work(batch))
    assert other.step_time_s(other.batch_work(batch)) >= packed_s * (1 - 1e-9) - 2e-5


def test_rows_of_one_length_are_a_rectangle_anyway() -> None:
    batch, packed, padded = batch_of([99] * 8, []), cost_of("ragged"), cost_of("padded")
    assert padded.step_time_s(padded.batch_work(batch)) == packed.step_time_s(packed.batch_work(batch))


def test_plans_say_which_backend_and_what_it_costs() -> None:
    ragged, padded, alone, uncached = (
        make_plan(SKEWED, replace(SHAPE, backend=backend), CARD, engine=EngineConfig(max_num_seqs=16))
        for backend in BACKENDS
    )
    assert ragged.padding == 0.0
    assert 0.1 < padded.padding < alone.padding < uncached.padding < 1.0
    assert padded.makespan_s > 1.1 * ragged.makespan_s
    assert "backend:" not in plan_table([ragged])
    assert "backend: padded; rows are filled up to rectangles" in plan_table([padded])
    assert "backend: padded, row by row; rows share no step" in plan_table([alone])
    assert "from the first token each time" in plan_table([uncached])
    assert padded.to_dict()["backend"] == {"way": "padded", "padding": padded.padding}


def test_the_backend_is_known_from_the_config_or_asked_for() -> None:
    bloom = {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": 100}
    assert shape_from_config(bloom).backend == "padded"
    job = {"model": {"path": "x"}, "input": {"path": "x", "prompt": "{x}"}, "output": {"path": "x"}}
    asked = JobConfig.model_validate({**job, "engine": {"attention": "padded"}})
    assert placed_on(asked, SHAPE, CARD).shape.backend == "padded"
    assert placed_on(JobConfig.model_validate(job), SHAPE, CARD).shape.backend == "ragged"
    hybrid = replace(SHAPE, recurrent=Recurrent(2, (), 8, 8, 1), attention_layers=2)
    assert placed_on(asked, hybrid, CARD).shape.backend == "alone", "no mask keeps a state from padding"
    ragged = JobConfig.model_validate({**job, "engine": {"attention": "ragged"}})
    with pytest.raises(ModelError, match=r"the ragged backend cannot serve it.* its backend is padded"):
        placed_on(ragged, shape_from_config(bloom), CARD)
