"""Forward, reverse and greedy schedules, judged by the referee and by brute force."""

from __future__ import annotations

from itertools import permutations
from random import Random

import numpy as np
import pytest
from brute_force import random_items, shortest_makespan
from hypothesis import given
from hypothesis import strategies as st

from vasuki_solvers import (
    Instance,
    Schedule,
    fifo_schedule,
    forward_schedule,
    greedy_order,
    greedy_schedule,
    reverse_schedule,
    verify,
)
from vasuki_solvers.reverse import ReverseDecoder


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    items = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 15)), min_size=1, max_size=25))
    largest = max(prompt + duration - 1 for prompt, duration in items)
    return Instance.of(
        items,
        largest + draw(st.integers(0, 60)),
        max_parallel=draw(st.none() | st.integers(1, 6)),
        prefill_tokens_per_step=draw(st.none() | st.integers(1, 40)),
    )


@given(instances(), st.randoms(use_true_random=False), st.sampled_from([1, 2, 7, 100]))
def test_every_order_becomes_a_schedule_that_keeps_the_rules(
    instance: Instance, random: Random, lookahead: int
) -> None:
    order = list(range(len(instance)))
    random.shuffle(order)
    for decode in (forward_schedule, reverse_schedule):
        starts, waits = decode(instance, order, lookahead=lookahead)
        schedule = Schedule.build(instance, starts, waits, decode.__name__)
        verify(schedule)
        assert schedule.starts.min() == 0


@given(instances())
def test_greedy_keeps_the_rules_and_its_order_names_every_item_once(instance: Instance) -> None:
    for schedule in (greedy_schedule(instance), fifo_schedule(instance)):
        verify(schedule)
        assert sorted(schedule.order.tolist()) == list(range(len(instance)))
    assert sorted(greedy_order(instance).tolist()) == list(range(len(instance)))


@pytest.mark.parametrize("max_parallel", [None, 2])
def test_the_best_reverse_order_is_optimal(max_parallel: int | None) -> None:
    """The theorem in `reverse`: strict reverse orders contain an optimal schedule."""
    rng = np.random.default_rng(1)
    for _ in range(80):
        items = random_items(rng, int(rng.integers(2, 6)), max_prompt=8, max_duration=5)
        capacity = int(rng.integers(12, 22))
        decoder = ReverseDecoder(Instance.of(items, capacity, max_parallel=max_parallel))
        best = min(max(decoder.place(order)[1]) for order in permutations(range(len(items))))
        assert best == shortest_makespan(items, capacity, max_parallel)


@given(instances().filter(lambda instance: instance.prefill_tokens_per_step is None))
def test_decoding_a_schedule_by_its_ends_never_makes_it_longer(instance: Instance) -> None:
    schedule = fifo_schedule(instance)
    starts, waits = reverse_schedule(instance, np.argsort(-schedule.ends, kind="stable"))
    assert Schedule.build(instance, starts, waits, "decoded").makespan <= schedule.makespan


def test_memory_is_reserved_for_the_joint_peak_and_not_for_the_sum_of_the_maxima() -> None:
    # Maxima 10 and 13; side by side they hold 10 + 9 in step 1, after which the second is alone.
    instance = Instance.of([(9, 2), (8, 6)], 19)
    starts, _ = forward_schedule(instance, [0, 1])
    assert starts.tolist() == [0, 0]
    # One token less, and the second waits: by one step, so that it is younger when the first ends.
    starts, _ = forward_schedule(Instance.of([(9, 2), (8, 6)], 18), [0, 1])
    assert starts.tolist() == [0, 1]


def test_lookahead_starts_a_later_item_when_the_next_one_does_not_fit() -> None:
    instance = Instance.of([(6, 4), (6, 4), (1, 1)], 10)
    assert forward_schedule(instance, [0, 1, 2])[0].tolist() == [0, 4, 4]
    assert forward_schedule(instance, [0, 1, 2], lookahead=2)[0].tolist() == [0, 4, 0]


def test_chunks_of_one_prompt_hold_up_the_next() -> None:
    # 6 + 4 tokens, 4 a step: first tokens in steps 1 (4 + 2) and 2 (2 + 2).
    instance = Instance.of([(6, 3), (4, 3)], 100, prefill_tokens_per_step=4)
    starts, waits = forward_schedule(instance, [0, 1])
    assert (starts + waits).tolist() == [1, 2]


def workload(count: int, seed: int) -> Instance:
    """Prompts of hundreds of tokens, durations with a long tail, some tens at once."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(5.0, 0.7, count), 1, 2_000).astype(np.int64)
    durations = np.clip(rng.lognormal(4.5, 0.8, count), 1, 1_000).astype(np.int64)
    return Instance(prompts, durations, 8_000)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_near_the_bound_where_first_come_is_not(seed: int) -> None:
    instance = workload(400, seed)
    schedule = greedy_schedule(instance)
    baseline = fifo_schedule(instance, bound=schedule.bound)
    online = Schedule.build(instance, *forward_schedule(instance, greedy_order(instance)), "online", schedule.bound)
    for each in (schedule, baseline, online):
        verify(each)
    assert schedule.gap < 0.05
    assert online.gap < 0.10
    assert baseline.gap > 2 * schedule.gap


def test_no_long_item_is_left_for_the_end_of_the_online_order() -> None:
    instance = workload(20_000, 0)
    order = greedy_order(instance)
    durations = instance.durations[order]
    assert sorted(order.tolist()) == list(range(len(instance)))
    # The order has its steps in proportion to the area done; an item must start at least its duration before the end.
    done = np.cumsum(instance.areas[order]) / instance.areas.sum()
    steps = instance.areas.sum() / instance.capacity
    assert ((1 - done) * steps * 1.1 + 50 >= durations).mean() > 0.99
    # Until then lengths are mixed: no stretch is much longer or shorter than the others.
    stretches = durations[:16_000].reshape(16, -1).mean(axis=1)
    assert stretches.max() < 1.25 * stretches.min()


def test_the_same_items_give_the_same_schedule() -> None:
    instance = workload(300, 3)
    assert greedy_schedule(instance).starts.tolist() == greedy_schedule(instance).starts.tolist()
    assert greedy_order(instance).tolist() == greedy_order(instance).tolist()


def test_a_schedule_says_how_far_from_the_bound_it_is() -> None:
    instance = Instance.of([(1, 4)] * 30, 10)
    schedule = Schedule.build(instance, np.arange(30) * 4, None, "serial")
    assert schedule.makespan == 120
    assert schedule.gap == pytest.approx(3.0)
    assert not schedule.optimal
    assert str(schedule) == "serial: 30 items in 120 steps, lower bound 30 (area), gap 300.00%"
    assert schedule.utilisation == pytest.approx(0.25)


def test_an_empty_instance_has_an_empty_schedule() -> None:
    for schedule in (greedy_schedule(Instance.of([], 5)), fifo_schedule(Instance.of([], 5))):
        verify(schedule)
        assert (schedule.makespan, schedule.gap, schedule.utilisation) == (0, 0.0, 0.0)
