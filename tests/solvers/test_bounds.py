from __future__ import annotations

import numpy as np
import pytest
from brute_force import random_items, shortest_makespan

from vasuki_solvers import Instance, lower_bound
from vasuki_solvers.bounds import (
    area_bound,
    dual_feasible_bound,
    energetic_bound,
    longest_item_bound,
    parallel_bound,
    prefill_bound,
)


@pytest.mark.parametrize("max_parallel", [None, 2])
def test_no_bound_exceeds_the_optimum(max_parallel: int | None) -> None:
    rng = np.random.default_rng(0)
    tight = 0
    for _ in range(150):
        items = random_items(rng, int(rng.integers(1, 5)), max_prompt=8, max_duration=5)
        capacity = int(rng.integers(12, 20))
        optimum = shortest_makespan(items, capacity, max_parallel)
        instance = Instance.of(items, capacity, max_parallel=max_parallel)
        for bound in (longest_item_bound, area_bound, parallel_bound, dual_feasible_bound, energetic_bound):
            assert bound(instance) <= optimum, (bound, items, capacity)
        tight += lower_bound(instance).steps == optimum
    assert tight > 75  # and they are worth having


@pytest.mark.parametrize(
    ("instance", "steps", "reason"),
    [
        (Instance.of([(1, 9), (1, 2)], 100), 9, "longest item"),
        (Instance.of([(1, 4)] * 30, 10), 30, "area"),  # 30 x (1 + 2 + 3 + 4) token-steps
        (Instance.of([(1, 4)] * 5, 100, max_parallel=2), 10, "max_parallel"),
        (Instance.of([(6, 3)] * 4, 10), 12, "whole items"),  # two never fit side by side; the area gives 9
        (Instance.of([(7, 1)] * 3 + [(4, 1)] * 3, 10), 5, "whole items"),  # no 4 together with a 7; the area gives 4
        (Instance.of([(8, 2)] * 5, 100, prefill_tokens_per_step=4), 11, "prefill budget"),  # 10 steps, and 1 more
    ],
)
def test_each_bound_binds_somewhere(instance: Instance, steps: int, reason: str) -> None:
    bound = lower_bound(instance)
    assert (bound.steps, bound.reason) == (steps, reason)


def test_energy_inside_a_window_tightens_the_rest() -> None:
    # Two of these that end together hold 5 + 5 tokens at last: the ends of all three lie apart, which no area tells.
    instance = Instance.of([(1, 5), (1, 5), (1, 5)], 8)
    bound = lower_bound(instance)
    assert bound.reason == "energetic"
    assert bound.steps > max(area_bound(instance), longest_item_bound(instance), dual_feasible_bound(instance))
    assert bound.steps <= shortest_makespan([(1, 5)] * 3, 8)


def test_the_longest_tails_go_through_the_prefill_budget_first() -> None:
    # 2 + 1 chunks: the long item can be last (and end at 3 + 9), or first, and then the short one ends at 3 + 1.
    assert prefill_bound(Instance.of([(8, 10), (4, 1)], 100, prefill_tokens_per_step=4)) == 1 + 10
