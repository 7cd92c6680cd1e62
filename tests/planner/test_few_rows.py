"""Better orders for a few rows: when they are looked for, for how long, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vasuki.base.config import EngineConfig, KVConfig, PlanConfig
from vasuki.base.errors import JobFileError
from vasuki.base.job_file import parse_job
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner import make_plan, plan_parallel
from vasuki.planner.few_rows import SOLVER_SHARE
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.planner.search import WORTH
from vasuki.planner.simulated import simulate_plan
from vasuki_solvers import Instance, Schedule, greedy_schedule, milp

pytestmark = pytest.mark.whole_search

LLAMA = named_shape("llama-3-8b")
A10 = find_profile("a10")


def with_solver(solver: str, **others: Any) -> PlanConfig:
    return PlanConfig().model_copy(update={"solver": solver, **others})


def some_rows(longest: int, rows: int = 12, seed: int = 0) -> Lengths:
    """Rows whose outputs are of very different lengths."""
    random = np.random.default_rng(seed)
    prompts, outputs = (random.integers(longest // 10, longest, rows) for _ in range(2))
    return Lengths(prompts, outputs, known=True)


def crowded(job: Lengths, plan: PlanConfig | None = None) -> Plan:
    """A plan with memory for about three rows at a time."""
    kv_tokens = 3 * int((job.prompt_tokens + job.output_tokens).mean())
    return make_plan(
        job, LLAMA, A10, plan=plan, kv=KVConfig(offload="none", device_memory=kv_tokens * LLAMA.kv_bytes_per_token)
    )


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time limits handed to the exact solver, which finds nothing better than greedy."""
    given: list[float] = []

    def recorded(instance: Instance, *, time_limit_s: float, **_: Any) -> Schedule:
        given.append(time_limit_s)
        return greedy_schedule(instance)

    monkeypatch.setattr(milp, "milp_schedule", recorded)
    return given


def test_a_few_rows_of_known_lengths_get_a_better_order_and_the_run_takes_it() -> None:
    job = some_rows(2000, seed=1)
    greedy, plan = crowded(job, with_solver("greedy")), crowded(job)
    assert plan.solver == "local_search"
    assert plan.makespan_s < greedy.makespan_s
    assert plan.order_gap is not None
    assert plan.order_gap > 0
    assert greedy.order_gap is None
    assert sorted(plan.order) == list(range(12))
    assert simulate_plan(plan, job, LLAMA, A10).result.makespan_s == plan.makespan_s


@pytest.mark.sweep
@pytest.mark.parametrize("solver", ["milp", "local_search"])
@pytest.mark.parametrize("seed", [0, 4])
def test_a_solver_that_is_asked_for_looks_and_is_never_behind(solver: str, seed: int) -> None:
    job = some_rows(300, 20, seed)
    others = [crowded(job, with_solver(other)) for other in ("greedy", "fifo")]
    plan = crowded(job, with_solver(solver, solver_time=1.0))
    assert plan.solver == solver
    assert plan.order_gap is not None
    assert plan.makespan_s <= (1 + WORTH) * min(other.makespan_s for other in others)


@pytest.mark.parametrize("expected", ["auto", "max"])
def test_outputs_that_the_run_is_not_told_order_nothing(expected: str) -> None:
    job = replace(some_rows(300, 20), known=False)
    others = replace(job, output_tokens=np.roll(job.output_tokens, 7))
    config = with_solver("milp", output_length=expected, solver_time=1e-9)
    plans = [crowded(rows, config) for rows in (job, others)]
    assert plans[0].order == plans[1].order != ()
    assert {plan.solver for plan in plans} == {"milp"}
    assert not any(plan.optimal for plan in plans)
    assert simulate_plan(plans[0], job, LLAMA, A10).result.makespan_s == plans[0].makespan_s


@pytest.mark.parametrize("solver", ["greedy", "milp"])
def test_rows_that_never_fit_leave_the_order_of_the_others_alone(solver: str) -> None:
    job = some_rows(1000)
    with_misfits = Lengths(
        np.insert(job.prompt_tokens, [0, 5], 7_000),
        np.insert(job.output_tokens, [0, 5], 900),
        max_tokens=np.insert(job.output_tokens, [0, 5], 900),
        known=True,
    )
    kv = KVConfig(offload="none", device_memory=3_000 * LLAMA.kv_bytes_per_token)
    plan = make_plan(with_misfits, LLAMA, A10, plan=with_solver(solver), kv=kv)
    assert plan.misfits == 2
    simulated = simulate_plan(plan, with_misfits, LLAMA, A10)
    assert simulated.result.makespan_s == plan.makespan_s
    assert simulated.plan.solver == plan.solver == solver


@pytest.mark.parametrize("solver", ["milp", "local_search"])
@pytest.mark.parametrize("layout", [Layout(pipeline_parallel=2), Layout(data_parallel=2)])
def test_streams_that_share_rows_have_no_solver_of_one_device(solver: str, layout: Layout) -> None:
    config = parse_job(
        {
            "model": {"shape": "x"},
            "input": {"path": "x", "prompt": "x"},
            "output": {"path": "x"},
            "plan": {"solver": solver},
        }
    )
    with pytest.raises(JobFileError, match=f"plan.solver: {solver} orders the rows of one device"):
        plan_parallel(some_rows(300), LLAMA, A10, config, layout)


def test_a_search_takes_a_fiftieth_of_the_job_at_most_or_what_the_job_says(limits: list[float]) -> None:
    job = some_rows(1000)
    greedy = crowded(job, with_solver("greedy"))
    crowded(job, with_solver("milp"))
    crowded(job, with_solver("milp", solver_time=0.25))
    by_itself_s, as_asked_s = limits
    assert 0 < by_itself_s <= SOLVER_SHARE * greedy.makespan_s / 50
    assert as_asked_s == SOLVER_SHARE * 0.25


def test_nothing_is_looked_for_where_the_bound_is_met(limits: list[float]) -> None:
    job = Lengths(np.full(12, 10), np.array([2000] + [100] * 11), known=True)
    plan = make_plan(job, LLAMA, A10, plan=with_solver("milp"))
    assert (plan.optimal, plan.order_gap, plan.solver) == (True, 0, "milp")
    assert not limits


@pytest.mark.parametrize(("known", "solver"), [(False, "auto"), (True, "greedy"), (True, "fifo")])
def test_unknown_lengths_and_other_solvers_are_left_alone(known: bool, solver: str) -> None:
    found = crowded(replace(some_rows(1000), known=known), with_solver(solver))
    assert found.order == ()
    assert found.order_gap is None


@pytest.mark.parametrize(
    ("solver", "rows", "most"),
    [("milp", 33, "orders 32 rows at most"), ("local_search", 2001, "orders 2,000 rows at most")],
)
def test_more_rows_than_a_solver_orders_are_refused(solver: str, rows: int, most: str) -> None:
    with pytest.raises(JobFileError, match=f"plan.solver: {solver} {most}, and the job has {rows:,}"):
        make_plan(Lengths(np.full(rows, 10), np.full(rows, 5)), LLAMA, A10, plan=with_solver(solver))


def test_rows_that_arrive_are_not_searched_over() -> None:
    arriving = Lengths(np.full(4, 10), np.full(4, 5), np.arange(4.0))
    with pytest.raises(JobFileError, match=r"plan.solver: milp orders rows that are there"):
        make_plan(arriving, LLAMA, A10, plan=with_solver("milp"))


@pytest.mark.parametrize("solver", ["greedy", "local_search", "milp"])
@pytest.mark.parametrize("policy", ["sarathi", "orca", "vllm"])
def test_policies_with_an_order_of_their_own_have_no_solver(solver: str, policy: Any) -> None:
    with pytest.raises(JobFileError, match=f"plan.solver: {solver} plans the order of policy vasuki, and {policy}"):
        make_plan(some_rows(100), LLAMA, A10, plan=with_solver(solver), engine=EngineConfig(policy=policy))


def test_a_milp_without_a_solver_says_what_brings_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "_backend", lambda solver: None)
    with pytest.raises(JobFileError, match=r"plan.solver: milp has no solver; `pip install 'vasuki\[milp\]'`"):
        crowded(some_rows(100), with_solver("milp"))


@pytest.mark.parametrize("mode", ["stream", "park", "by_batch"])
def test_a_search_for_an_order_leaves_what_the_job_asks_to_move_alone(mode: str) -> None:
    job = some_rows(600, 16, 3)
    kv = KVConfig.model_validate(
        {"offload": mode, "host_memory": 2**33, "device_memory": 3 * 660 * LLAMA.kv_bytes_per_token}
    )
    for plan in (make_plan(job, LLAMA, A10, kv=kv), make_plan(job, LLAMA, A10, plan=with_solver("milp"), kv=kv)):
        assert plan.offload.mode == mode
        assert plan.offload.reason
