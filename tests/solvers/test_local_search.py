from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from brute_force import random_items

from vasuki_solvers import Instance, fifo_schedule, greedy_schedule, local_search, verify
from vasuki_solvers.reverse import ReverseDecoder


def test_it_closes_more_than_half_of_the_gap_to_the_optimum() -> None:
    rng = np.random.default_rng(2)
    excess_before, excess_after = [], []
    for _ in range(25):
        instance = Instance.of(random_items(rng, 6, max_prompt=30, max_duration=20), int(rng.integers(50, 80)))
        decoder = ReverseDecoder(instance)
        optimum = min(max(decoder.place(order)[1]) for order in permutations(range(6)))
        schedule = greedy_schedule(instance)
        better = local_search(schedule, iterations=400)
        verify(better)
        assert optimum <= better.makespan <= schedule.makespan
        excess_before.append(schedule.makespan / optimum - 1)
        excess_after.append(better.makespan / optimum - 1)
    assert np.mean(excess_after) < np.mean(excess_before) / 2


@pytest.mark.parametrize("budget", [None, 200])
def test_hundreds_of_items_with_and_without_a_prefill_budget(budget: int | None) -> None:
    rng = np.random.default_rng(3)
    items = random_items(rng, 200, max_prompt=300, max_duration=150)
    schedule = greedy_schedule(Instance.of(items, 2_000, prefill_tokens_per_step=budget))
    better = local_search(schedule, iterations=150, seed=1)
    verify(better)
    assert better.makespan < schedule.makespan
    assert better.bound == schedule.bound


def test_the_seed_and_the_iterations_decide_the_result() -> None:
    rng = np.random.default_rng(4)
    schedule = greedy_schedule(Instance.of(random_items(rng, 40, max_prompt=50, max_duration=30), 300))
    once, again = (local_search(schedule, iterations=300, seed=5) for _ in range(2))
    assert once.starts.tolist() == again.starts.tolist()


def test_an_optimal_schedule_comes_back_as_it_is() -> None:
    schedule = greedy_schedule(Instance.of([(1, 9), (1, 2)], 100))
    assert local_search(schedule) is schedule


def test_no_time_is_no_failure() -> None:
    rng = np.random.default_rng(6)
    instance = Instance.of(random_items(rng, 40, max_prompt=50, max_duration=30), 300)
    schedule = fifo_schedule(instance)
    verify(local_search(schedule, time_budget_s=0.0))
    assert local_search(schedule, time_budget_s=0.0).makespan <= schedule.makespan
