from __future__ import annotations

import time

import numpy as np
import pytest
from brute_force import random_items, shortest_makespan

from vasuki_solvers import Instance, Plan, fifo_plan, verify
from vasuki_solvers.beam import beam_search
from vasuki_solvers.potential_lp import best_potentials
from vasuki_solvers.potentials import Potentials, States


def zero_potentials(instance: Instance) -> Potentials:
    """Those of the area bound."""
    return Potentials(np.zeros((States.of(instance).most + 1, instance.capacity + 1), np.int64), 0, 1)


def one_by_one(instance: Instance) -> Plan:
    return Plan.build(instance, np.cumsum([0, *instance.durations[:-1]]), None, "one by one")


@pytest.mark.parametrize("max_parallel", [None, 2])
@pytest.mark.parametrize("guided", [False, True])
def test_a_wide_beam_finds_the_optimum_of_brute_force_and_proves_it(max_parallel: int | None, guided: bool) -> None:
    if guided:
        pytest.importorskip("highspy")
    rng = np.random.default_rng(17)
    for _ in range(100):
        items = random_items(rng, int(rng.integers(2, 6)), max_prompt=8, max_duration=5)
        instance = Instance.of(items, int(rng.integers(12, 22)), max_parallel=max_parallel)
        potentials = best_potentials(instance) if guided else zero_potentials(instance)
        assert potentials is not None
        plan, proved = beam_search(one_by_one(instance), potentials)
        verify(plan)
        assert proved
        assert plan.makespan == shortest_makespan(items, instance.capacity, max_parallel)


def test_a_narrow_beam_proves_nothing_and_never_returns_a_longer_plan() -> None:
    rng = np.random.default_rng(2)
    instance = Instance(rng.integers(1, 21, 20), rng.integers(1, 41, 20), 61)
    first = fifo_plan(instance)
    plan, proved = beam_search(first, zero_potentials(instance), width=20)
    verify(plan)
    assert not proved
    assert plan.makespan < first.makespan
    assert beam_search(first, zero_potentials(instance), deadline=time.perf_counter()) == (first, False)
