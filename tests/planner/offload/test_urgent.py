"""Rows that make room for urgent ones keep their KV where a plan says so, and memory holds what a plan says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError
from vasuki.base.job_file import parse_job
from vasuki.base.units import bytes_text
from vasuki.machines.memory_budget import footprint
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.report.plan_table import plan_table
from vasuki.runs.placement import placed_on

GIB = 2**30
SMALL, LLAMA = named_shape("qwen2.5-0.5b"), named_shape("llama-3-8b")
LENGTHS = Lengths(np.full(4000, 500), np.full(4000, 400))


def job(shape: ModelShape, urgent: bool = True, **sections: dict[str, object]) -> JobConfig:
    source = {"path": "in.csv", "prompt": "{text}"} | ({"priority": "how"} if urgent else {})
    return parse_job({"model": {"shape": shape.name}, "input": source, "output": {"path": "out"}} | sections)


def cpu(memory_gib: float) -> HardwareProfile:
    return find_profile("cpu").model_copy(update={"memory_mib": int(memory_gib * 1024)})


def kv_bytes(plan: Plan, shape: ModelShape) -> tuple[int, int]:
    """Of the pools that a run allocates: on the device, and on the host."""
    settings, layers = plan.settings, shape.num_layers
    block_bytes = settings.block_tokens * shape.kv_bytes_per_token
    return footprint(settings, block_bytes, layers, settings.num_blocks, settings.offload.host_blocks)


@pytest.mark.sweep
@pytest.mark.parametrize("offload", ["auto", "park", "ahead", "stream", "none"])
@pytest.mark.parametrize("urgent", [True, False], ids=["urgent", "usual"])
@pytest.mark.parametrize("device_memory", [0.9, "6GiB"])
def test_what_moves_on_a_cpu_lies_in_the_memory_that_it_has(
    offload: str, urgent: bool, device_memory: float | str
) -> None:
    kv: dict[str, object] = {"offload": offload, "device_memory": device_memory}
    placement = placed_on(job(SMALL, urgent, kv=kv), SMALL, cpu(23.5))
    plan, shape = placement.plan(LENGTHS), placement.shape
    on_device, on_host = kv_bytes(plan, shape)
    share = 0.9 if device_memory == 0.9 else 1
    assert shape.weight_bytes + on_device + on_host <= share * 23.5 * GIB
    assert (on_host > 0) == (offload not in ("none", "auto") or (offload == "auto" and urgent))
    assert plan.host_bytes == on_host


def test_a_cpu_that_holds_no_more_than_the_longest_row_sets_nothing_aside() -> None:
    longest = Lengths(np.full(3, 1200), np.full(3, 100))
    placement = placed_on(job(SMALL), SMALL, cpu(23.5))
    tokens = int(longest.peak_tokens.max())
    config = job(SMALL, kv={"device_memory": tokens * placement.shape.kv_bytes_per_token * 102 // 100})
    plan = placed_on(config, SMALL, cpu(23.5)).plan(longest)
    assert plan.misfits == 0
    assert plan.settings.kv_tokens >= tokens


def test_a_cpu_without_the_memory_that_the_job_names_is_refused() -> None:
    kv: dict[str, object] = {"offload": "park", "host_memory": "12GiB"}
    with pytest.raises(JobFileError, match=r"kv\.host_memory: 12\.0 GiB are asked for, 5\.4 GiB are free"):
        placed_on(job(SMALL, kv=kv), SMALL, cpu(8))


def test_the_plan_says_what_a_card_pins_for_rows_that_make_way() -> None:
    placement = placed_on(job(LLAMA), LLAMA, find_profile("a10"))
    plan = placement.plan(LENGTHS.take(np.arange(200)))
    assert plan.offload.mode == "park"
    pinned = plan.settings.offload.host_blocks * plan.settings.block_tokens * LLAMA.kv_bytes_per_token
    assert 0 < pinned == plan.host_bytes <= 8 * GIB
    assert f"host memory {bytes_text(pinned)}" in " ".join(plan_table([plan]).split())


def test_weights_on_the_host_leave_the_rest_to_rows_that_make_way() -> None:
    config = job(LLAMA, engine={"weights_on_host": 16})
    plan = placed_on(config, LLAMA, find_profile("a10")).plan(LENGTHS.take(np.arange(200)))
    assert plan.settings.offload.host_blocks
    assert 16 * LLAMA.layer_weight_bytes < plan.host_bytes <= 8 * GIB


def test_rows_computed_alone_are_not_parked() -> None:
    """They keep caches of their own, which no block holds."""
    shape = replace(LLAMA, backend="alone")
    plan = placed_on(job(shape), shape, find_profile("a10")).plan(Lengths(np.full(20, 300), np.full(20, 30)))
    assert plan.offload.mode == "none"
    assert plan.settings.offload.host_blocks == plan.host_bytes == 0
    assert "stay on the device" in plan.offload.reason


@pytest.mark.parametrize("policy", ["sarathi", "vllm", "static"])
def test_policies_that_let_no_row_pass_keep_no_room_for_it(policy: str) -> None:
    plan = placed_on(job(LLAMA, engine={"policy": policy}), LLAMA, find_profile("a10")).plan(
        Lengths(np.full(20, 300), np.full(20, 30))
    )
    assert plan.settings.offload.host_blocks == 0
