"""A whole job in virtual time: the loop of real runs over the executor of virtual time, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Vector
from dataclasses import dataclass

from vasuki.arrivals import ArrivingRows, FirstCome, WaitingTimes, admission_for
from vasuki.engine.loop import Observer, RunStats, drain
from vasuki.engine.queues import Counters
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence
from vasuki.engine.settings import EngineSettings
from vasuki.machines.cost_model import CostModel
from vasuki.simulator.arrivals import VirtualFeed
from vasuki.simulator.fast_forward import FastForward
from vasuki.simulator.simulated_executor import SimulatedExecutor


@dataclass(slots=True)
class CountingSink:
    """Counts rows instead of keeping them."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_error: str = ""

    def write(self, sequence: Sequence) -> None:
        self.rows += 1
        if sequence.error:
            self.failed += 1
            self.first_error = self.first_error or sequence.error
            return
        self.prompt_tokens += sequence.num_prompt_tokens
        self.output_tokens += sequence.num_output_tokens

    def commit_if_due(self, now_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """How a simulated run went."""

    makespan_s: float
    stats: RunStats
    counters: Counters
    written: CountingSink
    waited: WaitingTimes | None = None  # where rows arrive


def simulate(
    requests: Iterable[Request],
    output_tokens: Vector[int],
    settings: EngineSettings,
    cost_model: CostModel,
    *,
    arrived_at_s: Vector[float] | None = None,
    admission: FirstCome | None = None,
    observers: Iterable[Observer] = (),
    one_by_one: bool = False,
) -> SimulationResult:
    """Run requests to their recorded ends in virtual time. The same arguments give the same result to the last digit.

    Args:
        requests: in the order in which they should start; in order of arrival where there are arrivals.
        output_tokens: recorded length of each row, by `Request.row`.
        settings: policy, limits and memory.
        cost_model: model and device.
        arrived_at_s: by `Request.row`; None if all rows are there from the start.
        admission: says whose turn it is of those that have arrived; the policy if not given.
        observers: see the steps, several at a time unless `one_by_one`; a `PlannedOrder` learns from them.
        one_by_one: run single steps.
    """
    scheduler = Scheduler(settings)
    fast_forward = None if one_by_one else FastForward(scheduler)
    executor = SimulatedExecutor(cost_model, output_tokens, settings, fast_forward)
    waited = None
    if arrived_at_s is not None:
        feed, times_s = VirtualFeed(requests, arrived_at_s, executor.clock), arrived_at_s
        admission = admission_for(settings.policy) if admission is None else admission
        requests = ArrivingRows(feed, scheduler, admission)
        waited = WaitingTimes(lambda request: times_s[request.row], lambda: feed.now_s)
        waited.on_first_token = admission.first_token
        observers = [waited, *observers]
    sink = CountingSink()
    stats = drain(requests, scheduler, executor, sink, observers)
    touched_s = cost_model.first_touch_s(stats.peak_device_blocks * settings.block_tokens)
    makespan_s = cost_model.pinning_s(settings) + executor.clock.now_s + touched_s
    return SimulationResult(makespan_s, stats, scheduler.queues.counters, sink, waited)
