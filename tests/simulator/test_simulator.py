"""Virtual time: runs of steps equal single steps, arrivals are honoured, padded waves are charged, nothing drifts."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import POLICIES, Admission, Mixing, Policy
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner.lengths import Lengths
from vasuki.simulator import SimulationResult, simulate

SHAPE = replace(named_shape("llama-3-8b"), num_layers=4)
COST = CostModel(SHAPE, find_profile("a10"))
WINDOWED = CostModel(replace(SHAPE, num_windowed_layers=3, sliding_window=40), find_profile("a10"))
PADDED, ALONE = (CostModel(replace(SHAPE, backend=backend), find_profile("a10")) for backend in ("padded", "alone"))
BLOCK_TOKENS = 4


def lengths_of(rows: list[tuple[int, int]], arrived_at_s: list[float] | None = None) -> Lengths:
    prompts, outputs = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return Lengths(prompts, outputs, None if arrived_at_s is None else np.array(arrived_at_s))


def run(lengths: Lengths, engine: EngineSettings, cost: CostModel = COST, **more: Any) -> SimulationResult:
    arrivals = None if lengths.arrived_at_s is None else lengths.arrived_at_s.tolist()
    return simulate(lengths.requests(), lengths.output_tokens.tolist(), engine, cost, arrived_at_s=arrivals, **more)


def engine_of(policy: Policy | str, num_blocks: int = 60, **limits: int) -> EngineSettings:
    policy = POLICIES[policy] if isinstance(policy, str) else policy
    chosen = Limits(**{"chunk_tokens": 32, "max_num_seqs": 8, **limits})
    return EngineSettings(policy, chosen, num_blocks, BLOCK_TOKENS)


CAREFUL = replace(POLICIES["vasuki"], admission=Admission.PEAK)
VARIANTS = [
    *POLICIES.values(),
    CAREFUL,
    replace(POLICIES["vasuki"], mixing=Mixing.EXCLUSIVE),
]


@given(
    rows=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=25),
    policy=st.sampled_from(VARIANTS),
    chunk_tokens=st.sampled_from([3, 16, 64]),
    kv_tokens=st.integers(152, 480),
    block_tokens=st.sampled_from([1, BLOCK_TOKENS, 48]),
    short_steps=st.booleans(),
    host_tokens=st.sampled_from([0, 160]),
    ahead=st.booleans(),
    gap_s=st.sampled_from([None, 0.0, 0.05]),
    cost=st.sampled_from([COST, WINDOWED, PADDED, ALONE]),
)
@settings(max_examples=200, deadline=None)
def test_runs_of_steps_are_the_same_as_single_steps(
    rows: list[tuple[int, int]],
    policy: Policy,
    chunk_tokens: int,
    kv_tokens: int,
    block_tokens: int,
    short_steps: bool,
    host_tokens: int,
    ahead: bool,
    gap_s: float | None,
    cost: CostModel,
) -> None:
    lengths = lengths_of(rows, None if gap_s is None else [gap_s * index for index in range(len(rows))])
    host_blocks = -(-host_tokens // block_tokens)
    offload = OffloadPlan(host_blocks=host_blocks, park_min_tokens=8, prefills_ahead=ahead and policy is CAREFUL)
    limits = Limits(chunk_tokens, 6, lookahead=3)
    if short_steps:
        limits = replace(limits, short_step_tokens=(chunk_tokens + 1) // 2, usual_row_tokens=60)
    engine = EngineSettings(policy, limits, -(-kv_tokens // block_tokens), block_tokens, offload)
    together, single = run(lengths, engine, cost), run(lengths, engine, cost, one_by_one=True)
    assert together.makespan_s == single.makespan_s, "not the same to the last digit"
    assert together.counters == single.counters
    assert together.written == single.written
    assert together.written.rows == len(rows)
    assert together.written.output_tokens == lengths.output_tokens.sum()
    for name in ("steps", "sequence_steps", "max_seqs", "peak_device_blocks", "peak_host_blocks", "swapped_blocks"):
        assert getattr(together.stats, name) == getattr(single.stats, name), name


def test_steps_are_priced_by_the_cost_model() -> None:
    result = run(lengths_of([(40, 3)]), engine_of("sarathi"))
    work = [([32], [32], 0), ([8], [40], 1), ([1], [41], 1), ([1], [42], 1)]
    expected = sum(COST.step_time_s(COST.work(*step)) for step in work)
    assert result.makespan_s == pytest.approx(expected)
    assert result.stats.steps == 4
    assert result.stats.peak_device_blocks == 11  # the last sampled token is never stored


def test_repeated_steps_are_priced_like_single_ones() -> None:
    for card in ("a10", "cpu", "h100"):
        cost = CostModel(SHAPE, find_profile(card))
        first = cost.work([1, 1, 64], [500, 900, 200], num_samples=2)
        times = [step.total_s for step in cost.repeated(first, 5)]
        each = [cost.work([1, 1, 64], [500 + k, 900 + k, 200 + 64 * k], num_samples=2) for k in range(5)]
        assert times == pytest.approx([cost.step_time_s(work) for work in each], rel=1e-12)
        assert [step.total_s for step in cost.repeated(cost.work([1] * 3, [9] * 3), 1)] == pytest.approx(
            [cost.step_time_s(cost.work([1] * 3, [9] * 3))], rel=1e-12
        )


@pytest.mark.parametrize("chunk", [(), (1,), (8,)])
def test_windows_fill_up_step_by_step(chunk: tuple[int, ...]) -> None:
    """Decodes on both sides of a window of 40 tokens, alone or with a chunk that a prompt goes on with."""
    contexts = [9, 35, 39, 40, 41, 90]
    each = [
        WINDOWED.work([1] * len(contexts) + list(chunk), [c + k for c in contexts] + [33 + n * k for n in chunk])
        for k in range(12)
    ]
    rooms = [40 - context for context in (*contexts, *(33 for n in chunk if n == 1)) if context < 40]
    times = [step.total_s for step in WINDOWED.repeated(each[0], len(each), window_rooms=rooms)]
    assert times == pytest.approx([WINDOWED.step_time_s(work) for work in each], rel=1e-12)
    (stage,) = WINDOWED.stage_times(each[3])
    assert stage.total_s == pytest.approx(times[3], rel=1e-12)


def test_a_prompt_chunk_of_one_token_costs_what_a_decode_does() -> None:
    prompt = run(lengths_of([(33, 1)]), engine_of("sarathi"))
    decode = run(lengths_of([(32, 2)]), engine_of("sarathi"))
    assert prompt.stats.steps == decode.stats.steps == 2
    head_s = COST.step_time_s(COST.work([32], [32], 1)) - COST.step_time_s(COST.work([32], [32], 0))
    assert decode.makespan_s - prompt.makespan_s == pytest.approx(head_s)


def test_windowed_models_are_priced_with_their_windows() -> None:
    shape = replace(named_shape("gemma-2-9b"), num_layers=4, num_windowed_layers=2, sliding_window=64)
    windowed, full = (CostModel(replace(shape, num_windowed_layers=layers), find_profile("a10")) for layers in (2, 0))
    lengths = lengths_of([(4000, 40)] * 8)
    engine = engine_of("sarathi", num_blocks=20_000, chunk_tokens=512)
    assert run(lengths, engine, windowed).makespan_s < run(lengths, engine, full).makespan_s
    waves = engine_of("static", num_blocks=20_000)
    assert 0 < run(lengths, waves, windowed).makespan_s < run(lengths, waves, full).makespan_s
    streamed = run(lengths, replace(engine, offload=OffloadPlan(streamed_layers=2)), windowed)
    assert streamed.stats.exposed_copy_s + streamed.stats.hidden_copy_s > 0


def test_a_static_wave_pays_for_its_longest_row() -> None:
    even = run(lengths_of([(50, 20)] * 4), engine_of("static", max_num_seqs=4, num_blocks=400))
    uneven = run(lengths_of([(50, 20), (5, 2), (9, 1), (1, 7)]), engine_of("static", max_num_seqs=4, num_blocks=400))
    assert uneven.makespan_s == pytest.approx(even.makespan_s)
    assert uneven.stats.steps == even.stats.steps == 20


def test_a_static_batch_takes_only_what_its_padded_cache_holds() -> None:
    rows = [(40, 8), (4, 8), (4, 8), (4, 8)]
    engine = engine_of("static", num_blocks=36, max_num_seqs=4)
    result = run(lengths_of(rows), engine)
    assert result.stats.max_seqs == 3  # rows of 47 tokens take 12 blocks each, however short they are themselves


def test_rows_wait_for_their_arrival() -> None:
    alone_s = run(lengths_of([(10, 5)]), engine_of("vasuki")).makespan_s
    result = run(lengths_of([(10, 5), (10, 5)], [0.0, 100.0]), engine_of("vasuki"))
    assert result.makespan_s == pytest.approx(100 + alone_s)
    crowd = run(lengths_of([(10, 50)] * 3, [0.0, 0.01, 0.02]), engine_of("vasuki"))
    assert crowd.stats.max_seqs == 3
    assert crowd.makespan_s < 3 * run(lengths_of([(10, 50)]), engine_of("vasuki")).makespan_s


def test_streaming_costs_what_the_link_does_not_hide() -> None:
    lengths = lengths_of([(900, 60)] * 6)
    resident = engine_of("vasuki", num_blocks=2000, chunk_tokens=256)
    streaming = replace(resident, offload=OffloadPlan(streamed_layers=4))
    streamed, plain_s = run(lengths, streaming), run(lengths, resident).makespan_s
    pinned_s = COST.pinning_s(streaming)  # before the first step
    assert streamed.stats.exposed_copy_s > 0
    assert pinned_s == pytest.approx(0.27 * 4 * 2000 * BLOCK_TOKENS * SHAPE.kv_bytes_per_token_per_layer / 2**30)
    assert streamed.makespan_s == pytest.approx(plain_s + pinned_s + streamed.stats.exposed_copy_s)


def test_parking_moves_blocks_instead_of_computing_again() -> None:
    lengths = lengths_of([(60, 60)] * 8)
    engine = engine_of("sarathi", num_blocks=90)
    recomputed = run(lengths, engine)
    parked = run(lengths, replace(engine, offload=OffloadPlan(host_blocks=300)))
    assert recomputed.counters.preemptions_recompute > 0 == recomputed.stats.swapped_blocks
    assert parked.counters.preemptions_swap > 0 == parked.counters.recomputed_tokens
    assert parked.stats.swapped_blocks > 0
    assert parked.stats.exposed_copy_s > 0


def test_a_step_in_which_sequences_only_return_takes_the_time_of_their_copies() -> None:
    """Two rows that do not fit side by side to their ends: when one has ended, the other is on its way back."""
    cost = CostModel(SHAPE, find_profile("a100"))
    engine = engine_of("vasuki", num_blocks=36)
    lengths = lengths_of([(60, 60), (60, 60)])
    empty_s: list[float] = []

    class Watch:
        def record(self, now_s: float, batch: Batch, result: StepResult, *_: object) -> None:
            if not batch.num_seqs:
                empty_s.append(result.elapsed_s)

    parked = run(lengths, replace(engine, offload=OffloadPlan(host_blocks=60)), cost, observers=[Watch()])
    assert parked.counters.preemptions_swap == 1
    block_bytes = engine.block_tokens * SHAPE.kv_bytes_per_token
    copies_s = cost.profile.link.transfer_s(18 * block_bytes, 0, block_bytes / SHAPE.num_layers)
    assert empty_s == pytest.approx([copies_s])


def test_a_row_that_cannot_fit_fails_alone() -> None:
    result = run(lengths_of([(500, 5), (10, 5)]), engine_of("vasuki"))
    assert (result.written.rows, result.written.failed) == (2, 1)
    assert "needs KV memory for" in result.written.first_error


def test_memory_does_not_grow_with_the_rows() -> None:
    def peak_bytes(rows: int) -> int:
        lengths = Lengths(np.full(rows, 30, dtype=np.int64), np.full(rows, 4, dtype=np.int64))
        tracemalloc.start()
        simulate(lengths.requests(), lengths.output_tokens.data, engine_of("vasuki"), COST)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(50)  # warms caches up
    assert peak_bytes(3000) < peak_bytes(300) + 100_000


def test_memory_is_touched_once() -> None:
    """A job pays for the blocks that it holds at its peak, however many rows pass through them."""
    profile = find_profile("cpu")
    overheads = profile.overheads.model_copy(update={"first_touch_us_per_mib": 1e6})
    lazy = CostModel(SHAPE, profile.model_copy(update={"overheads": overheads}))
    for rows in ([(40, 9)] * 2, [(40, 9)] * 20):
        engine = engine_of("sarathi", max_num_seqs=2)
        result, at_once = run(lengths_of(rows), engine, lazy), run(lengths_of(rows), engine, CostModel(SHAPE, profile))
        touched = 2 * 12 * BLOCK_TOKENS  # 48 tokens each: the last one's KV is never stored
        assert result.makespan_s - at_once.makespan_s == pytest.approx(lazy.first_touch_s(touched))
