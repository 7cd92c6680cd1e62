"""What knowing the lengths beforehand would have gained is never less than nothing."""

from __future__ import annotations

import numpy as np
import pytest

from vasuki.base.job_file import parse_job
from vasuki.machines.here.measured import MachineProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner.lengths import Lengths
from vasuki.planner.simulated import simulate_plan
from vasuki.runs.placement import Placement
from vasuki.runs.uncertainty import cost_of_uncertainty


def test_rows_could_have_been_run_as_they_were() -> None:
    config = parse_job(
        {
            "model": {"shape": "llama-3-8b"},
            "input": {"path": "-", "prompt_token_ids": "-"},
            "output": {"path": "-"},
        }
    )
    placement = Placement(config, named_shape("llama-3-8b"), MachineProfile.of(find_profile("a10")), config.kv)
    lengths = Lengths(np.full(40, 300), np.arange(20, 60), None, np.full(40, 400))
    plan = placement.plan(lengths)
    taken_s = simulate_plan(plan, lengths, placement.shape, placement.profile, plan_config=config.plan).plan.makespan_s
    added = cost_of_uncertainty(placement, plan, lengths)
    assert added is not None
    assert cost_of_uncertainty(placement, plan, lengths, taken_s) == added > 0
    assert cost_of_uncertainty(placement, plan, lengths, 1.5 * taken_s) == pytest.approx(1.5 * (1 + added) - 1)
    assert cost_of_uncertainty(placement, plan, lengths, 0.5 * taken_s) == 0
