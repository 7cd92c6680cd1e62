"""A plan, run in virtual time on every request of its job."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Vector
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from vasuki.arrivals import Percentiles, WaitingTimes, admission_for
from vasuki.arrivals.gathering import Gathering
from vasuki.base.config import PlanConfig
from vasuki.base.errors import JobFileError
from vasuki.engine.loop import Observer
from vasuki.engine.settings import EngineSettings
from vasuki.machines.cost_model import CostModel
from vasuki.machines.memory_budget import footprint
from vasuki.machines.price import Cost
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape
from vasuki.planner.leases import Leases, Work
from vasuki.planner.lengths import Lengths
from vasuki.planner.ordering import PlannedOrder, order_requests
from vasuki.planner.plan import Plan
from vasuki.simulator import (
    CountingSink,
    PipelineResult,
    ReplicasResult,
    SimulatedMachine,
    SimulationResult,
    simulate,
    simulate_pipelines,
    simulate_replicas,
)


@dataclass(frozen=True, slots=True)
class Spread:
    """How a quantity is distributed."""

    mean: float = 0.0
    median: float = 0.0
    p90: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Vector[float]) -> Spread:
        """Sum up at least one value; zeros if there is none."""
        if not len(values):
            return cls()
        array = np.asarray(values)
        median, p90 = np.quantile(array, (0.5, 0.9))
        return cls(float(array.mean()), float(median), float(p90), float(array.max()))


@dataclass(frozen=True, slots=True)
class Bubbles:
    """Time that pipeline stages waited for their next micro-batch."""

    share: float = 0.0  # of the time of all stages
    micro_batch_s: Spread = Spread()  # on the way through all stages
    request_s: Spread = Spread()  # of all micro-batches that a request took part in

    @classmethod
    def of(cls, result: PipelineResult) -> Bubbles:
        """The bubbles of a simulated job."""
        return cls(result.bubble_share, Spread.of(result.step_bubble_s), Spread.of(result.bubble_s))


@dataclass(frozen=True, slots=True)
class Simulated:
    """A plan, and what its simulation on every request gave."""

    plan: Plan  # with makespan, cost and solver of the simulation
    result: SimulationResult
    block_bytes: int  # KV of a block, all layers
    num_layers: int
    bubbles: Bubbles = Bubbles()
    interruptions: int = 0  # by which machines were taken away
    urgent_latency: Percentiles | None = None  # from an urgent row's arrival, or the start, to its end
    missed_deadlines: int | None = None  # rows that ended later than they were due; None where no row has a deadline

    @property
    def ttft(self) -> Percentiles | None:
        """From a row's arrival to its first token; None unless rows arrive."""
        waited = self.result.waited
        return Percentiles.of(waited.ttft_s) if waited else None

    @property
    def latency(self) -> Percentiles | None:
        """From a row's arrival to its end; None unless rows arrive."""
        waited = self.result.waited
        return Percentiles.of(waited.latency_s) if waited else None

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again after preemptions."""
        return self.result.counters.recomputed_tokens

    def to_dict(self) -> dict[str, Any]:
        """The object that `simulate --json` prints: the plan's fields, and what happened, as in a manifest."""
        stats, counters = self.result.stats, self.result.counters
        device_bytes, host_bytes = footprint(
            self.plan.settings, self.block_bytes, self.num_layers, stats.peak_device_blocks, stats.peak_host_blocks
        )
        return {
            **self.plan.to_dict(),
            "steps": stats.steps,
            "batch": {"mean_seqs": stats.mean_seqs, "max_seqs": stats.max_seqs},
            "kv": {
                "peak_device_bytes": device_bytes + stats.max_seqs * self.plan.state_bytes,
                "peak_host_bytes": host_bytes,
                "offloaded_bytes": stats.copied_bytes,
                "exposed_copy_s": stats.exposed_copy_s,
                "hidden_copy_s": stats.hidden_copy_s,
                "prefilled_ahead": counters.prefilled_ahead,
            },
            "preemptions": {"swap": counters.preemptions_swap, "recompute": counters.preemptions_recompute},
            "layout": self.plan.layout.to_dict(),
            "bubbles": asdict(self.bubbles),
            "interruptions": self.interruptions,
            "ttft": self.ttft and asdict(self.ttft),
            "latency": self.latency and asdict(self.latency),
            "urgent_latency": self.urgent_latency and asdict(self.urgent_latency),
            "missed_deadlines": self.missed_deadlines,
        }


def simulate_plan(
    plan: Plan,
    lengths: Lengths,
    shape: ModelShape,
    profile: HardwareProfile,
    *,
    plan_config: PlanConfig | None = None,
    gathering: Gathering | None = None,
    layout: Layout | None = None,
    observers: Iterable[Observer] = (),
    one_by_one: bool = False,
) -> Simulated:
    """Run every request of a job as planned. The same arguments give the same result to the last digit.

    Where the layout has several stages or replicas, the plan is that of one micro-batch, as `plan_parallel` makes it.

    Args:
        plan: from `make_plan`, for the same job.
        lengths: recorded lengths; rows start no earlier than they arrive.
        shape: the model.
        profile: the device.
        plan_config: what is known of outputs, and the ordering window; the plan says which solver.
        gathering: how rows are gathered as they arrive, where the policy does that.
        layout: over several devices; the plan's if not given.
        observers: see the steps, several at a time unless `one_by_one`.
        one_by_one: run single steps.

    Raises:
        JobFileError: no row can have its first token by the target for which rows are gathered.
    """
    config = plan_config or PlanConfig()
    settings = plan.settings
    arrivals = lengths.arrived_at_s
    if settings.policy.gathers:
        gathering = gathering or Gathering()
        settings = settings_for_batches(settings, gathering)
        arrivals = np.zeros(len(lengths)) if arrivals is None else arrivals
    else:
        gathering = None
    layout = layout or plan.layout
    leased = layout.data_parallel > 1 and layout.pipeline_parallel == 1 and settings.policy.ordered
    requests = lengths.requests(settings.policy.waves)
    order = order_requests(
        requests,
        settings,
        solver=plan.solver,
        known=lengths.known,
        output_length=config.output_length,
        window_rows=config.window_rows,
        order=plan.order,
        replicas=layout.data_parallel if leased else 1,
    )
    outputs = np.minimum(lengths.output_tokens, lengths.limits).data
    cost_model = CostModel(shape, profile, layout)
    if gathering is not None:
        refuse_target(gathering, lengths, cost_model)
    bubbles = Bubbles()
    waited = WaitingTimes(lambda request: 0.0)
    if arrivals is None:
        observers = [*observers, order, *_watching(waited, lengths)]
    if leased:
        machines = [SimulatedMachine(settings, cost_model)] * layout.data_parallel
        leases = Leases(order, Work.of(cost_model, plan), len(lengths), plan.makespan_s)
        result, _ = _on_replicas(leases, outputs, machines, observers)
    elif cost_model.layout.num_streams > 1:
        result, bubbles = _in_streams(order, outputs, settings, cost_model, observers)
    else:
        result = simulate(
            order if arrivals is None else requests,  # what has not arrived cannot be ordered
            outputs,
            settings,
            cost_model,
            arrived_at_s=None if arrivals is None else np.ascontiguousarray(arrivals).data,
            admission=admission_for(settings.policy, gathering),
            observers=observers,
            one_by_one=one_by_one,
        )
    tokens = result.written.prompt_tokens + result.written.output_tokens
    simulated = replace(
        plan,
        makespan_s=result.makespan_s,
        solver=order.solved.solver,
        simulated_requests=result.written.rows,
        sample_spread=0.0,
        cost=Cost.of(result.makespan_s, plan.layout.num_gpus, plan.cost.price_per_hour, plan.cost.currency, tokens),
        shared_tokens=result.counters.shared_tokens,
    )
    block_bytes = shape.kv_bytes_per_token * settings.block_tokens
    waited = result.waited or waited
    return Simulated(
        simulated,
        result,
        block_bytes,
        shape.num_layers,
        bubbles,
        urgent_latency=Percentiles.of(waited.urgent_latency_s),
        missed_deadlines=None if lengths.deadline_s is None else waited.missed_deadlines,
    )


@dataclass(frozen=True, slots=True)
class Member:
    """Replicas of one kind in a fleet."""

    plan: Plan  # of one of them, for its share of the job
    cost_model: CostModel
    count: int
    interruptions_per_hour: float = 0.0  # of one
    boot_s: float = 0.0


def simulate_fleet(
    whole: Plan,
    members: Vector[Member],
    lengths: Lengths,
    *,
    plan_config: PlanConfig | None = None,
    seed: int = 0,
    observers: Iterable[Observer] = (),
) -> Simulated:
    """Run every request of a job on machines of several kinds, or of one, which are taken away now and then.

    The same arguments give the same result to the last digit.

    Args:
        whole: the fleet's plan, whose cost is that of all machines as long as it says.
        members: the fleet's replicas by kind, one at least.
        lengths: recorded lengths of the requests.
        plan_config: what is known of outputs, and the ordering window.
        seed: of the moments at which machines are taken away.
        observers: see the steps, several at a time.
    """
    config, replicas = plan_config or PlanConfig(), sum(member.count for member in members)
    first = members[0]
    order = order_requests(
        lengths.requests(),
        first.plan.settings,
        solver=first.plan.solver,
        known=lengths.known,
        output_length=config.output_length,
        window_rows=config.window_rows,
        replicas=replicas,
    )
    works = [Work.of(member.cost_model, member.plan) for member in members]
    machines = [
        SimulatedMachine(
            member.plan.settings,
            member.cost_model,
            speed=work.speed(works[0], lengths),
            row_token_s=work.row_token_s,
            interruptions_per_hour=member.interruptions_per_hour,
            boot_s=member.boot_s,
        )
        for member, work in zip(members, works, strict=True)
        for _ in range(member.count)
    ]
    outputs = np.minimum(lengths.output_tokens, lengths.limits).data
    leases = Leases(order, works[0], len(lengths), whole.makespan_s)
    waited = WaitingTimes(lambda request: 0.0)
    observers = [*observers, order, *_watching(waited, lengths)]
    result, played = _on_replicas(leases, outputs, machines, observers, seed)
    tokens = result.written.prompt_tokens + result.written.output_tokens
    cost, boot_s = whole.cost, min(member.boot_s for member in members)
    simulated = replace(
        whole,
        makespan_s=result.makespan_s,
        simulated_requests=result.written.rows,
        sample_spread=0.0,
        lower_bound_s=boot_s + whole.lower_bound_s,  # no schedule computes before a machine is there
        schedule_bound_s=boot_s + whole.schedule_bound_s,
        cost=Cost.of(result.makespan_s, whole.layout.num_gpus, cost.price_per_hour, cost.currency, tokens),
        shared_tokens=result.counters.shared_tokens,
    )
    shape = first.cost_model.shape
    block_bytes = shape.kv_bytes_per_token * first.plan.settings.block_tokens
    return Simulated(
        simulated,
        result,
        block_bytes,
        shape.num_layers,
        interruptions=played.interruptions,
        urgent_latency=Percentiles.of(waited.urgent_latency_s),
        missed_deadlines=None if lengths.deadline_s is None else waited.missed_deadlines,
    )


def _watching(waited: WaitingTimes, lengths: Lengths) -> list[Observer]:
    """The observer, where it has something to see."""
    return [] if lengths.deadline_s is None and lengths.priority is None else [waited]


def settings_for_batches(settings: EngineSettings, gathering: Gathering) -> EngineSettings:
    """Settings of steps that each have room for a packed batch, however many rows decode."""
    limits = settings.limits
    step_tokens = gathering.batch_tokens + limits.max_num_seqs
    limits = replace(limits, chunk_tokens=step_tokens, lookahead=gathering.batch_rows + 1)
    return replace(settings, limits=limits)


def refuse_target(gathering: Gathering, lengths: Lengths, cost_model: CostModel) -> None:
    """Raises JobFileError if no row can have its first token in time."""
    shortest = int(lengths.prompt_tokens.min())
    step_s = cost_model.step_time_s(cost_model.work([shortest], [shortest]))
    if gathering.target_s < step_s:
        raise JobFileError(
            f"arrivals.target_s: {gathering.target_s:g} s is below one step's time: the shortest prompt alone takes "
            f"{step_s:.3g} s"
        )


def _in_streams(
    order: PlannedOrder,
    output_tokens: Vector[int],
    settings: EngineSettings,
    cost_model: CostModel,
    observers: Iterable[Observer],
) -> tuple[SimulationResult, Bubbles]:
    """Simulate over pipeline stages, or replicas of a policy that has its own order."""
    sink = CountingSink()
    result = simulate_pipelines(
        order,
        output_tokens,
        settings,
        cost_model,
        observers=observers,
        on_ended=sink.write,
    )
    return SimulationResult(result.makespan_s, result.stats, result.counters, sink), Bubbles.of(result)


def _on_replicas(
    leases: Leases,
    output_tokens: Vector[int],
    machines: Vector[SimulatedMachine],
    observers: Iterable[Observer],
    seed: int = 0,
) -> tuple[SimulationResult, ReplicasResult]:
    """Simulate over replicas that take leases."""
    sink = CountingSink()
    result = simulate_replicas(leases, output_tokens, machines, seed=seed, observers=observers, on_ended=sink.write)
    return SimulationResult(result.makespan_s, result.stats, result.counters, sink), result
