"""A prediction that follows the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vasuki.base.config import KVConfig
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.loop import Observer, RunStats
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner import TimeLeft, make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.simulated import simulate_plan
from vasuki.planner.time_left import WARM_UP_STEPS

LLAMA, A10 = named_shape("llama-3-8b"), find_profile("a10")
LENGTHS = Lengths(np.full(150, 400), np.full(150, 100))
PLAN = make_plan(LENGTHS, LLAMA, A10)


class Slower:
    """Hands steps on as if the machine were slower than its profile says."""

    def __init__(self, prediction: TimeLeft, prompts: float, decodes: float) -> None:
        self.prediction, self.prompts, self.decodes = prediction, prompts, decodes
        self.ratios: list[float] = []

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        factor = self.prompts if batch.prefills else self.decodes
        self.prediction.record(now_s, batch, result._replace(elapsed_s=factor * result.elapsed_s), scheduler, finished)
        self.ratios.append(self.prediction.ratio)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_machine_as_predicted_confirms_the_plan(one_by_one: bool) -> None:
    prediction = TimeLeft(PLAN, CostModel(LLAMA, A10))
    run = simulate_plan(PLAN, LENGTHS, LLAMA, A10, observers=[prediction], one_by_one=one_by_one)
    assert prediction.ratio == pytest.approx(1, rel=1e-9)
    assert prediction.makespan_s == pytest.approx(run.result.makespan_s)


@pytest.mark.parametrize("window", [0, 256])
@pytest.mark.parametrize("offload", ["stream", "by_batch"])
def test_layers_that_move_are_part_of_what_is_predicted(offload: Any, window: int) -> None:
    """Also of a model with sliding windows, and where each batch decides which layers move."""
    shape = replace(LLAMA, num_windowed_layers=16, sliding_window=window) if window else LLAMA
    kv = KVConfig(offload=offload, device_memory=2**30, host_memory=2**34)
    plan = make_plan(LENGTHS, shape, A10, kv=kv)
    prediction = TimeLeft(plan, CostModel(shape, A10))
    run = simulate_plan(plan, LENGTHS, shape, A10, observers=[prediction], one_by_one=True)
    assert run.result.stats.hidden_copy_s
    assert prediction.ratio == pytest.approx(1, rel=1e-9)


def test_a_step_is_priced_alike_for_whoever_asks_first() -> None:
    """The trace asks for the same steps, from before or behind this observer."""
    prices: dict[str, list[float]] = {"before": [], "behind": []}

    class Asking:
        def __init__(self, where: str, prediction: TimeLeft) -> None:
            self.where, self.prediction = where, prediction

        def record(
            self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
        ) -> None:
            prices[self.where].append(self.prediction.step_s(batch, result, scheduler))

    for where in prices:
        prediction = TimeLeft(PLAN, CostModel(LLAMA, A10))
        observers: list[Observer] = [Asking(where, prediction), prediction]
        simulate_plan(PLAN, LENGTHS, LLAMA, A10, observers=observers[:: 1 if where == "before" else -1])
        assert prediction.ratio == pytest.approx(1, rel=1e-9)
    assert prices["before"] == prices["behind"]
    assert min(prices["before"]) > 0


def test_slow_decodes_are_expected_to_stay_slow() -> None:
    slower = Slower(TimeLeft(PLAN, CostModel(LLAMA, A10)), prompts=1.0, decodes=2.0)
    simulate_plan(PLAN, LENGTHS, LLAMA, A10, observers=[slower], one_by_one=True)
    assert slower.ratios[WARM_UP_STEPS - 1] == 1.0
    share = PLAN.prompt_steps_share
    assert 0 < share < 1
    assert slower.prediction.ratio == pytest.approx(share + 2 * (1 - share), rel=1e-6)


def test_a_slow_start_says_less_than_the_plan_knows_about_decodes() -> None:
    """While only prompts were seen, decodes are taken to be off by as much; then they are known."""
    slower = Slower(TimeLeft(PLAN, CostModel(LLAMA, A10)), prompts=3.0, decodes=1.0)
    simulate_plan(PLAN, LENGTHS, LLAMA, A10, observers=[slower], one_by_one=True)
    assert max(slower.ratios) > slower.ratios[-1] > 1


def test_nothing_measured_changes_nothing() -> None:
    prediction = TimeLeft(replace(PLAN, makespan_s=10.0), CostModel(LLAMA, A10))
    prediction.record(0.0, Batch([], [], [], []), StepResult([], [], 1.0), Scheduler(PLAN.settings), [])
    assert prediction.ratio == 1.0
    assert prediction.makespan_s == 10.0
    assert RunStats().mean_seqs == 0


class TimesLeft:
    """Notes what a run says of its time left, step by step."""

    def __init__(self, prediction: TimeLeft, slower: float) -> None:
        self.prediction, self.slower = prediction, slower
        self.seen: list[tuple[float, float]] = []  # (now_s, left_s)
        self.now_s = 0.0

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        elapsed_s = self.slower * result.elapsed_s
        self.now_s += elapsed_s
        self.prediction.record(now_s, batch, result._replace(elapsed_s=elapsed_s), scheduler, finished)
        self.seen.append((self.now_s, self.prediction.left_s))


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("prompt", [40, 2000])
@pytest.mark.parametrize(("ends", "most"), [(1.0, 0.15), (0.6, 0.31)])
def test_the_time_left_is_known_from_a_tenth_of_the_job_on(
    slower: float, prompt: int, ends: float, most: float
) -> None:
    """Also where a plan computes prompts first and on a machine of another pace; roughly where outputs are shorter
    than expected, which nobody knows before rows end."""
    outputs = np.random.default_rng(0).integers(40, 160, 150)
    planned = Lengths(np.full(150, prompt), outputs)
    plan = make_plan(planned, LLAMA, A10)
    happens = replace(planned, output_tokens=np.maximum(1, (ends * outputs).astype(int)))
    left = TimesLeft(TimeLeft(plan, CostModel(LLAMA, A10)), slower)
    simulate_plan(plan, happens, LLAMA, A10, observers=[left], one_by_one=True)
    total_s = left.now_s
    errors = [abs(left_s - (total_s - now_s)) / total_s for now_s, left_s in left.seen if now_s >= 0.1 * total_s]
    assert np.median(errors) < most
    assert left.seen[-1][1] == pytest.approx(0, abs=0.02 * total_s)
