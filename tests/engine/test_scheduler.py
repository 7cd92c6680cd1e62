"""Random workloads through every policy: each row ends once, memory is never over-committed, nothing starves."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vasuki.base.errors import Interrupted, JobFileError, SchedulerStalled
from vasuki.engine.admission import peak_blocks
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.blocks import BlockPool
from vasuki.engine.loop import RunStats, drain
from vasuki.engine.offload import OffloadPlan
from vasuki.engine.policy import POLICIES, Admission, Mixing, Policy, find_policy, runnable_policy
from vasuki.engine.queues import Counters
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import FinishReason, Progress, Request, Sequence
from vasuki.engine.settings import EngineSettings, Limits

BLOCK_TOKENS = 4
EAGER = replace(POLICIES["vasuki"], admission=Admission.PROMPT)  # leaves decodes no room to grow
AHEAD = replace(POLICIES["vasuki"], admission=Admission.PEAK)  # with prompts computed ahead, in these tests
EXCLUSIVE = replace(POLICIES["vasuki"], mixing=Mixing.EXCLUSIVE)


def scheduler_of(policy: Policy, limits: Limits, num_blocks: int, host_blocks: int = 0, least: int = 4) -> Scheduler:
    """Parks sequences of at least a number of tokens."""
    offload = OffloadPlan(host_blocks=host_blocks, park_min_tokens=least, prefills_ahead=policy is AHEAD)
    return Scheduler(EngineSettings(policy, limits, num_blocks, BLOCK_TOKENS, offload))


class FakeExecutor:
    """Ends row i after `lengths[i]` tokens and checks every batch as it comes."""

    def __init__(self, lengths: list[int], scheduler: Scheduler, steps_ahead: int = 0) -> None:
        self.lengths = lengths
        self.scheduler = scheduler
        self.steps_ahead = steps_ahead
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> StepResult:
        self.scheduler.queues.check_integrity()
        seen = set()
        for chunk in batch.chunks:
            assert chunk.num_tokens >= 1
            assert chunk.sequence not in seen, "a sequence is in the batch twice"
            seen.add(chunk.sequence)
            assert chunk.start == chunk.sequence.num_computed_tokens
            assert chunk.samples == (chunk.end == chunk.sequence.num_tokens)
            assert len(chunk.sequence.block_table.device) * BLOCK_TOKENS >= chunk.end
        if self.scheduler.policy.chunked:
            assert sum(c.num_tokens for c in batch.chunks if c.num_tokens > 1) <= self.scheduler.limits.chunk_tokens
        assert len(batch.chunks) <= self.scheduler.limits.max_num_seqs
        self.batches.append(batch)
        sampled = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        tokens = [s.num_output_tokens for s in sampled]
        stopped = [s.num_output_tokens + 1 >= self.lengths[s.request.row] for s in sampled]
        return StepResult(tokens, stopped, elapsed_s=1.0)


class ListSink:
    def __init__(self) -> None:
        self.rows: list[Sequence] = []

    def write(self, sequence: Sequence) -> None:
        self.rows.append(sequence)

    def commit_if_due(self, now_s: float) -> None: ...


def run(
    rows: list[tuple[int, int, int]],
    policy: Policy,
    limits: Limits,
    num_blocks: int,
    host_blocks: int = 0,
    hope: int = 0,
    steps_ahead: int = 0,
) -> tuple[RunStats, Scheduler, FakeExecutor, ListSink]:
    """Drain rows of (prompt tokens, actual output, max_tokens), each estimated to end after `hope` tokens."""
    requests = [
        Request(i, i, prompt, maximum, prompt_token_ids=[t // 3 for t in range(prompt)], estimated_tokens=hope)
        for i, (prompt, _, maximum) in enumerate(rows)
    ]
    scheduler = scheduler_of(policy, limits, num_blocks, host_blocks)
    executor, sink = FakeExecutor([actual for _, actual, _ in rows], scheduler, steps_ahead), ListSink()
    stats = drain(requests, scheduler, executor, sink)
    scheduler.queues.check_integrity()
    assert scheduler.queues.pool.num_held == 0, "blocks leaked"
    return stats, scheduler, executor, sink


row = st.tuples(st.integers(1, 30), st.integers(1, 25), st.integers(1, 25))


@given(
    rows=st.lists(row, max_size=25),
    policy=st.sampled_from([*POLICIES.values(), AHEAD, EXCLUSIVE]),
    chunk_tokens=st.sampled_from([1, 3, 8, 64]),
    max_num_seqs=st.integers(1, 8),
    num_blocks=st.integers(6, 40),
    host_blocks=st.sampled_from([0, 4, 30]),
    lookahead=st.integers(1, 8),
    hope=st.sampled_from([0, 1, 5]),
    steps_ahead=st.integers(0, 1),
)
@settings(max_examples=400, deadline=None)
def test_every_row_ends_once_and_blocks_are_accounted_for(
    rows: list[tuple[int, int, int]],
    policy: Policy,
    chunk_tokens: int,
    max_num_seqs: int,
    num_blocks: int,
    host_blocks: int,
    lookahead: int,
    hope: int,
    steps_ahead: int,
) -> None:
    limits = Limits(chunk_tokens, max_num_seqs, lookahead)
    _, scheduler, _, sink = run(rows, policy, limits, num_blocks, host_blocks, hope, steps_ahead)
    assert sorted(sequence.request.row for sequence in sink.rows) == list(range(len(rows)))
    for sequence in sink.rows:
        prompt, actual, maximum = rows[sequence.request.row]
        if sequence.finish_reason is FinishReason.ERROR:
            assert scheduler.queues.pool.blocks_for(prompt + maximum - 1) > num_blocks
        else:
            assert sequence.output_token_ids == list(range(min(actual, maximum)))
            assert sequence.num_pending_tokens == 0
            assert sequence.finish_reason is (FinishReason.STOP if actual <= maximum else FinishReason.LENGTH)


@given(
    rows=st.lists(row, min_size=1, max_size=12),
    policy=st.sampled_from([*POLICIES.values(), AHEAD]),
    stops=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    host_blocks=st.sampled_from([0, 4]),
    steps_ahead=st.integers(0, 1),
)
def test_rows_go_on_after_every_stop_with_the_tokens_that_they_had(rows, policy, stops, host_blocks, steps_ahead):  # type: ignore[no-untyped-def]
    """What is unfinished says all that the next scheduler needs."""
    requests = [Request(i, i, prompt, most, prompt_token_ids=[0] * prompt) for i, (prompt, _, most) in enumerate(rows)]
    sink = ListSink()
    for stop in [*stops, sys.maxsize]:
        scheduler = scheduler_of(policy, Limits(8, 4), 20, host_blocks)
        executor, stats = FakeExecutor([actual for _, actual, _ in rows], scheduler, steps_ahead), RunStats()
        with suppress(Interrupted):
            drain(requests, scheduler, executor, sink, should_stop=lambda: stats.steps >= stop, stats=stats)  # noqa: B023
        ended = {sequence.request.row for sequence in sink.rows}
        progress = {sequence.request.row: sequence.progress for sequence in scheduler.unfinished()}
        requests = [
            replace(request, progress=progress.get(request.row, request.progress))
            for request in requests
            if request.row not in ended
        ]
    assert not requests
    assert sorted(sequence.request.row for sequence in sink.rows) == list(range(len(rows)))
    for sequence in sink.rows:
        _, actual, most = rows[sequence.request.row]
        if sequence.finish_reason is not FinishReason.ERROR:
            assert sequence.output_token_ids == list(range(min(actual, most)))


def test_a_row_that_had_ended_is_not_run_again() -> None:
    scheduler = scheduler_of(POLICIES["vasuki"], Limits(8, 4), 20)
    ended = scheduler.add(Request(0, 0, 3, 9, progress=Progress((1, 2), -0.5, FinishReason.STOP)))
    assert ended is not None
    assert (ended.output_token_ids, ended.logprob, ended.finish_reason) == ([1, 2], -0.5, FinishReason.STOP)
    assert scheduler.schedule() is None


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("policy", [POLICIES["vasuki"], EAGER, AHEAD])
def test_nothing_leaks_over_ten_thousand_rows(policy: Policy, steps_ahead: int) -> None:
    """Through a pool that is always full, with parking, host memory that runs out, and shared prefixes."""
    rows = [(1 + 7 * i % 20, 1 + 5 * i % 12, 20) for i in range(10_000)]
    _, scheduler, _, sink = run(rows, policy, Limits(64, 24), 20, 6, 0, steps_ahead)
    assert len(sink.rows) == len({sequence.request.row for sequence in sink.rows}) == len(rows)
    assert scheduler.queues.host_pool is not None
    assert scheduler.queues.host_pool.num_held == 0
    counters = scheduler.queues.counters
    assert counters.shared_tokens > 100
    if policy is AHEAD:
        assert counters.prefilled_ahead > 100
    elif policy is EAGER:
        assert min(counters.preemptions_swap, counters.preemptions_recompute) > 100


def steps_of(limits: Limits, num_steps: int) -> list[Batch]:
    """The first steps of two rows of up to 12 blocks and one with a long prompt, which have 20 blocks together."""
    scheduler = scheduler_of(POLICIES["vasuki"], limits, 20)
    for row, (prompt, max_tokens) in enumerate([(8, 41), (8, 41), (60, 5)]):
        scheduler.add(Request(row, row, prompt, max_tokens, prompt_token_ids=[row] * prompt))
    batches: list[Batch] = []
    for _ in range(num_steps):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update(batch, StepResult([1] * 3, [False] * 3, 1.0))
        batches.append(batch)
    return batches


def test_a_prompt_begins_before_all_its_room_is_free_and_leaves_decodes_theirs() -> None:
    batches = steps_of(Limits(16, 8), 6)
    assert [batch.num_prefill_tokens for batch in batches] == [16, 14, 14, 14, 6, 0]
    assert [len(batch.decodes) for batch in batches] == [0, 2, 2, 2, 2, 2]


def test_steps_are_short_while_a_usual_row_has_no_room() -> None:
    batches = steps_of(Limits(16, 8, short_step_tokens=8, usual_row_tokens=40), 4)
    assert [batch.num_tokens for batch in batches] == [16, 16, 8, 8]


def test_rows_that_can_never_run_are_committed_and_can_be_stopped() -> None:
    """However many follow one another, without a step in between."""

    class Sink(ListSink):
        seen = 0

        def commit_if_due(self, now_s: float) -> None:
            self.seen = len(self.rows)

    scheduler, sink = scheduler_of(POLICIES["vasuki"], Limits(64, 8), 6), Sink()
    requests = (Request(row, row, 0, 1, error="no prompt") for row in range(1000))
    with pytest.raises(Interrupted, match="stopped by a signal"):
        drain(requests, scheduler, FakeExecutor([], scheduler), sink, should_stop=lambda: len(sink.rows) >= 100)
    assert len(sink.rows) == sink.seen == 100


@pytest.mark.parametrize("host_blocks", [0, 6])
def test_a_row_that_had_stopped_before_it_was_preempted_is_forgotten(host_blocks: int) -> None:
    """Two rows fill the pool with their 12th token. The second has to go, and then turns out to have stopped."""
    scheduler = scheduler_of(POLICIES["vasuki"], Limits(64, 8), 6, host_blocks)
    for row in range(2):
        scheduler.add(Request(row, row, 8, 16, prompt_token_ids=[row] * 8, estimated_tokens=1))
    under_way: list[Batch] = []
    while len(under_way) < 2 or len(under_way[-1].decodes) != 1:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.advance(batch)
        under_way.append(batch)
        if len(under_way) > 2:
            scheduler.settle(under_way.pop(0), StepResult([1, 1], [False, False], 1.0))
    [kept], [_, gone] = under_way[1].decodes, under_way[0].decodes
    assert gone in (scheduler.queues.parked if host_blocks else scheduler.queues.waiting)
    assert scheduler.settle(under_way[0], StepResult([1, 2], [False, True], 1.0)) == [gone]
    assert (gone.output_token_ids, gone.finish_reason) == ([1, 1, 1, 1, 2], FinishReason.STOP)
    assert list(scheduler.queues.live()) == [kept]
    scheduler.queues.check_integrity()


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=12))
def test_peak_bounds_the_step_by_step_maximum(rows: list[tuple[int, int]]) -> None:
    sequences = [Sequence(Request(i, i, prompt, maximum)) for i, (prompt, maximum) in enumerate(rows)]
    held = [
        sum(-(-(prompt + step) // BLOCK_TOKENS) for prompt, maximum in rows if step < maximum)
        for step in range(max(maximum for _, maximum in rows))
    ]
    peak = peak_blocks(sequences, BLOCK_TOKENS)
    assert max(held) <= peak <= max(held) + len(rows)


def test_peak_admission_with_known_lengths_never_preempts() -> None:
    rows = [(5 + i % 7, 3 + (i * 5) % 17, 3 + (i * 5) % 17) for i in range(200)]
    careful = replace(POLICIES["vasuki"], admission=Admission.PEAK)
    _, scheduler, _, _ = run(rows, careful, Limits(16, 16), 36)
    assert scheduler.queues.counters.preemptions_recompute == 0
    _, scheduler, _, _ = run(rows, POLICIES["vasuki"], Limits(16, 16), 36)
    assert scheduler.queues.counters.preemptions_recompute > 0


def test_an_exclusive_prefill_phase_starts_only_when_enough_memory_is_free() -> None:
    rows = [(8, 3 + index % 9, 12) for index in range(60)]
    _, _, executor, _ = run(rows, EXCLUSIVE, Limits(16, 16, prefill_threshold=0.5), 40)
    prefilling = [bool(batch.prefills) for batch in executor.batches]
    assert all(not (batch.prefills and batch.decodes) for batch in executor.batches)
    phases = sum(now and not before for before, now in zip([False, *prefilling], prefilling, strict=False))
    _, _, executor, _ = run(rows, replace(EXCLUSIVE, mixing=Mixing.PREFILL_FIRST), Limits(16, 16), 40)
    prefilling = [bool(batch.prefills) for batch in executor.batches]
    assert phases < sum(now and not before for before, now in zip([False, *prefilling], prefilling, strict=False))


def test_an_exclusive_prompt_goes_on_when_no_row_decodes_any_more() -> None:
    """It was cut short by a row that ended since, and holds more than leaves room for another prefill phase."""
    apart = replace(EXCLUSIVE, shares_prefixes=False)
    _, _, executor, sink = run([(12, 2, 30), (60, 1, 1)], apart, Limits(16, 16, prefill_threshold=0.5), 18)
    assert [row.request.row for row in sink.rows] == [0, 1]
    kinds = [[len(batch.prefills), len(batch.decodes)] for batch in executor.batches]
    assert kinds[-2:] == [[0, 1], [1, 0]]


def test_an_exclusive_prompt_goes_on_when_all_that_decode_have_made_room() -> None:
    rows = [(1, 2, 2), (1, 3, 3), (11, 15, 15), (9, 13, 13), (14, 13, 13)]
    _, _, _, sink = run(rows, EXCLUSIVE, Limits(1, 3, 1), 11, 4)
    assert sorted(row.request.row for row in sink.rows) == [0, 1, 2, 3, 4]


def test_a_batch_shows_decodes_as_chunks_of_one_token() -> None:
    rows = [(3, 5, 5), (30, 5, 5)]
    _, _, executor, _ = run(rows, POLICIES["sarathi"], Limits(8, 8), 60)
    mixed = next(batch for batch in executor.batches if batch.decodes and batch.prefills)
    assert [chunk.num_tokens for chunk in mixed.chunks] == [1] * len(mixed.decodes) + [mixed.num_prefill_tokens]
    assert mixed.num_tokens == sum(chunk.num_tokens for chunk in mixed.chunks) == 8
    assert mixed.num_seqs == len(mixed.chunks)
    assert mixed.num_samples == sum(chunk.samples for chunk in mixed.chunks)


def test_a_decode_never_waits_for_a_prompt_when_mixed() -> None:
    rows = [(3, 20, 20), (30, 5, 5)]
    _, _, executor, _ = run(rows, POLICIES["sarathi"], Limits(4, 8), 60)
    first_row_steps = [b for b in executor.batches if any(c.sequence.request.row == 0 for c in b.chunks)]
    assert first_row_steps == executor.batches[:20]


def test_vllm_admits_by_the_chunk_and_has_the_last_row_leave() -> None:
    """Row 0 decodes along with the prompt of row 1, whose chunks take all other blocks. When row 0 needs one more, row
    1 has to go, though it is further on, and begins again."""
    rows = [(4, 12, 12), (26, 6, 6), (4, 1, 1)]
    _, scheduler, executor, sink = run(rows, POLICIES["vllm"], Limits(9, 8), 8)
    second = [(c.start, c.num_tokens) for b in executor.batches for c in b.chunks if c.sequence.request.row == 1]
    assert second[:3] == [(4, 5), (9, 8), (17, 8)], "chunks and decodes in one step, behind a shared block"
    assert min(start for start, _ in second[3:]) == 20, "again from what is left of its blocks"
    assert scheduler.queues.counters.preemptions_recompute > 0
    assert scheduler.queues.counters.preemptions_swap == 0
    first = [step for step, b in enumerate(executor.batches) if any(c.sequence.request.row == 0 for c in b.chunks)]
    assert first == list(range(12)), "who came first never waits"
    assert sorted(sequence.request.row for sequence in sink.rows) == [0, 1, 2]


def test_the_first_vllm_never_mixes() -> None:
    rows = [(5, 4, 9)] * 10
    _, _, executor, _ = run(rows, POLICIES["vllm-v0"], Limits(16, 4), 60)
    for batch in executor.batches:
        assert len({chunk.sequence.num_output_tokens > 0 or chunk.num_tokens == 1 for chunk in batch.chunks}) == 1


def test_static_batches_do_not_refill() -> None:
    rows = [(4, 1 + 5 * (i % 2), 6) for i in range(8)]
    _, _, executor, _ = run(rows, POLICIES["static"], Limits(64, 4), 60)
    first = {chunk.sequence.request.row for chunk in executor.batches[0].chunks}
    assert first == {0, 1, 2, 3}
    assert {c.sequence.request.row for b in executor.batches[:6] for c in b.chunks} == first


def test_shared_prefixes_are_computed_once() -> None:
    rows = [(20, 2, 2)] * 5
    _, scheduler, executor, _ = run(rows, POLICIES["vasuki"], Limits(64, 8), 60)
    assert scheduler.queues.counters.shared_tokens == 4 * 16  # all but the last, partial block
    assert sum(batch.num_tokens for batch in executor.batches) == 20 + 4 * 4 + 5 * 1


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.integers(1, 12)), min_size=2, max_size=30),
    num_blocks=st.integers(8, 24),
    lookahead=st.integers(1, 8),
    host_blocks=st.sampled_from([0, 10]),
)
@settings(max_examples=150, deadline=None)
def test_what_a_waiting_row_begins_with_is_evicted_last(
    rows: list[tuple[int, int, int]], num_blocks: int, lookahead: int, host_blocks: int
) -> None:
    """Rows of five families with a prefix each, and some tokens of their own."""
    requests = [
        Request(i, i, 12 + own, output, prompt_token_ids=[family] * 12 + [100 + i] * own, estimated_tokens=1)
        for i, (family, own, output) in enumerate(rows)
    ]
    scheduler = scheduler_of(POLICIES["vasuki"], Limits(16, 4, lookahead), num_blocks, host_blocks, least=8)
    pool = scheduler.queues.pool
    evict = pool._evict

    def checked_evict() -> None:
        cached = {key for key, block in pool._block_of.items() if not pool._references[block]}
        wanted = {
            key
            for sequence in scheduler.queues.waiting
            for key in sequence.prefix_keys[: (sequence.num_tokens - 1) // 4]
        }
        evict()
        lost = cached - pool._block_of.keys()
        assert len(lost) == 1
        assert not (lost & wanted) or cached <= wanted

    pool._evict = checked_evict  # type: ignore[method-assign]
    sink = ListSink()
    drain(requests, scheduler, FakeExecutor([output for _, _, output in rows], scheduler), sink)
    assert len(sink.rows) == len(rows)
    scheduler.queues.check_integrity()
    assert pool.num_held == 0
    assert not pool._wants


def test_a_wanted_prefix_outlives_one_that_was_used_later() -> None:
    """One row at a time; before the fourth, which begins like the first, the third needs some of the cached blocks."""
    beginnings = [[1] * 16, [2] * 16, [3] * 16, [1] * 16]
    shared = {}
    for lookahead in (1, 2):
        requests = [Request(i, i, 17, 1, prompt_token_ids=[*ids, 9]) for i, ids in enumerate(beginnings)]
        scheduler = scheduler_of(POLICIES["vasuki"], Limits(32, 1, lookahead), 10)
        drain(requests, scheduler, FakeExecutor([1] * 4, scheduler), ListSink())
        shared[lookahead] = scheduler.queues.counters.shared_tokens
    assert shared == {1: 4, 2: 16}, "a row's prefix is wanted as soon as it waits with the third"


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    pool = BlockPool(4, BLOCK_TOKENS)
    blocks = pool.allocate(4)
    for block, key in zip(blocks, "abcd", strict=True):
        pool.register(block, key)
    pool.want("ab")
    pool.release(blocks)
    for left in ("abc", "ab", "a", ""):
        pool.allocate(1)
        assert pool._block_of.keys() == set(left)


def test_optimistic_admission_recovers_from_rows_that_outlive_their_estimate() -> None:
    requests = [Request(i, i, 4, 40, estimated_tokens=2) for i in range(12)]
    scheduler = scheduler_of(POLICIES["vasuki"], Limits(16, 12), 24)
    sink = ListSink()
    drain(requests, scheduler, FakeExecutor([40] * 12, scheduler), sink)
    assert len(sink.rows) == 12
    assert scheduler.queues.counters.preemptions_recompute > 0
    assert scheduler.queues.counters.recomputed_tokens > 0


def test_a_prompt_is_computed_ahead_where_it_fits_and_its_row_does_not() -> None:
    """Two of the equal rows run side by side. The third has its prompt computed along with them, one chunk a step,
    leaves for the host before its second token, and goes on when the first has ended, with nothing computed twice."""
    rows = [(8, 12, 12)] * 4
    _, scheduler, executor, sink = run(rows, AHEAD, Limits(12, 8), 12, host_blocks=3)
    steps = [
        [step for step, batch in enumerate(executor.batches) if row in {c.sequence.request.row for c in batch.chunks}]
        for row in range(4)
    ]
    third, swaps = steps[2], [(swap.sequence.request.row, swap.to_host) for b in executor.batches for swap in b.swaps]
    assert swaps == [(2, True), (2, False)]
    assert scheduler.queues.counters == Counters(prefilled_ahead=1, shared_tokens=3 * BLOCK_TOKENS, finished=4)
    assert third[0] < steps[0][-1] < third[1], "one step along with the first row, the others after it"
    assert len(third) == 12, "nothing is computed twice"
    assert [sequence.request.row for sequence in sink.rows] == [0, 1, 2, 3]


def test_a_row_that_can_never_fit_is_named_with_the_room_it_needs() -> None:
    scheduler = scheduler_of(POLICIES["vasuki"], Limits(16, 4), 4)
    rejected = scheduler.add(Request(0, "long", 40, 10))
    assert rejected is not None
    assert "52 tokens" in rejected.error
    assert "16" in rejected.error


def test_policies_are_found_by_name() -> None:
    assert {name: find_policy(name) for name in POLICIES} == POLICIES
    with pytest.raises(JobFileError, match=r"'sarthi' .did you mean 'sarathi'"):
        find_policy("sarthi")


@pytest.mark.parametrize("name", list(POLICIES))
def test_policies_run_with_the_attention_that_they_need(name: str) -> None:
    if POLICIES[name].gathers:
        with pytest.raises(JobFileError, match=f"engine.policy: {name} gathers rows that arrive one by one"):
            runnable_policy(name, "auto")
        return
    assert runnable_policy(name, "padded") is POLICIES[name]
    if name.startswith(("static", "baton")):
        with pytest.raises(JobFileError, match=f"{name} pads its batches; a run does so with engine.attention: padded"):
            runnable_policy(name, "auto")
    else:
        assert runnable_policy(name, "ragged") is POLICIES[name]


def test_a_loop_that_comes_to_nothing_ends_with_a_picture_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fault would make it: whatever is computed is dropped before it samples."""
    scheduler = scheduler_of(POLICIES["vasuki"], Limits(4, 8), 6)

    def forgetful(batch: Batch) -> None:
        for chunk in batch.prefills:
            chunk.sequence.num_computed_tokens = 0

    monkeypatch.setattr(scheduler, "advance", forgetful)
    monkeypatch.setattr(FakeExecutor, "launch", lambda self, batch: StepResult([], [], 1.0))
    with pytest.raises(SchedulerStalled, match=r"without one of output; rows: 0 decoding, 1 in their prompt.*'r' at 0"):
        drain([Request(0, "r", 12, 3)], scheduler, FakeExecutor([3], scheduler), ListSink())


def test_rows_with_one_prompt_share_its_keys() -> None:
    prompt = np.arange(40, dtype=np.int32)
    scheduler = scheduler_of(POLICIES["vasuki"], Limits(16, 4, False), 20, 0, least=8)
    prompts = (prompt, prompt, prompt.copy(), prompt + 1)
    for row, each in enumerate(prompts):
        scheduler.add(Request(row, row, 40, 2, prompt_token_ids=each))
    first, same, equal, other = (sequence.prefix_keys for sequence in scheduler.queues.waiting)
    assert first is same
    assert first == equal != other


def prefills_of_steps(policy: str, rows: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(prompts, their tokens, decodes) of each step, with 16 tokens and 4 rows a step."""
    scheduler = Scheduler(EngineSettings(find_policy(policy), Limits(16, 4), 200, 4))
    for row, (prompt, output) in enumerate(rows):
        scheduler.add(Request(row, row, prompt, output))
    steps = []
    while (batch := scheduler.schedule()) is not None:
        steps.append((len(batch.prefills), batch.num_prefill_tokens, len(batch.decodes)))
        scheduler.update(batch, StepResult([0] * batch.num_samples, [False] * batch.num_samples, 1.0))
    return steps


def test_sarathi_as_published_has_a_chunk_of_one_prompt_in_a_batch() -> None:
    rows = [(20, 6), (6, 6), (3, 6)]
    assert prefills_of_steps("sarathi", rows)[:2] == [(1, 16, 0), (3, 13, 0)]
    assert prefills_of_steps("sarathi-paper", rows)[:4] == [(1, 16, 0), (1, 4, 0), (1, 6, 1), (1, 3, 2)]


def test_orca_at_best_starts_one_whole_prompt_a_step() -> None:
    rows = [(20, 6), (6, 6), (3, 6)]
    assert prefills_of_steps("orca-best", rows)[:4] == [(1, 20, 0), (1, 6, 1), (1, 3, 2), (0, 0, 3)]


def test_orca_at_worst_computes_no_prompt_beside_a_decode() -> None:
    steps = prefills_of_steps("orca-worst", [(20, 3), (6, 3), (3, 3), (5, 3), (9, 2)])
    assert steps == [(4, 34, 0), (0, 0, 4), (0, 0, 4), (1, 9, 0), (0, 0, 1)]
