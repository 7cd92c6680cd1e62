"""A plan for several GPUs.

A replica of S stages keeps S micro-batches in flight, each with an S-th of the KV memory and a scheduler of its own, so
what has to be planned is one such stream: its share of the rows on one replica, whose steps pass through all stages one
after the other. As long as no stage ever waits, that takes as long as all streams side by side. What bubbles add
(`vasuki.simulator.pipeline`), and what replicas wait at the end for the one with the longest row, only a simulation of
the whole job knows. Of a job that is small enough for one, replicas may also take the steps of one that does it alone.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from vasuki.base.arrays import Ints
from vasuki.base.config import JobConfig
from vasuki.base.errors import JobFileError
from vasuki.engine.policy import find_policy
from vasuki.machines.memory_budget import memory_budget
from vasuki.machines.price import Cost
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape
from vasuki.planner.candidates import MOST_CHUNK_TOKENS, NUM_SEQS
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lengths import Lengths
from vasuki.planner.one_device import make_plan
from vasuki.planner.ordering.planned_order import MOST_ROWS
from vasuki.planner.plan import Plan
from vasuki.planner.prediction import SIMULATION_US, sample_rows
from vasuki.planner.simulated import simulate_plan
from vasuki.planner.whole_job import affordable_rows


def plan_parallel(
    lengths: Lengths, shape: ModelShape, profile: HardwareProfile, config: JobConfig, layout: Layout
) -> Plan:
    """Plan a job on the GPUs of a layout.

    Limits and memory are for one micro-batch, everything else is for the whole job.

    Raises:
        ModelError: the model cannot be cut this way, does not fit, or the profile does not say how GPUs are joined.
        InputError: not one of the requests fits.
        JobFileError: the job asks for what is not simulated with several stages or replicas.
    """
    layout.check(shape)
    if layout.num_streams == 1:
        return _plan(lengths, shape, profile, config, layout)
    started_s = time.perf_counter()
    _refuse(lengths, config, layout)
    replica = replace(layout, data_parallel=1)
    shared = config if replica.num_streams == 1 else _of_stream(lengths, shape, profile, config, replica)
    stream = _plan(lengths.take(_share(lengths, layout.num_streams)), shape, profile, shared, replica)
    plan = _of_job(replace(stream, order=()), lengths, shape, config, layout)
    if len(lengths) <= affordable_rows(plan.makespan_s, stream.simulated_row_s, SIMULATION_US * 1e-6):
        options, alone_s = [plan], math.inf
        if config.plan.solver == "auto" and plan.settings.policy.ordered:  # stages may wait less as rows come
            options.append(replace(plan, solver="fifo"))
        if replica.num_streams == 1:  # whose steps may be better, where one row is much of the job
            alone = _plan(lengths, shape, profile, config, replica)
            options.append(_of_job(alone, lengths, shape, config, layout))
            alone_s = alone.makespan_s
        simulated = [simulate_plan(option, lengths, shape, profile, plan_config=config.plan) for option in options]
        plan = min((each.plan for each in simulated), key=lambda option: option.makespan_s)
        if alone_s <= plan.makespan_s:
            plan = replace(plan, one_replica_s=alone_s)
    return replace(plan, plan_s=time.perf_counter() - started_s)


def _share(lengths: Lengths, streams: int) -> Ints:
    """`[rows]` indices of the rows that one of the streams gets: its share of the work, and the row that needs most
    memory."""
    rows = sample_rows(lengths, math.ceil(len(lengths) / streams))
    return np.union1d(rows, [int(np.argmax(lengths.peak_tokens))])


def _of_job(stream: Plan, lengths: Lengths, shape: ModelShape, config: JobConfig, layout: Layout) -> Plan:
    """The plan of all streams, each run as one of them was planned: what that one takes beyond its bound, the job takes
    beyond its own."""
    needed = lengths.peak_tokens
    fits = needed <= stream.settings.kv_tokens
    job = lengths.take(np.flatnonzero(fits))
    layout = replace(layout, host_layers=stream.layout.host_layers)
    any_schedule = replace(
        stream.any_schedule,
        layouts=tuple(replace(each, data_parallel=layout.data_parallel) for each in stream.any_schedule.layouts),
        device_memory=config.kv.device_memory,
    )
    sums = JobSums.of_lengths(shape, job)
    bound, schedule_bound_s = any_schedule.at_datasheet_rates(sums), any_schedule.least_s(sums)
    makespan_s = schedule_bound_s + stream.makespan_s - stream.schedule_bound_s
    tokens = int(job.prompt_tokens.sum() + job.output_tokens.sum())
    return replace(
        stream,
        requests=len(lengths),
        prompt_tokens=int(lengths.prompt_tokens.sum()),
        output_tokens_estimate=int(lengths.output_tokens.sum()),
        makespan_s=makespan_s,
        lower_bound_s=bound.seconds,
        schedule_bound_s=schedule_bound_s,
        any_schedule=any_schedule,
        shared_tokens=stream.shared_tokens * layout.num_streams,
        cost=Cost.of(makespan_s, layout.num_gpus, stream.cost.price_per_hour, stream.cost.currency, tokens),
        layout=layout,
        host_bytes=stream.host_bytes * layout.num_streams,
        misfits=int((~fits).sum()),
        misfit="" if fits.all() else _misfit(int(np.argmin(fits)), needed, stream.settings.kv_tokens),
    )


def _plan(
    lengths: Lengths,
    shape: ModelShape,
    profile: HardwareProfile,
    config: JobConfig,
    layout: Layout,
) -> Plan:
    return make_plan(
        lengths,
        shape,
        profile,
        plan=config.plan,
        engine=config.engine,
        kv=config.kv,
        cost=config.cost,
        layout=layout,
        may_be_urgent=config.input.may_be_urgent,
    )


def _misfit(row: int, needed: Ints, kv_tokens: int) -> str:
    return f"row {row} needs KV memory for {needed[row]:,} tokens, a micro-batch has room for {kv_tokens:,}"


def _refuse(lengths: Lengths, config: JobConfig, layout: Layout) -> None:
    """Raises JobFileError for what `simulate_pipelines` does not price, and for a solver of one device's order."""
    if config.plan.solver in MOST_ROWS and find_policy(config.engine.policy).ordered:
        raise JobFileError(
            f"plan.solver: {config.plan.solver} orders the rows of one device, and several replicas or stages share "
            "these; leave it out"
        )
    if lengths.arrived_at_s is not None:
        raise JobFileError("arrived_at is not simulated with several replicas or stages; leave the column out")
    if find_policy(config.engine.policy).gathers:
        key = "engine.replicas: " if config.engine.replicas != 1 else ""
        raise JobFileError(f"{key}policy {config.engine.policy} is not simulated with several replicas or stages")


def _of_stream(
    lengths: Lengths, shape: ModelShape, profile: HardwareProfile, config: JobConfig, layout: Layout
) -> JobConfig:
    """The job with the KV memory of each GPU that one micro-batch may fill, with what states its rows keep. All have
    the same share, whatever their step size."""
    engine = config.engine
    step_tokens = MOST_CHUNK_TOKENS if engine.chunk_tokens == "auto" else engine.chunk_tokens
    if not find_policy(engine.policy).chunked:
        step_tokens = int(lengths.prompt_tokens.max())
    budget = memory_budget(
        shape.without_states,
        profile,
        device_memory=config.kv.device_memory,
        max_step_tokens=step_tokens,
        max_num_seqs=NUM_SEQS if engine.max_num_seqs == "auto" else engine.max_num_seqs,
        row_tokens=min(shape.max_context_tokens, int(lengths.peak_tokens.max())),
        layout=layout,
    )
    share = budget.kv_bytes // layout.pipeline_parallel
    return config.model_copy(update={"kv": config.kv.model_copy(update={"device_memory": share})})
