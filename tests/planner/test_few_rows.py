"""Better orders for a few rows of known lengths: when they are looked for, and for how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vasuki.base.config import KVConfig, PlanConfig
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.few_rows import time_limit_s
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.planner.prediction import PLANNING_SHARE
from vasuki.planner.simulated import simulate_plan
from vasuki_solvers import Instance, Schedule, greedy_schedule, local_search

milp = pytest.importorskip("vasuki_solvers.milp")

LLAMA = named_shape("llama-3-8b")
A10 = find_profile("a10")
GREEDY = PlanConfig(solver="greedy")


def twelve(longest: int, seed: int = 0) -> Lengths:
    """Twelve rows, whose outputs are of very different lengths."""
    random = np.random.default_rng(seed)
    prompts, outputs = (random.integers(longest // 10, longest, 12) for _ in range(2))
    return Lengths(prompts, outputs, known=True)


def crowded(job: Lengths, plan: PlanConfig | None = None) -> Plan:
    """A plan with memory for about three rows at a time."""
    kv_tokens = 3 * int((job.prompt_tokens + job.output_tokens).mean())
    return make_plan(
        job, LLAMA, A10, plan=plan, kv=KVConfig(offload="none", device_memory=kv_tokens * LLAMA.kv_bytes_per_token)
    )


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time limits handed to the exact solver, which local search stands in for."""
    given: list[float] = []

    def recorded(instance: Instance, *, time_limit_s: float, **_: Any) -> Schedule:
        given.append(time_limit_s)
        return local_search(greedy_schedule(instance), iterations=500)

    monkeypatch.setattr(milp, "milp_schedule", recorded)
    return given


def test_a_better_order_is_looked_for_once_within_a_twentieth_of_the_job(limits: list[float]) -> None:
    job = twelve(2000, seed=1)
    greedy = crowded(job, GREEDY)
    plan = crowded(job)
    (limit_s,) = limits
    assert 0 < limit_s < PLANNING_SHARE * greedy.makespan_s
    assert plan.solver == "milp"
    assert plan.makespan_s < greedy.makespan_s
    assert simulate_plan(plan, job, LLAMA, A10).result.makespan_s == plan.makespan_s
    assert len(limits) == 1, "the run takes over what was found"


def test_a_short_job_has_no_time_for_the_exact_solver(limits: list[float]) -> None:
    job = twelve(60)
    plan = crowded(job)
    assert plan.makespan_s * PLANNING_SHARE < 1
    assert plan.solver in ("greedy", "local_search")
    assert not limits


def test_nothing_is_looked_for_where_the_bound_is_met(limits: list[float]) -> None:
    job = Lengths(np.full(12, 10), np.array([2000] + [100] * 11), known=True)
    plan = make_plan(job, LLAMA, A10)
    assert plan.optimal
    assert (plan.solver, plan.order) == ("greedy", ())
    assert not limits


@pytest.mark.parametrize(("known", "plan"), [(False, None), (True, GREEDY)])
def test_unknown_lengths_and_other_solvers_are_left_alone(
    known: bool, plan: PlanConfig | None, limits: list[float]
) -> None:
    assert crowded(replace(twelve(1000), known=known), plan).order == ()
    assert not limits


@pytest.mark.parametrize(
    ("makespan_s", "steps", "bound_steps", "spent_s", "limit_s"),
    [
        (100.0, 1000, 500, 0.0, 5.0),  # a twentieth
        (100.0, 1000, 500, 3.0, 2.0),  # less what is spent
        (100.0, 1000, 990, 0.0, 1.0),  # no more than can be saved
        (4.0, 100, 50, 0.3, -0.1),  # nothing is left
    ],
)
def test_the_time_is_what_may_be_saved_and_at_most_a_twentieth(
    makespan_s: float, steps: int, bound_steps: int, spent_s: float, limit_s: float
) -> None:
    assert time_limit_s(makespan_s, steps, bound_steps, spent_s) == pytest.approx(limit_s)
