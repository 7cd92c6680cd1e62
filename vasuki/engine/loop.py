"""THE loop: schedule, launch, settle. Real and simulated runs share it.

    requests --> scheduler.add --> schedule --> executor.launch --> advance --> wait --> settle --> sink.write
                                      ^                                                     |
                                      +-----------------------------------------------------+

Where launching returns before the device is done, one step more is launched before its tokens are waited for, so that
the device never waits for the host:

    host     launch 1 | launch 2 | settle 1, launch 3 | settle 2, launch 4 |
    device            |--- step 1 ---|--- step 2 ---|--- step 3 ---|--- step 4 ---|

Everything that differs between a GPU, a CPU and a simulation is behind `Executor`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from vasuki.base.errors import Interrupted, SchedulerStalled
from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Request, Sequence

MOST_IN_VAIN = 4  # times the tokens that memory holds: without recomputing it is once at most


class Step(Protocol):
    """A batch that was launched, and may still be under way."""

    def wait(self) -> StepResult: ...


class Executor(Protocol):
    """Computes batches: with kernels, or with a cost model in their place."""

    @property
    def steps_ahead(self) -> int:
        """Steps that are best under way while another one is prepared: 0 or 1. Behind a step whose tokens have to be
        known before the next, it is 0."""
        ...

    def launch(self, batch: Batch) -> Step:
        """Compute every chunk of the batch and sample where a chunk asks for it, behind what was launched before."""
        ...


class Sink(Protocol):
    """Takes finished rows and makes them durable."""

    def write(self, sequence: Sequence) -> None: ...

    def commit_if_due(self, now_s: float) -> None: ...


class Observer(Protocol):
    """Sees every step after it happened, and the rows that ended in it: the trace, the progress bar, the plan's running
    correction, the order that learns how long outputs become. None may count on another having seen the step before."""

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None: ...


@dataclass(slots=True)
class RunStats:
    """What the loop itself can say about a run."""

    now_s: float = 0.0  # virtual or real seconds spent in steps
    steps: int = 0
    batches: int = 0  # a simulation takes several steps of one
    sequence_steps: int = 0  # sum over steps of sequences in the batch
    max_seqs: int = 0
    peak_device_blocks: int = 0
    peak_host_blocks: int = 0
    swapped_blocks: int = 0
    copied_bytes: int = 0  # KV, in either direction
    exposed_copy_s: float = 0.0
    hidden_copy_s: float = 0.0
    streamed_layer_steps: int = 0  # sum over steps of layers on the host, where that is decided batch by batch

    @property
    def mean_seqs(self) -> float:
        return self.sequence_steps / self.steps if self.steps else 0.0

    def count(self, batch: Batch, result: StepResult, scheduler: Scheduler) -> None:
        """Add the steps of one batch."""
        num_steps, num_seqs = result.num_steps, batch.num_seqs
        self.now_s += result.elapsed_s
        self.steps += num_steps
        self.batches += 1
        self.sequence_steps += num_steps * num_seqs
        self.max_seqs = max(self.max_seqs, num_seqs)
        queues = scheduler.queues
        self.peak_device_blocks = queues.pool.peak_held
        if queues.host_pool is not None:
            self.peak_host_blocks = queues.host_pool.peak_held
        if batch.depth is not None:
            self.streamed_layer_steps += num_steps * len(batch.depth.depth.streamed)
        for swap in batch.swaps:
            self.swapped_blocks += len(swap.device)
        self.copied_bytes += result.copied_bytes
        self.exposed_copy_s += result.exposed_copy_s
        self.hidden_copy_s += result.hidden_copy_s


def drain(
    requests: Iterable[Request],
    scheduler: Scheduler,
    executor: Executor,
    sink: Sink,
    observers: Iterable[Observer] = (),
    should_stop: Callable[[], bool] = lambda: False,
    stats: RunStats | None = None,
) -> RunStats:
    """Run every request to its end.

    Args:
        requests: in the order in which they should start.
        stats: counted into, so that they survive an exception.

    Raises:
        Interrupted: `should_stop` said so between two steps, or after a row that can never run. Finished rows are with
            the sink.
        SchedulerStalled: work is left but no batch can be formed, or batches come to nothing.
    """
    source = iter(requests)
    observers = list(observers)
    stats = RunStats() if stats is None else stats
    under_way: deque[tuple[Batch, Step]] = deque()
    in_vain = 0  # tokens computed since the last step that sampled

    def commit_or_stop() -> None:
        sink.commit_if_due(stats.now_s)
        if should_stop():
            raise Interrupted("stopped by a signal")

    while True:
        while scheduler.wants_more() and (request := next(source, None)) is not None:
            if ended := scheduler.add(request):
                sink.write(ended)
                commit_or_stop()  # millions of such rows may follow one another, without a step
        batch = scheduler.schedule() if len(under_way) <= executor.steps_ahead else None
        if batch is not None:
            step = executor.launch(batch)
            scheduler.advance(batch)
            under_way.append((batch, step))
            if len(under_way) <= executor.steps_ahead:
                continue
        elif not under_way:
            if scheduler.queues.is_empty():
                return stats
            raise SchedulerStalled(f"work is left and none can run; {scheduler.snapshot()}")
        batch, step = under_way.popleft()
        result = step.wait()
        finished = scheduler.settle(batch, result)
        stats.count(batch, result, scheduler)
        in_vain = 0 if batch.num_samples else in_vain + max(1, batch.num_tokens)
        if in_vain > 1000 + MOST_IN_VAIN * scheduler.queues.pool.num_blocks * scheduler.queues.pool.block_tokens:
            raise SchedulerStalled(f"{in_vain} tokens were computed without one of output; {scheduler.snapshot()}")
        for sequence in finished:
            sink.write(sequence)
        for observer in observers:
            observer.record(stats.now_s, batch, result, scheduler, finished)
        commit_or_stop()
