"""What steps cost whose rows don't share one packed forward: columns of rectangles, or calls row by row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vasuki.base.config import EngineConfig, JobConfig
from vasuki.commands.this_machine import placed_on
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.rectangles import MOST_PADDING, rectangles
from vasuki.engine.sequence import Request, Sequence
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.named import named_shape
from vasuki.models.shape import Way
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.report.plan_table import plan_table

SHAPE = replace(named_shape("llama-3-8b"), num_layers=4)
CARD = find_profile("a10")
SKEWED = Lengths(np.array([50, 60, 70, 4000] * 20), np.array([40, 50, 400, 40] * 20))


def cost_of(way: Way) -> CostModel:
    return CostModel(replace(SHAPE, way=way), CARD)


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
    assert sorted(i for group in groups for i in group) == list(range(len(chunks)))
    for group in groups:
        counts = [chunks[i][1] for i in group]
        assert len(group) * max(counts) <= MOST_PADDING * sum(counts)
    later = [i for group in groups for i in group if i >= num_decodes and chunks[i][0]]
    assert later == sorted(later)


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


@pytest.mark.parametrize("way", ["padded", "alone"])
@given(decodes=st.lists(st.integers(0, 900), max_size=9), prompts=st.lists(st.integers(2, 900), max_size=4))
def test_no_way_is_cheaper_than_packed(way: Way, decodes: list[int], prompts: list[int]) -> None:
    batch = batch_of(decodes, [(0, count) for count in prompts])
    packed, other = cost_of("ragged"), cost_of(way)
    packed_s = packed.step_time_s(packed.batch_work(batch))
    assert other.step_time_s(other.batch_work(batch)) >= packed_s * (1 - 1e-9) - 2e-5


def test_rows_of_one_length_are_a_rectangle_anyway() -> None:
    batch, packed, padded = batch_of([99] * 8, []), cost_of("ragged"), cost_of("padded")
    assert padded.step_time_s(padded.batch_work(batch)) == packed.step_time_s(packed.batch_work(batch))


def test_plans_say_which_backend_and_what_it_costs() -> None:
    ragged, padded, alone = (
        make_plan(SKEWED, replace(SHAPE, way=way), CARD, engine=EngineConfig(max_num_seqs=16))
        for way in ("ragged", "padded", "alone")
    )
    assert ragged.padding == 0.0
    assert 0.1 < padded.padding < alone.padding < 1.0
    assert padded.makespan_s > 1.1 * ragged.makespan_s
    assert "backend:" not in plan_table([ragged])
    assert "backend: padded; rows are filled up to rectangles" in plan_table([padded])
    assert "backend: padded, row by row" in plan_table([alone])
    assert padded.to_dict()["backend"] == {"way": "padded", "padding": padded.padding}


def test_the_backend_is_known_from_the_config_or_asked_for() -> None:
    bloom = {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": 100}
    assert shape_from_config(bloom).way == "padded"
    job = {"model": {"path": "x"}, "input": {"path": "x", "prompt": "{x}"}, "output": {"path": "x"}}
    asked = JobConfig.model_validate({**job, "engine": {"attention": "padded"}})
    assert placed_on(asked, SHAPE, CARD).shape.way == "padded"
    assert placed_on(JobConfig.model_validate(job), SHAPE, CARD).shape.way == "ragged"
