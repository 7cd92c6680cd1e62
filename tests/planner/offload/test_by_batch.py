"""Layers that live on the host batch by batch: planned as simulated, by either kind of conditions, or refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hybrid import HYBRID
from hypothesis import given
from hypothesis import strategies as st

from vasuki.base.config import EngineConfig, KVConfig
from vasuki.base.errors import JobFileError
from vasuki.base.job_file import parse_job
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.depth import Depth, depths
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.machines.link import Link, LinkPoint
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.offload.algorithms import printed_first_last, printed_ring
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import simulate_plan
from vasuki.runs.ignored import refuse_ignored

SMALL = replace(named_shape("llama-3-8b"), num_layers=8)
FAST_LINK = find_profile("gh200")
ROWS = Lengths(np.full(120, 300), np.full(120, 400))
PAPER = EngineConfig(policy="vasuki-paper")


def plan_of(
    shape: ModelShape = SMALL, engine: EngineConfig = PAPER, layout: Layout | None = None, **kv: object
) -> Plan:
    config = KVConfig.model_validate({"device_memory": 2**28, "host_memory": 2**31, **kv})
    return make_plan(ROWS, shape, FAST_LINK, engine=engine, kv=config, layout=layout)


class Watch:
    """Counts blocks that are held, and layers that are on the host, by step."""

    def __init__(self) -> None:
        self.depths: list[Depth] = []

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        assert batch.depth is not None
        assert scheduler.queues.depth is not None
        self.depths.append(batch.depth.depth)
        scheduler.queues.check_integrity()


@pytest.mark.parametrize("conditions", ["corrected", "printed"])
def test_a_plan_is_its_simulation(conditions: str) -> None:
    plan, watch = plan_of(conditions=conditions), Watch()
    assert (plan.policy, plan.offload.mode) == ("vasuki-paper", "by_batch")
    assert conditions in plan.offload.reason
    run = simulate_plan(plan, ROWS, SMALL, FAST_LINK, observers=[watch])
    assert run.result.makespan_s == plan.makespan_s
    assert plan.schedule_bound_s <= plan.makespan_s
    assert len(set(watch.depths)) > 1
    kv = run.to_dict()["kv"]
    assert kv["offloaded_bytes"] > 0
    assert kv["peak_host_bytes"] <= 2**31
    assert (
        run.result.stats.peak_device_blocks > plan.settings.num_blocks
    )  # of which the device does not hold all layers


def test_vasukis_own_policy_may_be_asked_for_it() -> None:
    plan = plan_of(engine=EngineConfig(), offload="by_batch")
    assert (plan.policy, plan.offload.mode) == ("vasuki", "by_batch")
    assert simulate_plan(plan, ROWS, SMALL, FAST_LINK).result.makespan_s == plan.makespan_s


def test_rows_start_when_all_layers_have_room_for_their_prompt() -> None:
    """Deep batches hold more, but no prompt is let in that would not fit with all layers on the device."""
    plan = plan_of()

    class Starts:
        def record(self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, _: object) -> None:
            depth, pool = scheduler.queues.depth, scheduler.queues.pool
            assert depth is not None
            held = pool.num_held * depth.depth.places
            assert held <= plan.settings.num_blocks * SMALL.num_layers

    simulate_plan(plan, ROWS, SMALL, FAST_LINK, observers=[Starts()])


@given(st.integers(3, 40), st.integers(1, 40))
def test_depths_take_the_places_that_they_say(num_layers: int, places: int) -> None:
    depth = Depth.of_places(num_layers, places)
    assert depth.places <= max(2, places)
    for each in depths(num_layers):
        found = [each.place_of(layer) for layer in range(num_layers)]
        assert set(found) == set(range(each.places))
        resident = [each.place_of(layer) for layer in range(num_layers) if not each.is_streamed(layer)]
        streamed = {each.place_of(layer) for layer in each.streamed}
        assert len(set(resident)) == len(resident)
        assert not streamed & set(resident)
        assert all(each.place_of(layer) == layer for layer in range(num_layers) if not each.is_streamed(layer))


@given(st.integers(2, 80), st.floats(1e-5, 1e-1), st.floats(1, 1e9))
def test_the_printed_searches_are_those_of_the_paper(num_layers: int, layer_s: float, layer_bytes: float) -> None:
    """Algorithms 1 and 2, line by line."""
    point = LinkPoint(bytes=2**20, h2d=20.0, d2h=10.0, both=8.0)
    link = Link(kind="made up", curve=(point,), source="made up")

    def offload_time(mid: int) -> float:
        size = layer_bytes * mid
        return link.copy_s(size, "d2h") + link.copy_s(size, "h2d")

    left, right = 0, math.floor(num_layers / 2)
    while left < right:
        mid = math.floor((left + right) / 2)
        if offload_time(mid) <= layer_s * (num_layers - 2 * mid):
            left = mid + 1
        else:
            right = mid - 1
    assert printed_first_last(num_layers, layer_s, layer_bytes, link) == max(0, left - 1)
    left, right = 0, math.floor(num_layers / 2)
    while left < right:
        mid = math.floor((left + right) / 2)
        if offload_time(mid) <= layer_s * mid:
            right = mid - 1
        else:
            left = mid + 1
    assert printed_ring(num_layers, layer_s, layer_bytes, link) == max(0, num_layers - (left + 1) * 2)


@pytest.mark.parametrize(
    ("why", "shape"),
    [
        ("of 1 layers none can leave", replace(SMALL, num_layers=1)),
        ("rows are not packed", replace(SMALL, backend="padded")),
        ("layers keep more of a token", HYBRID),
    ],
)
def test_models_whose_layers_cannot_move_are_refused(why: str, shape: ModelShape) -> None:
    with pytest.raises(
        JobFileError, match=f"engine.policy: vasuki-paper cannot be done: {why}.*set kv.offload to none"
    ):
        plan_of(shape, device_memory=0.9)
    with pytest.raises(JobFileError, match=f"kv.offload: by_batch cannot be done: {why}.*leave it out"):
        plan_of(shape, EngineConfig(), offload="by_batch", device_memory=0.9)
    assert plan_of(shape, offload="none", device_memory=0.9).offload.mode == "none"


def test_stages_are_refused() -> None:
    with pytest.raises(JobFileError, match="not simulated with stages"):
        make_plan(ROWS, SMALL, find_profile("a100"), engine=PAPER, layout=Layout(pipeline_parallel=2))


@pytest.mark.parametrize("host_memory", [0, 2**20])
def test_a_host_without_room_is_refused(host_memory: int) -> None:
    with pytest.raises(JobFileError, match=r"kv.host_memory: two layers .* take [\d.]+ MiB; raise it, or set kv.off"):
        plan_of(host_memory=host_memory)


def test_a_host_with_little_room_keeps_few_layers() -> None:
    watch = Watch()
    plan = plan_of(host_memory=2**27)
    simulate_plan(plan, ROWS, SMALL, FAST_LINK, observers=[watch])
    assert plan.host_bytes <= 2**27
    assert {depth.way for depth in watch.depths} <= {"none", "first-last"}


@pytest.mark.parametrize("policy", ["sarathi", "vllm", "orca"])
def test_other_policies_are_refused(policy: str) -> None:
    with pytest.raises(JobFileError, match=rf"kv.offload: by_batch cannot be done: .* not with {policy}"):
        plan_of(engine=EngineConfig.model_validate({"policy": policy}), offload="by_batch")


def test_conditions_are_those_of_layers_that_move() -> None:
    tree = {"model": {"shape": "x"}, "input": {"path": "x", "prompt": "x"}, "output": {"path": "x"}}
    refuse_ignored(parse_job({**tree, "kv": {"conditions": "printed"}, "engine": {"policy": "vasuki-paper"}}))
    refuse_ignored(parse_job({**tree, "kv": {"conditions": "printed", "offload": "by_batch"}}))
    for kv in ({}, {"offload": "stream"}):
        with pytest.raises(JobFileError, match=r"kv.conditions: layers move batch by batch with"):
            refuse_ignored(parse_job({**tree, "kv": {"conditions": "printed", **kv}}))
