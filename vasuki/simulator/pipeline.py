"""Pipeline-parallel replicas in virtual time.

A replica of S stages keeps S micro-batches in flight. Each is a stream of steps of its own: a scheduler, a share of the
KV memory, and a next step that can only be formed when the step before has left the last stage. Stages serve
micro-batches in the order in which these come. A stage that is free before its next micro-batch arrives has a bubble,
drawn as dots, which that micro-batch is charged with:

    stage 0   | A1 | B1 |    C1   | A2 | B2 |.........|    C2   |
    stage 1        | A1 | B1 |....|    C1   | A2 | B2 |.........|
    stage 2             | A1 | B1 |.........|    C1   | A2 | B2 |

Steps that take equally long leave no bubbles, which is what chunked prefills are for (Sarathi, 3.2 and 5.3). Replicas
work side by side; all streams take their requests from one queue.
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Vector
from dataclasses import dataclass, field

from vasuki.base.errors import SchedulerStalled
from vasuki.engine.batch import Batch
from vasuki.engine.loop import Observer, RunStats
from vasuki.engine.queues import Counters
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence
from vasuki.engine.settings import EngineSettings
from vasuki.machines.cost_model import CostModel, StepTime
from vasuki.simulator.fast_forward import FastForward
from vasuki.simulator.simulated_executor import SimulatedExecutor


def _floats() -> array[float]:
    return array("d")  # a job has many requests and many more steps


@dataclass(slots=True)
class PipelineResult:
    """How a job went. Requests are listed in the order in which their last steps began."""

    completed_s: array[float] = field(default_factory=_floats)  # `[requests]` when each ended
    bubble_s: array[float] = field(default_factory=_floats)  # `[requests]` bubbles of all steps that each took part in
    step_bubble_s: array[float] = field(
        default_factory=_floats
    )  # `[steps]` of each micro-batch, over all stages; empty without stages
    stats: RunStats = field(default_factory=RunStats)  # a step is a micro-batch's way through all stages
    counters: Counters = field(default_factory=Counters)  # of all schedulers
    busy_s: float = 0.0  # of all stages of all replicas
    idle_s: float = 0.0  # of the same, from the start up to the last micro-batch of each stage

    @property
    def makespan_s(self) -> float:
        return max(self.completed_s, default=0.0)

    @property
    def bubble_share(self) -> float:
        """Share of the stages' time that is bubbles."""
        return self.idle_s / (self.busy_s + self.idle_s) if self.stats.steps else 0.0


def simulate_pipelines(
    requests: Iterable[Request],
    output_tokens: Vector[int],
    settings: EngineSettings,
    cost_model: CostModel,
    *,
    observers: Iterable[Observer] = (),
    on_ended: Callable[[Sequence], None] = lambda sequence: None,
) -> PipelineResult:
    """Run requests to their recorded ends on `data_parallel` replicas of `pipeline_parallel` stages.

    Args:
        requests: in the order in which they should start.
        output_tokens: recorded length of each row, by `Request.row`.
        settings: of one micro-batch: its scheduler's policy and limits, and its share of a replica's KV memory, a
            `pipeline_parallel`-th of it.
        cost_model: model, device and layout; the send to the next stage counts to a stage's time.
        observers: see every micro-batch, when it enters its replica; without stages several steps at a time.
        on_ended: told of every row that ends, with or without an error.

    Raises:
        SchedulerStalled: work is left but no batch can be formed.
        ValueError: layers are streamed, which is not priced stage by stage.
    """
    stages, replicas = cost_model.layout.pipeline_parallel, cost_model.layout.data_parallel
    if stages > 1 and settings.offload.streamed_layers:
        raise ValueError("streamed layers are not simulated in pipelines")
    simulation = _PipelineSimulation(requests, list(observers), on_ended)

    def stream(free_s: list[float]) -> _Stream:
        scheduler = Scheduler(settings)
        if stages == 1:  # streams that share nothing but the queue can run several steps at once
            fast_forward = FastForward(scheduler)
            return _Stream(scheduler, SimulatedExecutor(cost_model, output_tokens, settings, fast_forward))
        return _Stream(scheduler, _StagedExecutor(cost_model, output_tokens, settings, free_s, simulation.result))

    each_free_s = [[0.0] * stages for _ in range(replicas)]
    # Replicas take turns, so that none has a head start on the queue.
    turns = [free_s for _ in range(stages) for free_s in each_free_s]
    return simulation.run([stream(free_s) for free_s in turns])


class _StagedExecutor(SimulatedExecutor):
    """Sends the micro-batches of one stream through the stages of its replica.

    Its clock shows when the last one left the last stage.

    Args:
        cost_model: says how long a micro-batch takes on a stage.
        output_tokens: recorded length of each row, by `Request.row`.
        settings: of the stream.
        free_s: `[stages]` when each stage has served all that came; shared with the replica's other streams.
        result: bubbles and stage times are added here.
    """

    def __init__(
        self,
        cost_model: CostModel,
        output_tokens: Vector[int],
        settings: EngineSettings,
        free_s: list[float],
        result: PipelineResult,
    ) -> None:
        super().__init__(cost_model, output_tokens, settings)
        self._free_s = free_s
        self._result = result

    def step_times(self, batch: Batch, most_steps: int) -> Iterator[StepTime]:
        """Times from where the micro-batch is ready to enter up to where it leaves."""
        cost, free_s, result = self.cost_model, self._free_s, self._result
        copies = cost.swap_copies(batch, self._block_tokens) if batch.swaps else ()
        entered_s = now_s = self.clock.now_s
        bubble_s = exposed_s = hidden_s = 0.0
        shaped = list(self._shaping(batch)) if self._shaping else None
        for stage, step in enumerate(cost.stage_times(cost.batch_work(batch, copies, shaped))):
            start_s = max(now_s, free_s[stage])
            bubble_s += start_s - free_s[stage]
            result.busy_s += step.total_s
            exposed_s += step.exposed_copy_s
            hidden_s += step.hidden_copy_s
            now_s = free_s[stage] = start_s + step.total_s
        result.idle_s += bubble_s
        result.step_bubble_s.append(bubble_s)
        yield StepTime(now_s - entered_s, exposed_s, hidden_s)


@dataclass(slots=True)
class _Stream:
    """The batch that goes round and round."""

    scheduler: Scheduler
    executor: SimulatedExecutor


class _PipelineSimulation:
    """One call of `simulate_pipelines`."""

    def __init__(
        self, requests: Iterable[Request], observers: list[Observer], on_ended: Callable[[Sequence], None]
    ) -> None:
        self.result = PipelineResult()
        self._requests = iter(requests)
        self._observers = observers
        self._on_ended = on_ended
        self._bubble_s: defaultdict[Sequence, float] = defaultdict(float)  # of requests in progress

    def run(self, streams: list[_Stream]) -> PipelineResult:
        """What is ready first enters stage 0 first, and passing makes nothing ready in the past: one heap will do."""
        ready = [(0.0, index) for index in range(len(streams))]
        while ready:
            _, index = heapq.heappop(ready)
            stream = streams[index]
            self._fill(stream.scheduler)
            batch = stream.scheduler.schedule()
            if batch is not None:
                self._step(stream, batch)
                heapq.heappush(ready, (stream.executor.clock.now_s, index))
            elif not stream.scheduler.queues.is_empty():
                left = len(list(stream.scheduler.queues.live()))
                raise SchedulerStalled(f"{left} sequences are left and none can run")
        self._sum_up([stream.scheduler for stream in streams])
        return self.result

    def _fill(self, scheduler: Scheduler) -> None:
        """Take requests that there are slots for: any other is better off with the next stream that has one."""
        queues = scheduler.queues
        while scheduler.wants_more() and queues.num_running + len(queues.waiting) < scheduler.limits.max_num_seqs:
            request = next(self._requests, None)
            if request is None:
                return
            if (rejected := scheduler.add(request)) is not None:
                self._on_ended(rejected)

    def _step(self, stream: _Stream, batch: Batch) -> None:
        """The loop of `engine.loop.drain`, for one stream of several."""
        result, executor = self.result, stream.executor
        step = executor.launch(batch)
        now_s = executor.clock.now_s
        if not isinstance(executor, _StagedExecutor):
            result.busy_s += step.elapsed_s
        elif bubble_s := result.step_bubble_s[-1]:
            for sequence in batch.decodes:
                self._bubble_s[sequence] += bubble_s
            for chunk in batch.prefills:
                self._bubble_s[chunk.sequence] += bubble_s
        finished = stream.scheduler.update(batch, step)
        result.stats.count(batch, step, stream.scheduler)
        for sequence in finished:
            result.completed_s.append(now_s)
            result.bubble_s.append(self._bubble_s.pop(sequence, 0.0))
            self._on_ended(sequence)
        for observer in self._observers:
            observer.record(now_s, batch, step, stream.scheduler, finished)

    def _sum_up(self, schedulers: list[Scheduler]) -> None:
        stats, total = self.result.stats, self.result.counters
        stats.now_s = self.result.makespan_s  # streams run side by side
        stats.peak_device_blocks = sum(scheduler.queues.pool.peak_held for scheduler in schedulers)
        stats.peak_host_blocks = sum(s.queues.host_pool.peak_held for s in schedulers if s.queues.host_pool is not None)
        for scheduler in schedulers:
            total.add(scheduler.queues.counters)
