from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from brute_force import random_items, shortest_makespan

from vasuki_solvers import Instance, Schedule, greedy_schedule, verify
from vasuki_solvers import milp as milp_module
from vasuki_solvers.holdings import growing_holdings
from vasuki_solvers.milp import SolverName, milp_schedule

pulp = pytest.importorskip("pulp")

EIGHT = [(5, 4), (3, 6), (7, 2), (2, 8), (2, 8), (4, 4), (4, 4), (6, 5)]


def needs(solver: SolverName) -> None:
    if milp_module._backend(solver) is None:
        pytest.skip(f"{solver} is not installed")


def start_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every item by itself is the best schedule that the search before the solver finds."""
    monkeypatch.setattr(
        milp_module,
        "local_search",
        lambda schedule, **_: Schedule.build(
            schedule.instance, np.cumsum([0, *schedule.instance.durations[:-1]]), None, "one by one", schedule.bound
        ),
    )


@pytest.mark.parametrize("max_parallel", [None, 2])
def test_it_proves_the_optimum_of_brute_force(max_parallel: int | None) -> None:
    needs("highs")
    rng = np.random.default_rng(7)
    by_the_solver = 0
    for _ in range(120):
        items = random_items(rng, int(rng.integers(2, 6)), max_prompt=8, max_duration=5)
        capacity = int(rng.integers(12, 22))
        schedule = milp_schedule(Instance.of(items, capacity, max_parallel=max_parallel), solver="highs", threads=1)
        verify(schedule)
        assert schedule.optimal
        assert schedule.makespan == shortest_makespan(items, capacity, max_parallel)
        by_the_solver += schedule.bound.reason == "milp"
    assert by_the_solver > 10


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_each_solver_proves_what_bounds_alone_do_not(solver: SolverName) -> None:
    needs(solver)
    instance = Instance.of(EIGHT, 20)
    assert not greedy_schedule(instance).optimal
    schedule = milp_schedule(instance, solver=solver, threads=1)
    verify(schedule)
    assert schedule.optimal
    assert schedule.bound.reason == "milp"


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_it_finds_what_a_bad_start_missed(solver: SolverName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minimising from above: a MILP is given the start, and refutation from below is switched off."""
    needs(solver)
    start_badly(monkeypatch)
    monkeypatch.setattr(milp_module, "REFUTATION_SHARE", 0.0)
    items = EIGHT[:5]
    schedule = milp_schedule(Instance.of(items, 16), solver=solver, threads=1)
    verify(schedule)
    assert schedule.method == f"milp ({solver})"
    assert schedule.optimal
    assert schedule.makespan == shortest_makespan(items, 16)


def test_identical_items_do_not_confuse_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("highs")
    monkeypatch.setattr(milp_module, "REFUTATION_SHARE", 0.0)
    schedule = milp_schedule(Instance.of([(4, 4)] * 5 + [(2, 3)] * 3, 14), solver="highs", threads=1)
    verify(schedule)
    assert schedule.optimal


def test_the_form_of_the_paper_is_never_shorter() -> None:
    needs("highs")
    instance = Instance.of(EIGHT, 20)
    growing = milp_schedule(instance, solver="highs", threads=1)
    static = milp_schedule(instance, solver="highs", threads=1, formulation="static")
    verify(static)
    assert static.method == "milp, static (highs)"
    assert static.makespan > growing.makespan


@pytest.mark.sweep
@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_long_items_are_solved_by_a_coarser_clock_which_proves_nothing(
    solver: SolverName, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(solver)
    start_badly(monkeypatch)
    instance = Instance.of([(50 * prompt, 50 * duration) for prompt, duration in EIGHT[:5]], 800)
    clock = milp_module._clock(instance, greedy_schedule(instance), milp_module.MAX_COEFFICIENTS)
    assert clock > 1
    schedule = milp_schedule(instance, solver=solver, time_limit_s=20.0, threads=1)
    verify(schedule)
    assert schedule.method == f"milp ({solver})"
    assert schedule.makespan <= greedy_schedule(instance).makespan < instance.durations.sum()
    assert schedule.bound.reason != "milp"


@pytest.mark.parametrize("clock", [2, 3, 7, 50])
def test_what_fits_by_a_coarser_clock_fits_step_by_step(clock: int) -> None:
    rng = np.random.default_rng(clock)
    instance = Instance(rng.integers(1, 60, 12), rng.integers(1, 50, 12), 200)
    holdings = growing_holdings(instance, clock)
    starts = clock * holdings.list_schedule(np.arange(12))
    verify(Schedule.build(instance, starts, None, "coarse"))


@pytest.mark.parametrize(
    "options",
    [{"solver": "none"}, {"time_limit_s": 0.0}],
    ids=["no solver", "no time"],
)
def test_greedy_stands_when_the_solver_can_not_help(options: dict[str, Any]) -> None:
    schedule = milp_schedule(Instance.of(EIGHT, 20), **options)
    verify(schedule)
    assert schedule.method.startswith("greedy")
    assert schedule.bound.reason != "milp"


def test_a_solver_that_breaks_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("highs")

    def broken(*_: object, **__: object) -> object:
        raise pulp.PulpSolverError("out of order")

    monkeypatch.setattr(milp_module, "_pulp_solver", broken)
    schedule = milp_schedule(Instance.of(EIGHT, 20), solver="highs")
    verify(schedule)
    assert schedule.method.startswith("greedy")
    assert not schedule.optimal


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_twenty_items_of_up_to_forty_steps_are_proved(solver: SolverName) -> None:
    needs(solver)
    rng = np.random.default_rng(100 + 60)
    durations, prompts = rng.integers(1, 41, 20), rng.integers(1, 61, 20)
    schedule = milp_schedule(Instance(prompts, durations, 366), solver=solver)
    verify(schedule)
    assert schedule.optimal
    assert schedule.bound.reason == "milp"


def test_no_items() -> None:
    assert milp_schedule(Instance.of([], 5)).makespan == 0
