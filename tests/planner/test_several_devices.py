"""What is said of several devices holds for every plan that they might have got."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vasuki.base.config import parse_job
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner import plan_parallel
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lengths import Lengths

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


def test_micro_batches_share_what_a_stage_has_room_for() -> None:
    """Stages hold half of the layers each, so their KV has more than twice the room, for two micro-batches."""
    lengths = Lengths(np.full(400, 800), np.full(400, 100))
    shape, config = named_shape("llama-3-8b"), parse_job(TREE | {"model": {"shape": "llama-3-8b"}})
    one, staged = (plan_parallel(lengths, shape, find_profile("a10"), config, Layout(1, n)) for n in (1, 2))
    assert staged.any_schedule.device_memory == config.kv.device_memory
    room, half = (plan.any_schedule.rooms(plan.layout)[0].kv_tokens for plan in (one, staged))
    assert room < half < 4 * room
    assert staged.makespan_s > staged.schedule_bound_s > 0.3 * one.schedule_bound_s
