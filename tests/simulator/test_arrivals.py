"""Rows that are gathered as they arrive, in virtual time: nobody is lost or waits for nothing, and bursts pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vasuki.arrivals import ArrivalAdmission
from vasuki.arrivals.gathering import Gathering
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.loop import Observer
from vasuki.engine.policy import POLICIES
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence as Row
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner.lengths import Lengths
from vasuki.simulator import SimulationResult, simulate

COST = CostModel(replace(named_shape("llama-3-8b"), num_layers=4), find_profile("a10"))
PACKING = EngineSettings(POLICIES["prefill-packing"], Limits(512 + 16, 16, lookahead=9), 2000, 4)
TARGET_S = 0.2


USUAL = Gathering(
    target_s=TARGET_S, epoch_s=0.1, max_rows=8, batch_tokens=512, batch_rows=8, burst_rows=8, burst_rows_per_s=1000
)


def gathering(**config: Any) -> Gathering:
    return replace(USUAL, **config)


class Watcher:
    """Rows that wait, the threshold, and the time, after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int, int]] = []

    def record(self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Row]) -> None:
        scheduler.queues.check_integrity()
        self.seen.append((now_s, scheduler.queues.num_waiting, scheduler.queues.gathers))


def run(
    arrived_at_s: list[float],
    config: Gathering | None,
    tokens: tuple[int, int] = (60, 20),
    observers: Sequence[Observer] = (),
    one_by_one: bool = False,
) -> SimulationResult:
    rows = len(arrived_at_s)
    lengths = Lengths(np.full(rows, tokens[0]), np.full(rows, tokens[1]), np.array(arrived_at_s))
    return simulate(
        lengths.requests(),
        lengths.output_tokens.tolist(),
        PACKING if config else replace(PACKING, policy=POLICIES["sarathi"]),
        COST,
        arrived_at_s=arrived_at_s,
        admission=ArrivalAdmission(config) if config else None,
        observers=observers,
        one_by_one=one_by_one,
    )


def waits(result: SimulationResult) -> list[float]:
    assert result.waited is not None
    return result.waited.ttft_s.tolist()


@given(
    gaps_s=st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.3]), min_size=1, max_size=25),
    tokens=st.tuples(st.integers(1, 300), st.integers(1, 40)),
    law=st.sampled_from(["aimd", "load"]),
    packing=st.sampled_from(["greedy", "exact"]),
    bounds=st.sampled_from([(1, 1), (1, 8), (4, 4), (30, 30)]),
    burst_rows_per_s=st.sampled_from([5, 1000]),
)
@settings(max_examples=100, deadline=None)
def test_runs_of_steps_gather_the_same_as_single_steps(
    gaps_s: list[float],
    tokens: tuple[int, int],
    law: str,
    packing: str,
    bounds: tuple[int, int],
    burst_rows_per_s: float,
) -> None:
    arrived_at_s = np.cumsum(gaps_s).tolist()
    config = gathering(
        controller=law, packing=packing, min_rows=bounds[0], max_rows=bounds[1], burst_rows_per_s=burst_rows_per_s
    )
    watcher = Watcher()
    together = run(arrived_at_s, config, tokens)
    single = run(arrived_at_s, config, tokens, one_by_one=True, observers=[watcher])
    assert together.makespan_s == single.makespan_s, "not the same to the last digit"
    assert waits(together) == waits(single)
    assert together.written.rows == len(arrived_at_s) == len(waits(together))
    assert together.written.output_tokens == tokens[1] * len(arrived_at_s)
    assert together.waited is not None
    assert len(together.waited.latency_s) == len(arrived_at_s)
    assert all(bounds[0] <= gathers <= bounds[1] for _, _, gathers in watcher.seen)
    assert watcher.seen[-1][1] == 0


@given(
    gaps_s=st.lists(st.sampled_from([0.05, 0.3, 2.0]), min_size=1, max_size=20), law=st.sampled_from(["aimd", "load"])
)
@settings(max_examples=50, deadline=None)
def test_nobody_waits_beyond_the_timeout_for_a_device_that_has_time(gaps_s: list[float], law: str) -> None:
    """A step takes some 10 ms here, and rows come one by one, so that all that waiting is for others to come."""
    config = gathering(controller=law, min_rows=8)
    longest_s = max(waits(run(np.cumsum(gaps_s).tolist(), config)))
    assert longest_s <= TARGET_S * config.timeout + 0.05


def test_a_lone_row_waits_for_the_timeout_with_the_papers_controller_alone() -> None:
    (at_once,) = waits(run([0.0], None))
    (aimd,) = waits(run([0.0], gathering(min_rows=8, controller="aimd")))
    (load,) = waits(run([0.0], gathering(min_rows=8)))
    assert aimd == pytest.approx(at_once + TARGET_S / 2)
    assert load == pytest.approx(at_once)


def steady(rows: int, rows_per_s: float) -> list[float]:
    return [row / rows_per_s for row in range(rows)]


@pytest.mark.parametrize("law", ["aimd", "load"])
def test_the_queue_of_a_burst_passes(law: str) -> None:
    """Sixty rows at once, in a load that leaves half of the device free: it is worked off in the time that it takes to
    compute, and rows wait as before."""
    before, after = steady(100, 10), [5.0] * 60
    watcher = Watcher()
    run(sorted(before + after), gathering(controller=law), one_by_one=True, observers=[watcher])
    queued = [(at_s, waiting) for at_s, waiting, _ in watcher.seen]
    assert max(waiting for _, waiting in queued) >= 40
    assert max(waiting for at_s, waiting in queued if at_s > 7.0) <= 8


SLOWLY = {"target_s": 2.0, "epoch_s": 1.0, "max_rows": 32, "batch_rows": 32, "burst_rows": 32}


@pytest.mark.parametrize(
    ("law", "arrived_at_s", "config", "ends_at"),
    [
        ("aimd", steady(160, 2), SLOWLY, 32),
        ("aimd", steady(160, 2), {**SLOWLY, "timeout": 1.5}, 5),
        ("aimd", steady(240, 3), {**SLOWLY, "timeout": 1.5}, 7),
        ("aimd", steady(400, 5), {**SLOWLY, "timeout": 1.5}, 11),
        ("load", steady(900, 150), {"target_s": 0.5, "epoch_s": 0.5}, 8),
        ("load", sorted([1.0] * 200 + steady(60, 4)), {"target_s": 0.5, "epoch_s": 0.5}, 1),
    ],
)
def test_n_moves_step_by_step_and_rests_under_steady_load(
    law: str, arrived_at_s: list[float], config: dict[str, float], ends_at: int
) -> None:
    """An epoch is longer than a row runs, so that it sees what the last move did. In the last third of the steps N
    rests: at a bound, or where the timeout lets rows wait no longer than the target allows."""
    watcher = Watcher()
    run(arrived_at_s, gathering(controller=law, **config), (300, 20), one_by_one=True, observers=[watcher])
    gathers = [gathers for _, _, gathers in watcher.seen]
    moves = [(before, after) for before, after in pairwise(gathers) if after != before]
    assert (1, 2) in moves
    assert all(after in (before + 1, max(1, math.ceil(before / 2))) for before, after in moves)
    assert set(gathers[2 * len(gathers) // 3 :]) == {ends_at}


def test_overload_turns_the_papers_controller_down_and_the_mended_one_up() -> None:
    ends = {}
    for law in ("aimd", "load"):
        watcher = Watcher()
        run([0.0005 * row for row in range(600)], gathering(controller=law), one_by_one=True, observers=[watcher])
        ends[law] = watcher.seen[len(watcher.seen) // 2][2]
    assert ends["aimd"] == 1
    assert ends["load"] > 1


def test_rows_that_wait_are_counted_wherever_they_are() -> None:
    for config in (None, gathering(min_rows=8)):
        watcher = Watcher()
        run([0.0] * 60, config, one_by_one=True, observers=[watcher])
        assert watcher.seen[0][1] >= 60 - 16
        assert watcher.seen[-1][1] == 0


def in_rounds(
    rows: list[tuple[int, int, float]], most_running: int, policy: str = "vasuki", one_by_one: bool = False
) -> list[float]:
    """Times to first token of rows with these prompt and output tokens that arrive at these times."""
    prompts, outputs, arrived_at_s = (np.array(column) for column in zip(*rows, strict=True))
    result = simulate(
        Lengths(prompts, outputs, arrived_at_s).requests(),
        outputs.tolist(),
        EngineSettings(POLICIES[policy], Limits(128, most_running, lookahead=4), 2000, 4),
        COST,
        arrived_at_s=arrived_at_s.tolist(),
        one_by_one=one_by_one,
    )
    assert result.written.rows == len(rows)
    return waits(result)


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([20, 300, 2000]), st.integers(1, 40), st.sampled_from([0.0, 0.005, 0.02])),
        min_size=1,
        max_size=20,
    ),
    most_running=st.integers(1, 4),
)
@example([(20, 10, 0.0), (2000, 20, 0.005), (300, 5, 0.02), (20, 5, 0.08)], 1)  # the last comes while the second starts
@settings(max_examples=100, deadline=None)
def test_runs_of_steps_form_the_same_rounds_as_single_steps(
    rows: list[tuple[int, int, float]], most_running: int
) -> None:
    times_s = np.cumsum([gap_s for _, _, gap_s in rows]).tolist()
    rows = [(prompt, output, at_s) for (prompt, output, _), at_s in zip(rows, times_s, strict=True)]
    assert in_rounds(rows, most_running) == in_rounds(rows, most_running, one_by_one=True)


def test_short_prompts_wait_less_under_load_and_long_ones_not_for_ever() -> None:
    random = np.random.default_rng(0)
    rows = [(int(random.choice([20, 20, 20, 1000])), 5, 0.004 * row) for row in range(300)]
    first_come, by_rounds = (np.array(in_rounds(rows, 16, policy)) for policy in ("sarathi", "vasuki"))
    assert by_rounds.mean() < 0.75 * first_come.mean()
    assert by_rounds.max() < 1.5 * first_come.max()
