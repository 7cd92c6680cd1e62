"""Pipelines in virtual time: the schedule drawn in `simulator.pipeline` to the second, and what holds for any job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vasuki.engine.batch import Batch
from vasuki.engine.policy import find_policy
from vasuki.engine.sequence import Request, Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import Copies, CostModel, StepTime, StepWork
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.simulator import PipelineResult, simulate, simulate_pipelines

BLOCK_TOKENS = 16


@dataclass
class OneSecondATokenOnEachStage:
    """Stands in for a cost model."""

    layout: Layout
    shape: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            num_layers=12, num_windowed_layers=0, kv_bytes_per_token_per_layer=1, backend="ragged"
        )
    )

    def batch_work(self, batch: Batch, copies: tuple[()] = (), shaped: object = None) -> StepWork:
        return StepWork.from_batch(batch)

    def stage_times(self, work: StepWork) -> list[StepTime]:
        return [StepTime(float(work.num_tokens))] * self.layout.pipeline_parallel

    def repeated(self, work: StepWork, num_steps: int, *more: object, **others: object) -> list[StepTime]:
        return [StepTime(float(work.num_tokens))] * num_steps


def engine(policy: str, chunk_tokens: int, max_num_seqs: int, num_blocks: int = 1000) -> EngineSettings:
    return EngineSettings(find_policy(policy), Limits(chunk_tokens, max_num_seqs), num_blocks, BLOCK_TOKENS)


def run(
    rows: list[tuple[int, int]],
    engine: EngineSettings,
    cost: Any,
    on_ended: Callable[[Sequence], None] = lambda sequence: None,
) -> PipelineResult:
    """Rows of (prompt tokens, output tokens)."""
    requests = (Request(row, row, prompt, output) for row, (prompt, output) in enumerate(rows))
    outputs = [output for _, output in rows]
    return simulate_pipelines(requests, outputs, engine, cost, on_ended=on_ended)


def test_the_drawn_schedule() -> None:
    """Prompts of 4, 4 and 8 tokens on three stages. The first fills the pipeline; the third makes the stages wait."""
    cost = OneSecondATokenOnEachStage(Layout(pipeline_parallel=3))
    result = run([(4, 1), (4, 1), (8, 1)], engine("sarathi", 100, 1), cost)
    assert list(result.completed_s) == [12, 16, 32]
    assert list(result.bubble_s) == list(result.step_bubble_s) == [4 + 8, 0, 4 + 8]
    assert result.busy_s == 3 * (4 + 4 + 8)
    assert result.idle_s == 24
    assert result.makespan_s == 32
    assert result.stats.steps == 3


def test_a_stream_waits_for_its_own_step_and_for_the_stage() -> None:
    """Two stages and one request of two tokens: its decode starts when its prompt has left the last stage."""
    cost = OneSecondATokenOnEachStage(Layout(pipeline_parallel=2))
    result = run([(5, 2)], engine("sarathi", 100, 4), cost)
    assert list(result.completed_s) == [5 + 5 + 1 + 1]
    # stage 1 waits 5 s for the prompt; stage 0 waits 5 s for the decode; stage 1 one more for it
    assert list(result.bubble_s) == [5 + 5 + 1]
    assert list(result.step_bubble_s) == [5, 5 + 1]


def test_replicas_share_the_queue() -> None:
    cost = OneSecondATokenOnEachStage(Layout(data_parallel=2))
    result = run([(10, 1), (4, 1), (4, 1), (3, 1)], engine("sarathi", 100, 1), cost)
    assert sorted(result.completed_s) == [4, 8, 10, 11]  # the third row goes to the replica that is free first
    assert result.bubble_share == 0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), max_size=25),
    policy=st.sampled_from(["vasuki", "sarathi", "orca", "vllm", "vllm-v0"]),
    chunk_tokens=st.integers(8, 40),
    num_blocks=st.integers(4, 30),
    stages=st.integers(1, 4),
    replicas=st.integers(1, 3),
)
def test_every_request_ends_once_and_time_adds_up(
    rows: list[tuple[int, int]], policy: str, chunk_tokens: int, num_blocks: int, stages: int, replicas: int
) -> None:
    cost = OneSecondATokenOnEachStage(Layout(pipeline_parallel=stages, data_parallel=replicas))
    ended: list[Sequence] = []
    result = run(rows, engine(policy, chunk_tokens, 4, num_blocks), cost, ended.append)
    too_long = sum(prompt + output - 1 > num_blocks * BLOCK_TOKENS for prompt, output in rows)
    assert sorted(sequence.request.row for sequence in ended) == list(range(len(rows)))
    assert sum(bool(sequence.error) for sequence in ended) == too_long
    assert len(result.step_bubble_s) == (result.stats.steps if stages > 1 else 0)
    assert sum(result.step_bubble_s) == result.idle_s
    assert len(result.completed_s) == len(result.bubble_s) == len(rows) - too_long
    assert all(0 <= bubble_s <= result.idle_s for bubble_s in result.bubble_s)
    assert result.busy_s + result.idle_s <= stages * replicas * result.makespan_s
    computed = [prompt + output - 1 for prompt, output in rows if prompt + output - 1 <= num_blocks * BLOCK_TOKENS]
    if not result.counters.preemptions_recompute:
        assert result.busy_s == stages * sum(computed)
    assert result.makespan_s >= stages * max(computed, default=0)


def test_one_stage_is_the_plain_simulation() -> None:
    cost = CostModel(named_shape("llama-2-7b"), find_profile("a100"))
    rows = [(50 + 37 * i % 400, 1 + 13 * i % 90) for i in range(60)]
    same = engine("sarathi", 128, 8)
    requests = [Request(row, row, prompt, output) for row, (prompt, output) in enumerate(rows)]
    plain = simulate(requests, [output for _, output in rows], same, cost)
    result = run(rows, same, cost)
    assert result.makespan_s == pytest.approx(plain.makespan_s, rel=1e-12)
    assert result.counters == plain.counters
    for name in ("steps", "sequence_steps", "max_seqs", "peak_device_blocks"):
        assert getattr(result.stats, name) == getattr(plain.stats, name)
    assert result.bubble_share == 0


@pytest.mark.parametrize("policy", ["vasuki", "sarathi", "static"])
def test_a_replica_without_stages_runs_as_it_would_alone(policy: str) -> None:
    """Of equal rows two replicas take as many each."""
    profile, shape, same = find_profile("a100"), named_shape("llama-2-7b"), engine(policy, 64, 8)
    requests = [Request(row, row, 60, 20) for row in range(16)]
    alone = simulate(requests, [20] * 16, same, CostModel(shape, profile))
    both = run([(60, 20)] * 32, same, CostModel(shape, profile, Layout(data_parallel=2)))
    assert len(both.completed_s) == 32
    assert both.makespan_s == pytest.approx(alone.makespan_s, rel=1e-12)
    assert both.stats.steps == 2 * alone.stats.steps


def test_stages_alike_cost_what_each_would() -> None:
    """32 layers on 5 stages: two stages have 7 layers, the first an embedding, the last the head."""
    cost = CostModel(named_shape("llama-2-7b"), find_profile("a100"), Layout(pipeline_parallel=5))
    result = run([(300, 1)], engine("sarathi", 512, 4), cost)
    work = StepWork.of([300], [300])
    each_s = [cost.stage(work, stage).total_s for stage in range(5)]
    assert [step.total_s for step in cost.stage_times(work)] == pytest.approx(each_s, rel=1e-12)
    assert len(set(each_s)) == 4
    assert result.makespan_s == pytest.approx(sum(each_s))


def test_copies_cost_each_stage_what_it_does_not_hide() -> None:
    copies = (Copies(to_host_bytes=1e9, overlapped=False), Copies(to_device_bytes=1e6))
    work = StepWork.of([300], [300], copies=copies)
    cost = CostModel(named_shape("llama-2-7b"), find_profile("a100"), Layout(pipeline_parallel=4))
    for stage, step in enumerate(cost.stage_times(work)):
        whole = cost.stage(work, stage)
        assert step.exposed_copy_s == whole.exposed_copy_s > 0
        assert step.hidden_copy_s == whole.hidden_copy_s > 0
        assert step.total_s == pytest.approx(whole.total_s, rel=1e-12)


def test_chunked_prefills_leave_fewer_bubbles() -> None:
    """Sarathi, 5.3: whole prompts hold the other micro-batches up, chunks do not."""
    cost = CostModel(named_shape("llama-2-7b"), find_profile("a100"), Layout(pipeline_parallel=4))
    rows = [(400 + 97 * i % 1500, 40 + 7 * i % 50) for i in range(120)]
    orca, sarathi = run(rows, engine("orca", 8, 8), cost), run(rows, engine("sarathi", 256, 8), cost)
    assert median(sarathi.bubble_s) < median(orca.bubble_s) / 3
    assert sarathi.makespan_s < orca.makespan_s


def test_memory_pressure_preempts_and_still_ends() -> None:
    cost = OneSecondATokenOnEachStage(Layout(pipeline_parallel=2))
    result = run([(16, 60)] * 8, engine("sarathi", 64, 4, num_blocks=8), cost)
    assert len(result.completed_s) == 8
    assert result.counters.preemptions_recompute > 0


@pytest.mark.parametrize("policy", ["static", "static-pd", "baton", "baton-preemptive"])
def test_whole_batches_and_their_padding_pass_through_stages(policy: str) -> None:
    """Two stages of half the layers take what one device does, for one batch at a time; bubbles are what is left."""
    shape, profile = named_shape("llama-2-7b"), find_profile("a100")
    rows = [(300, 20), (100, 4)]
    staged = run(rows, engine(policy, 1000, 2), CostModel(shape, profile, Layout(pipeline_parallel=2)))
    together = CostModel(shape, profile, Layout(pipeline_parallel=2))
    plain = simulate(
        [Request(row, row, *lengths) for row, lengths in enumerate(rows)], [20, 4], engine(policy, 1000, 2), together
    )
    assert staged.stats.steps == plain.stats.steps
    assert staged.makespan_s == pytest.approx(plain.makespan_s, rel=0.02)
    alone = run(rows, engine("orca", 1000, 2), together)
    assert staged.busy_s > alone.busy_s, "what is padded is computed in every stage"


def test_nothing_to_do() -> None:
    result = run([], engine("sarathi", 100, 1), OneSecondATokenOnEachStage(Layout(pipeline_parallel=2)))
    assert (result.makespan_s, result.stats.steps, result.bubble_share, result.stats.mean_seqs) == (0, 0, 0, 0)
