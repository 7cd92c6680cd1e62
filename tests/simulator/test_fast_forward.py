"""How many steps are taken as one, and what the scheduler looks like after them."""

from __future__ import annotations

import sys

import pytest

from vasuki.engine.batch import Batch
from vasuki.engine.loop import drain
from vasuki.engine.policy import POLICIES, Policy
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.simulator import CountingSink, SimulatedExecutor
from vasuki.simulator.fast_forward import FastForward

COST = CostModel(named_shape("llama-3-8b"), find_profile("a10"))


class Watched(FastForward):
    """Notes what was offered and taken, and checks the scheduler's books whenever steps were skipped."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.scheduler = scheduler
        self.offered: list[tuple[Batch, int]] = []
        self.skipped = 0

    def most_steps(self, batch: Batch, until_end: int = sys.maxsize) -> int:
        steps = super().most_steps(batch, until_end)
        self.offered.append((batch, steps))
        return steps

    def skip(self, batch: Batch, steps: int) -> None:
        super().skip(batch, steps)
        self.skipped += steps
        self.scheduler.queues.check_integrity()
        for chunk in batch.chunks:
            assert chunk.sequence.num_computed_tokens == chunk.start + steps * chunk.num_tokens
            held = len(chunk.sequence.block_table.device) * self.scheduler.queues.pool.block_tokens
            assert held >= chunk.sequence.num_computed_tokens + chunk.num_tokens, "no room for the batch's own step"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_no_more_steps_are_skipped_than_memory_and_prompts_allow(policy: Policy) -> None:
    rows = [(5 + index % 30, 1 + index % 20) for index in range(60)]
    settings = EngineSettings(policy, Limits(8, 16), num_blocks=30, block_tokens=4)
    scheduler = Scheduler(settings)
    fast_forward, sink = Watched(scheduler), CountingSink()
    executor = SimulatedExecutor(COST, [output for _, output in rows], settings, fast_forward)
    requests = (Request(row, row, prompt, 20) for row, (prompt, _) in enumerate(rows))
    stats = drain(requests, scheduler, executor, sink)
    offered = [steps for _, steps in fast_forward.offered]
    assert sink.rows == len(rows)
    assert stats.steps == len(offered) + fast_forward.skipped
    assert min(offered) == 1 < max(offered)
    assert fast_forward.skipped > 0
    for batch, steps in fast_forward.offered:
        assert steps == 1 or not any(chunk.samples for chunk in batch.prefills)
