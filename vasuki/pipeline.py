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
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Vector
from dataclasses import dataclass, field

from vasuki.batch import Batch, StepResult
from vasuki.cost_model import CostModel, StepWork
from vasuki.errors import SchedulerStalled
from vasuki.plan import EngineSettings
from vasuki.scheduler import Scheduler
from vasuki.sequence import Request


@dataclass(slots=True)
class PipelineResult:
    """How a job went. Requests are listed in the order in which their last steps began."""

    completed_s: list[float] = field(default_factory=list)  # `[requests]` when each ended
    bubble_s: list[float] = field(default_factory=list)  # `[requests]` bubbles of every step that each took part in
    rejected: int = 0  # requests that could never run
    steps: int = 0  # micro-batches that went through all stages
    sequence_steps: int = 0  # sum over steps of the sequences in them
    busy_s: float = 0.0  # of all stages of all replicas
    idle_s: float = 0.0  # of the same, from the start up to the last micro-batch of each stage
    preemptions: int = 0

    @property
    def makespan_s(self) -> float:
        return max(self.completed_s, default=0.0)

    @property
    def mean_seqs(self) -> float:
        return self.sequence_steps / self.steps if self.steps else 0.0

    @property
    def bubble_share(self) -> float:
        """Share of the stages' time that is bubbles."""
        return self.idle_s / (self.busy_s + self.idle_s) if self.steps else 0.0


def simulate_pipelines(
    requests: Iterable[Request], output_tokens: Vector[int], settings: EngineSettings, cost_model: CostModel
) -> PipelineResult:
    """Run requests to their recorded ends on `data_parallel` replicas of `pipeline_parallel` stages.

    Args:
        requests: in the order in which they should start.
        output_tokens: recorded length of each row, by `Request.row`.
        settings: of one micro-batch: its scheduler's policy and limits, and its share of a replica's KV memory, a
            `pipeline_parallel`-th of it.
        cost_model: model, device and layout; the send to the next stage counts to a stage's time.

    Raises:
        SchedulerStalled: work is left but no batch can be formed.
        ValueError: the policy pads, or layers are streamed; neither is priced here.
    """
    if settings.policy.padded or settings.streamed_layers:
        raise ValueError("padded policies and streamed layers are not simulated in pipelines")
    return _Simulation(requests, output_tokens, settings, cost_model).run()


@dataclass(slots=True)
class _Stream:
    """The micro-batch that goes round and round, and the replica that it is on."""

    scheduler: Scheduler
    free_s: list[float]  # `[stages]` when each stage of the replica has served all that came; shared with its streams


class _Simulation:
    """One call of `simulate_pipelines`."""

    def __init__(
        self, requests: Iterable[Request], output_tokens: Vector[int], settings: EngineSettings, cost_model: CostModel
    ) -> None:
        self._requests = iter(requests)
        self._output_tokens = output_tokens
        self._settings = settings
        self._cost = cost_model
        layout = cost_model.layout
        self._alike = _alike_stages(cost_model.shape.num_layers, layout.pipeline_parallel)
        replicas = [[0.0] * layout.pipeline_parallel for _ in range(layout.data_parallel)]
        # Replicas take turns, so that none has a head start on the queue.
        self._streams = [
            _Stream(settings.build(), free_s) for _ in range(layout.pipeline_parallel) for free_s in replicas
        ]
        self._bubble_s: dict[int, float] = {}  # of running requests, by row
        self._result = PipelineResult()

    def run(self) -> PipelineResult:
        """What is ready first enters stage 0 first, and passing makes nothing ready in the past: one heap will do."""
        ready = [(0.0, index) for index in range(len(self._streams))]
        while ready:
            now_s, index = heapq.heappop(ready)
            stream = self._streams[index]
            self._fill(stream.scheduler)
            batch = stream.scheduler.schedule()
            if batch is not None:
                heapq.heappush(ready, (self._pass(stream, batch, now_s), index))
            elif not stream.scheduler.is_empty():
                raise SchedulerStalled(f"{len(list(stream.scheduler.live()))} sequences are left and none can run")
        for stream in self._streams:
            counters = stream.scheduler.counters
            self._result.preemptions += counters.preemptions_recompute + counters.preemptions_swap
        return self._result

    def _fill(self, scheduler: Scheduler) -> None:
        """Take requests that there are slots for: any other is better off with the next stream that has one."""
        while scheduler.wants_more() and scheduler.num_running + len(scheduler.waiting) < scheduler.limits.max_num_seqs:
            request = next(self._requests, None)
            if request is None:
                return
            if scheduler.add(request) is not None:
                self._result.rejected += 1

    def _pass(self, stream: _Stream, batch: Batch, now_s: float) -> float:
        """Send a micro-batch through the stages. Returns when it leaves the last one."""
        free_s, result = stream.free_s, self._result
        copies = self._cost.swap_copies(batch, self._settings.block_tokens) if batch.swaps else ()
        bubble_s, entered_s = 0.0, now_s
        for stage, stage_s in enumerate(self._stage_times(self._cost.batch_work(batch, copies))):
            start_s = max(now_s, free_s[stage])
            bubble_s += start_s - free_s[stage]
            result.busy_s += stage_s
            now_s = free_s[stage] = start_s + stage_s
        result.idle_s += bubble_s
        result.steps += 1
        result.sequence_steps += batch.num_seqs
        for row in _rows(batch):
            self._bubble_s[row] = self._bubble_s.get(row, 0.0) + bubble_s
        for sequence in stream.scheduler.update(batch, self._sampled(batch, now_s - entered_s)):
            result.completed_s.append(now_s)
            result.bubble_s.append(self._bubble_s.pop(sequence.request.row))
        return now_s

    def _stage_times(self, work: StepWork) -> Iterator[float]:
        """Seconds on each stage, each kind of stage asked for once."""
        times = {stage: self._cost.stage(work, stage).total_s for stage in set(self._alike)}
        return (times[stage] for stage in self._alike)

    def _sampled(self, batch: Batch, elapsed_s: float) -> StepResult:
        sampling = batch.decodes + [chunk.sequence for chunk in batch.prefills if chunk.samples]
        lengths = self._output_tokens
        stopped = [lengths[sequence.request.row] <= len(sequence.output_token_ids) + 1 for sequence in sampling]
        return StepResult([0] * len(stopped), stopped, elapsed_s)


def _alike_stages(num_layers: int, stages: int) -> list[int]:
    """`[stages]` for each stage the first that costs the same: as many layers, and as much beside them."""
    larger = num_layers % stages  # so many stages have one layer more
    kinds = [(stage == 0, stage < larger, stage == stages - 1) for stage in range(stages)]
    return [kinds.index(kind) for kind in kinds]


def _rows(batch: Batch) -> Iterator[int]:
    for sequence in batch.decodes:
        yield sequence.request.row
    for chunk in batch.prefills:
        yield chunk.sequence.request.row
