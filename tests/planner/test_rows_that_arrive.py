"""Where rows arrive a step is as large as prompts need, whatever outputs become, and prompts and decodes share it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vasuki.base.config import EngineConfig
from vasuki.engine.policy import Admission, Mixing
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths

LLAMA = named_shape("llama-3-8b")


def lengths(output_tokens: int, arrive: bool) -> Lengths:
    rows = 400
    random = np.random.default_rng(0)
    prompts, outputs = random.integers(100, 1500, rows), np.full(rows, output_tokens)
    return Lengths(prompts, outputs, np.zeros(rows) if arrive else None, outputs)


@pytest.mark.parametrize("card", ["a10", "a40", "h100"])
def test_a_step_is_the_smallest_that_computes_prompts_at_nearly_full_speed(card: str) -> None:
    profile = find_profile(card)
    cost = CostModel(LLAMA, profile)

    def speed(tokens: int) -> float:
        return tokens / cost.step_time_s(cost.work([tokens], [tokens]))

    plans = [make_plan(lengths(output_tokens, True), LLAMA, profile) for output_tokens in (1, 40, 400)]
    (chunk_tokens,) = {plan.chunk_tokens for plan in plans}
    best = max(speed(tokens) for tokens in range(256, 4097, 256))
    assert speed(chunk_tokens) >= 0.95 * best
    assert speed(chunk_tokens // 2) < 0.95 * best
    assert all(plan.settings.policy.mixing is Mixing.MIXED for plan in plans)
    assert all(plan.settings.limits.short_step_tokens == 0 for plan in plans)


def test_a_job_whose_rows_are_all_there_is_planned_by_its_outputs() -> None:
    plans = [make_plan(lengths(output_tokens, False), LLAMA, find_profile("a10")) for output_tokens in (1, 400)]
    assert len({plan.chunk_tokens for plan in plans}) == 2


def test_what_the_job_says_is_kept() -> None:
    engine = EngineConfig(chunk_tokens=300)
    assert make_plan(lengths(40, True), LLAMA, find_profile("a10"), engine=engine).chunk_tokens == 300


def test_rows_of_which_nobody_knows_when_they_come_are_not_searched_over() -> None:
    """What suits rows that all come at once suits none that come one by one."""
    unknown, a40 = lengths(40, True), find_profile("a40")
    plan = make_plan(unknown, LLAMA, a40)
    assert "found by simulation" not in plan.mixing
    assert not plan.settings.policy.as_they_come
    assert plan.settings.policy.admission is Admission.ROOM
    known = replace(unknown, arrived_at_s=np.arange(len(unknown), dtype=np.float64) / 1000)
    assert "found by simulation" in make_plan(known, LLAMA, a40).mixing
