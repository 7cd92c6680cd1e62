from __future__ import annotations

import numpy as np
import pytest
from brute_force import random_items, shortest_makespan

from vasuki_solvers import Instance, local_search, lower_bound
from vasuki_solvers.bounds import area_bound
from vasuki_solvers.greedy import greedy_plan
from vasuki_solvers.potential_lp import potential_bound
from vasuki_solvers.potentials import Potentials, States


def tiny_instances(rng: np.random.Generator, count: int) -> list[tuple[Instance, int]]:
    """Instances with their optima, half of them with a limit on the items at once."""
    found = []
    for number in range(count):
        items = random_items(rng, int(rng.integers(1, 6)), max_prompt=8, max_duration=5)
        capacity, max_parallel = int(rng.integers(12, 22)), (None, 2)[number % 2]
        instance = Instance.of(items, capacity, max_parallel=max_parallel)
        found.append((instance, shortest_makespan(items, capacity, max_parallel)))
    return found


def test_potentials_of_zero_are_the_area_bound() -> None:
    instance = Instance.of([(3, 4), (2, 6), (5, 2), (1, 7)], 9)
    values = np.zeros((States.of(instance).most + 1, 10), np.int64)
    assert Potentials(values, 0, 1).bound(instance) == area_bound(instance)


def test_whatever_the_potentials_they_bound_every_plan() -> None:
    rng = np.random.default_rng(3)
    positive = 0
    for instance, optimum in tiny_instances(rng, 100):
        shape = (States.of(instance).most + 1, instance.capacity + 1)
        for scale in (1, 5, 50):
            wild = Potentials(rng.integers(-scale, scale + 1, shape), int(rng.integers(-scale, scale + 1)), 10)
            bound = wild.bound(instance)
            assert bound <= optimum
            positive += bound > 0
    assert positive > 100


def test_the_best_potentials_bound_every_plan_and_often_exceed_all_other_bounds() -> None:
    pytest.importorskip("highspy")
    better = 0
    for instance, optimum in tiny_instances(np.random.default_rng(5), 200):
        bound = potential_bound(instance)
        assert bound <= optimum
        better += bound > lower_bound(instance).steps
    assert better > 10


def test_a_memory_that_empties_in_between() -> None:
    """No two fit together, so that each starts in an empty memory: nothing is gained by counting its end twice."""
    pytest.importorskip("highspy")
    instance = Instance.of([(6, 2), (5, 3), (7, 1)], 9)
    assert 0 < potential_bound(instance) <= 6


def test_few_rows_side_by_side() -> None:
    """Growth loses a sixth of the memory here, of which the other bounds know nothing (best plan known: 206)."""
    pytest.importorskip("highspy")
    rng = np.random.default_rng(2)
    prompts, durations = rng.integers(1, 21, 20), rng.integers(1, 41, 20)
    instance = Instance(prompts, durations, int(2 * (prompts + durations - 1).mean()))
    assert lower_bound(instance).steps == 164
    bound = potential_bound(instance)
    assert 194 <= bound <= 206 <= local_search(greedy_plan(instance), iterations=500).makespan


@pytest.mark.parametrize(
    "instance",
    [
        Instance.of([], 5),
        Instance.of([(4, 2)] * 3, 9, prefill_tokens_per_step=2),
        Instance.of([(1 + i, 1 + i % 7) for i in range(200)], 1_000),
    ],
)
def test_where_it_does_not_apply_it_claims_nothing(instance: Instance) -> None:
    assert potential_bound(instance) == 0
