"""What is said of several devices holds for every plan that they might have got."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vasuki.base.job_file import parse_job
from vasuki.base.units import time_text
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner import plan_parallel, several_devices, simulate_plan, whole_job
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lengths import Lengths
from vasuki.report.plan_table import plan_table

TREE = {"input": {"path": "-", "prompt_token_ids": "-"}, "output": {"path": "-"}}


def test_the_bound_of_replicas_holds_wherever_their_weights_are() -> None:
    random = np.random.default_rng(0)
    lengths = Lengths(random.integers(100, 800, 200), random.integers(10, 200, 200))
    shape = named_shape("llama-3-70b")
    config = TREE | {"model": {"shape": shape.name}, "kv": {"host_memory": "99GiB"}}
    layout = Layout(tensor_parallel=4, data_parallel=2)
    plan = plan_parallel(lengths, shape, find_profile("a10"), parse_job(config), layout)
    schedules, job = plan.any_schedule, JobSums.of_lengths(shape, lengths)
    depths = [each.host_layers for each in schedules.layouts]
    assert len(depths) > 3
    assert plan.layout.host_layers in depths
    assert all(replace(each, host_layers=0) == layout for each in schedules.layouts)
    alone_s = [replace(schedules, layouts=(each,)).least_s(job) for each in schedules.layouts]
    assert plan.schedule_bound_s == min(alone_s) < alone_s[depths.index(plan.layout.host_layers)]


GIANT = Lengths(
    np.array([3800, 130, 181, 130, 60, 52, 142, 171, 190, 136, 80, 51, 42, 89, 111, 120]),
    np.array([135, 57, 97, 139, 18, 137, 70, 48, 60, 113, 87, 82, 101, 72, 69, 117]),
)


def test_replicas_are_planned_with_their_leases_and_tail() -> None:
    """One prompt is a third of the job."""
    shape, card = named_shape("mistral-7b"), find_profile("a100")
    config = parse_job(TREE | {"model": {"shape": shape.name}})
    alone = plan_parallel(GIANT, shape, card, config, Layout())
    before_s = alone.makespan_s
    for replicas in (2, 4):
        plan = plan_parallel(GIANT, shape, card, config, Layout(data_parallel=replicas))
        played_s = simulate_plan(plan, GIANT, shape, card, plan_config=config.plan).plan.makespan_s
        assert plan.makespan_s == pytest.approx(played_s, rel=0.02)
        assert plan.makespan_s < before_s
        assert plan.simulated_requests == len(GIANT)
        assert plan.one_replica_s is None
        before_s = plan.makespan_s


def test_stages_are_planned_with_their_bubbles() -> None:
    shape, card = named_shape("mistral-7b"), find_profile("a100")
    config = parse_job(TREE | {"model": {"shape": shape.name}})
    plan = plan_parallel(GIANT, shape, card, config, Layout(pipeline_parallel=2))
    assert plan.makespan_s == simulate_plan(plan, GIANT, shape, card, plan_config=config.plan).plan.makespan_s


def test_a_plan_says_where_one_replica_is_enough() -> None:
    """The only row takes as long, whatever else is there."""
    shape, card = named_shape("mistral-7b"), find_profile("a100")
    config, row = parse_job(TREE | {"model": {"shape": shape.name}}), GIANT.take(np.array([0]))
    alone = plan_parallel(row, shape, card, config, Layout())
    plan = plan_parallel(row, shape, card, config, Layout(data_parallel=2))
    assert plan.one_replica_s == alone.makespan_s == plan.to_dict()["one_replica_s"]
    assert plan.makespan_s >= alone.makespan_s
    assert f"one replica alone takes {time_text(alone.makespan_s)}, no longer" in plan_table([plan])


def test_what_needs_most_memory_is_planned_for_in_every_share() -> None:
    """The row that needs streamed layers is none of those that are spread evenly."""
    rows = Lengths(np.array([200] * 40 + [3300]), np.full(41, 200))
    shape = named_shape("llama-3-8b")
    config = parse_job(TREE | {"model": {"shape": shape.name}, "kv": {"device_memory": "400MiB"}})
    plan = plan_parallel(rows, shape, find_profile("a10"), config, Layout(data_parallel=2))
    assert plan.misfits == 0
    assert simulate_plan(plan, rows, shape, find_profile("a10")).result.written.failed == 0


def test_a_large_job_is_as_far_above_its_bound_as_one_share_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_devices, "SIMULATION_US", 0)
    monkeypatch.setattr(whole_job, "MOST_S", 0.0)
    random = np.random.default_rng(0)
    rows = Lengths(random.integers(100, 800, 600), random.integers(10, 200, 600))
    shape, card = named_shape("llama-3-8b"), find_profile("a10")
    config = parse_job(TREE | {"model": {"shape": shape.name}})
    plan = plan_parallel(rows, shape, card, config, Layout(data_parallel=3))
    assert plan.simulated_requests < 300
    assert plan.makespan_s > plan.schedule_bound_s
    played_s = simulate_plan(plan, rows, shape, card, plan_config=config.plan).plan.makespan_s
    assert plan.makespan_s == pytest.approx(played_s, rel=0.05)


def test_micro_batches_share_what_a_stage_has_room_for() -> None:
    """Stages hold half of the layers each, so their KV has more than twice the room, for two micro-batches."""
    lengths = Lengths(np.full(400, 800), np.full(400, 100))
    shape, config = named_shape("llama-3-8b"), parse_job(TREE | {"model": {"shape": "llama-3-8b"}})
    one, staged = (plan_parallel(lengths, shape, find_profile("a10"), config, Layout(1, n)) for n in (1, 2))
    assert staged.any_schedule.device_memory == config.kv.device_memory
    room, half = (plan.any_schedule.rooms(plan.layout)[0].kv_tokens for plan in (one, staged))
    assert room < half < 4 * room
    assert staged.makespan_s > staged.schedule_bound_s > 0.3 * one.schedule_bound_s
