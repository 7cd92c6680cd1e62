"""What recurrent layers cost: by groups of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hybrid import HYBRID

from vasuki.machines.cost_model import CostModel
from vasuki.machines.cost_model.rooflines import OperatorCost
from vasuki.machines.cost_model.stages import Part
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout

CARD = find_profile("a40").datasheet_only()
COST = CostModel(HYBRID, CARD)


def seconds(costs: tuple[OperatorCost, OperatorCost]) -> float:
    return sum(cost.total_s for cost in costs)


def test_each_prompt_passes_by_itself() -> None:
    """Weights are read again for each, where attending layers read them once a step."""
    whole, halves = (COST.step_time_s(COST.work(chunks, chunks)) for chunks in ([64], [32, 32]))
    plain = CostModel(replace(HYBRID, recurrent=None, attention_layers=None), CARD)
    assert halves > 1.3 * whole
    assert plain.step_time_s(plain.work([32, 32], [32, 32])) < 1.1 * plain.step_time_s(plain.work([64], [64]))


def test_parts_and_times_agree() -> None:
    """For steps that have as many tokens and samples, too."""
    for chunks in ([1] * 40, [1] * 8 + [32], [20, 20], [40], [1, 13, 13, 13]):
        work = COST.work(chunks, [each + 100 for each in chunks], 8)
        assert next(COST.repeated(work, 1)).total_s == pytest.approx(COST.step(work).total_s)
        assert COST.layer_time_s(work) < COST.step_time_s(work)


def test_states_count_for_each_row() -> None:
    light = CostModel(HYBRID.without_states, CARD)
    for rows in (1, 100):
        work = COST.work([1] * rows, [100] * rows)
        moved = COST.step(work).memory_bytes - light.step(work).memory_bytes
        assert moved == pytest.approx(2 * rows * HYBRID.state_bytes)


def test_devices_share_the_work() -> None:
    one, two = (
        CostModel(HYBRID, find_profile("a100").datasheet_only(), Layout(tensor_parallel=devices)) for devices in (1, 2)
    )
    for tokens in ([2048], [1] * 200):
        work = one.work(tokens, tokens)
        alone, shared = (seconds(cost._layers.recurrent(work)) for cost in (one, two))
        assert 0.45 * alone < shared < 0.75 * alone


def test_decodes_are_recorded_and_prompts_are_not() -> None:
    slow = CARD.model_copy(update={"overheads": CARD.overheads.model_copy(update={"launch_us": 4000})})
    cost = CostModel(HYBRID, slow)
    launches_s = Part.whole(HYBRID.num_layers, 1).launches_s(HYBRID, slow)
    assert cost.step_time_s(cost.work([1] * 64, [64] * 64)) < launches_s / 2
    assert cost.step_time_s(cost.work([1, 2], [64, 64])) >= launches_s
