from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
from brute_force import random_items, shortest_makespan

from vasuki_solvers import Instance, Schedule, cp_sat, greedy_schedule, verify
from vasuki_solvers.holdings import growing_holdings, static_holdings
from vasuki_solvers.milp import milp_schedule

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="OR-Tools is not installed")


@pytest.mark.parametrize("max_parallel", [None, 2])
def test_it_finds_the_optimum_of_brute_force_and_proves_it(max_parallel: int | None) -> None:
    rng = np.random.default_rng(11)
    instances, optima, questions, refuted = [], [], [], []
    for _ in range(120):
        items = random_items(rng, int(rng.integers(2, 6)), max_prompt=8, max_duration=5)
        instance = Instance.of(items, int(rng.integers(12, 22)), max_parallel=max_parallel)
        holdings, optimum = growing_holdings(instance), shortest_makespan(items, instance.capacity, max_parallel)
        instances.append(instance)
        optima.append(optimum)
        questions.append(cp_sat.question(holdings, holdings.longest, sum(holdings.durations) + 1, 1, 60.0))
        if optimum > holdings.longest:
            refuted.append(cp_sat.question(holdings, holdings.longest, optimum, 1, 60.0))
    answers = cp_sat.ask(questions + refuted, 60.0)
    for instance, optimum, (starts, bound) in zip(instances, optima, answers[: len(questions)], strict=True):
        schedule = Schedule.build(instance, np.array(starts), None, "constraints")
        verify(schedule)
        assert schedule.makespan == bound == optimum
    assert len(refuted) > 20
    assert answers[len(questions) :] == [[None, question["less_than"]] for question in refuted]


def test_identical_items_and_those_that_stay_after_their_end() -> None:
    """The form of the paper: two of the largest size fit together, and the step after an end is held as well."""
    holdings = static_holdings(Instance.of([(4, 4)] * 4, 14))
    one_by_one = np.arange(4) * 5
    starts, bound = cp_sat.shortest_schedule(holdings, one_by_one, 4, threads=1, time_limit_s=60.0)
    assert starts.tolist() == [0, 0, 5, 5]
    assert bound == holdings.makespan(starts) == 9


def test_without_time_what_is_known_stands() -> None:
    holdings = growing_holdings(Instance.of([(4, 4)] * 4, 14))
    known = np.arange(4) * 4
    assert cp_sat.shortest_schedule(holdings, known, 4, threads=1, time_limit_s=0.0) == (known, 4)


def test_a_solver_that_does_not_start_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    instance = Instance.of([(5, 4), (3, 6), (7, 2), (2, 8), (2, 8), (4, 4), (4, 4), (6, 5)], 20)
    schedule = milp_schedule(instance, solver="cp-sat", threads=1)
    verify(schedule)
    assert not greedy_schedule(instance).optimal
    assert schedule.method.startswith("greedy")
    assert not schedule.optimal
