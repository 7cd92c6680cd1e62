"""Every manifest, built in one place: of a simulated run and of a real one."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vasuki.base.config import JobConfig
from vasuki.base.logs import run_id
from vasuki.base.version import VERSION
from vasuki.engine.loop import RunStats
from vasuki.engine.queues import Counters
from vasuki.io.output.manifest import (
    BatchStats,
    Bounds,
    KVStats,
    Manifest,
    Predicted,
    PreemptionCounts,
    Ran,
    RowCounts,
    Timings,
    TokenCounts,
    now_utc,
)
from vasuki.machines.memory_budget import footprint
from vasuki.machines.price import Cost
from vasuki.machines.profile import HardwareProfile
from vasuki.models.shape import ModelShape
from vasuki.planner.any_schedule import AnySchedule
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import Simulated
from vasuki.runs.opening import JobKey

if TYPE_CHECKING:
    from vasuki.hf.loading.loaded_model import LoadedModel


def simulated_manifest(
    config: JobConfig,
    config_hash: str,
    fingerprint: str,
    plan: Plan,
    lengths: Lengths,
    simulated: Simulated,
    shape: ModelShape,
    profile: HardwareProfile,
) -> Manifest:
    """The manifest of a simulated run, which `vasuki report` reads like a real one."""
    result = simulated.to_dict()
    rows, failed = len(lengths), plan.misfits
    manifest = Manifest(
        **_of_job(config, config_hash, fingerprint, plan),
        rows=RowCounts(rows, rows - failed, failed),
        tokens=TokenCounts(
            int(lengths.prompt_tokens.sum()),
            int(lengths.output_tokens.sum()),
            simulated.recomputed_tokens,
            simulated.result.counters.shared_tokens,
        ),
        timings=Timings(plan_s=plan.plan_s, generate_s=result["makespan_s"], makespan_s=result["makespan_s"]),
        bounds=Bounds(plan.schedule_bound_s, 1.0, plan.lower_bound_s, simulated.plan.uncertainty),
        ran=ran(simulated.plan, shape, simulated.result.stats),
        steps=result["steps"],
        batch=BatchStats(**result["batch"]),
        kv=KVStats(**result["kv"]),
        preemptions=PreemptionCounts(**result["preemptions"]),
        ttft=simulated.ttft,
        latency=simulated.latency,
        urgent_latency=simulated.urgent_latency,
        missed_deadlines=simulated.missed_deadlines or 0,
        device={
            "type": profile.kind,
            "name": profile.title,
            "profile": profile.name,
            "policy": plan.policy,
            "count": plan.layout.num_gpus,
            "layout": plan.layout.to_dict(),
        },
        cost=simulated.plan.cost,
        versions={"vasuki": VERSION},
        simulated=True,
        finished_at=now_utc(),
        run_id=run_id(),
    )
    if simulated.latency is None:
        return manifest
    return replace(manifest, predicted=replace(manifest.predicted, makespan_s=None))  # which knows of no arrivals


def run_manifest(
    job: JobKey,
    plan: Plan,
    loaded: LoadedModel,
    shape: ModelShape,
    stats: RunStats,
    counters: Counters,
    timings: Timings,
    bounds: Bounds,
    num_tokens: int,
    energy_j: float | None,
    stolen_share: float,
) -> Manifest:
    """The manifest of a run. Its rows, and the tokens of prompts and outputs, are those that the output folder counts.

    Args:
        job: the job.
        plan: by which it ran.
        loaded: its model.
        shape: as it ran.
        stats: of its steps.
        counters: of its scheduler.
        timings: of the run.
        bounds: of what it did.
        num_tokens: of the rows that it finished, prompts and outputs.
        energy_j: that the device drew; None where that is not known.
        stolen_share: of the processors' time that the host of a virtual machine gave to others.
    """
    device_bytes, host_bytes = footprint(
        plan.settings,
        plan.settings.block_tokens * loaded.token_bytes,
        loaded.kv_layout.num_layers,
        stats.peak_device_blocks,
        stats.peak_host_blocks,
    )
    device: dict[str, Any] = {
        "type": loaded.device.type,
        "name": loaded.device_name,
        "profile": plan.gpu,
        "policy": plan.policy,
        "stolen_share": stolen_share,
    }
    if loaded.threads is not None:
        device["threads"] = loaded.threads
    if energy_j is not None:
        device["energy_j"] = energy_j
    return Manifest(
        **_of_job(job.config, job.config_hash, job.input_fingerprint, plan),
        tokens=TokenCounts(recomputed=counters.recomputed_tokens, shared=counters.shared_tokens),
        timings=timings,
        bounds=bounds,
        ran=replace(ran(plan, shape, stats), computed_on=loaded.computed_on, varies=loaded.varies),
        steps=stats.steps,
        batch=BatchStats(stats.mean_seqs, stats.max_seqs),
        kv=KVStats(
            peak_device_bytes=device_bytes + stats.max_seqs * plan.state_bytes,
            peak_host_bytes=host_bytes,
            offloaded_bytes=stats.copied_bytes,
            exposed_copy_s=stats.exposed_copy_s,
            hidden_copy_s=stats.hidden_copy_s,
            prefilled_ahead=counters.prefilled_ahead,
        ),
        preemptions=PreemptionCounts(counters.preemptions_swap, counters.preemptions_recompute),
        device=device,
        cost=Cost.of(timings.makespan_s, 1, plan.cost.price_per_hour, plan.cost.currency, num_tokens),
        versions=_versions(),
        finished_at=now_utc(),
        run_id=run_id(),
    )


def bounds_of(schedules: AnySchedule, done: JobSums, pace: float | None) -> Bounds:
    """What no schedule of rows that were done beats.

    Args:
        schedules: of the machine.
        done: the rows.
        pace: seconds of the steps that did them over what the cost model says of them; None if there was none.
    """
    if done.is_empty or pace is None:
        return Bounds()
    return Bounds(pace * schedules.least_s(done), pace, schedules.at_datasheet_rates(done).seconds)


def ran(plan: Plan, shape: ModelShape, stats: RunStats) -> Ran:
    """How rows ran by a plan with the settings that its executor came to.

    Args:
        plan: the plan.
        shape: of the model as it ran.
        stats: of the steps.
    """
    settings, packing = plan.settings, ""
    layers = float(settings.offload.streamed_layers)
    if settings.offload.depth is not None and stats.steps:
        layers = stats.streamed_layer_steps / stats.steps
    if shape.backend == "padded":
        packing = "always" if shape.always_packed else "by price" if shape.longest_packed_tokens else "never"
    return Ran(
        policy=settings.policy.name,
        solver=plan.solver,
        mixing=settings.policy.mixing.value,
        chunk_tokens=settings.limits.chunk_tokens,
        max_num_seqs=settings.limits.max_num_seqs,
        block_tokens=settings.block_tokens,
        kv_tokens=settings.kv_tokens,
        offload=settings.offload.mode,
        layers=layers,
        weights_on_host=plan.layout.host_layers,
        backend=shape.backend,
        packing=packing,
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype or shape.dtype,
        quantization=shape.product_dtype or "none",
    )


def _of_job(config: JobConfig, config_hash: str, fingerprint: str, plan: Plan) -> dict[str, Any]:
    """What every manifest says of its job, and of what was predicted for it."""
    return {
        "job": config.model_dump(mode="json"),
        "config_hash": config_hash,
        "input_fingerprint": fingerprint,
        "predicted": Predicted(
            plan.makespan_s, plan.lower_bound_s, plan.schedule_bound_s, plan.source, plan.output_tokens_estimate
        ),
    }


def _versions() -> dict[str, str]:
    packages = ("torch", "transformers", "pyarrow")
    others = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "vasuki": VERSION} | others
