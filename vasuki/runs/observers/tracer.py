"""Engine steps as lines of the trace, of real and simulated runs."""

from __future__ import annotations

from collections.abc import Callable

from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.engine.settings import EngineSettings
from vasuki.io.output.trace import StepRecord
from vasuki.machines.memory_budget import footprint
from vasuki.planner import TimeLeft


class StepTracer:
    """An engine observer that tells a trace of each step.

    Args:
        note: takes each step, such as `TraceWriter.record`.
        settings: of the run.
        token_bytes: KV of a token, all layers.
        num_layers: that keep it.
        prediction: what was predicted of a step. None in a simulation, which is one.
    """

    def __init__(
        self,
        note: Callable[[StepRecord], None],
        settings: EngineSettings,
        token_bytes: int,
        num_layers: int,
        prediction: TimeLeft | None = None,
    ) -> None:
        self._note = note
        self._settings = settings
        self._block_bytes = token_bytes * settings.block_tokens
        self._num_layers = num_layers
        self._prediction = prediction
        self._preempted = 0
        self._finished = 0

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Note a step."""
        counters = scheduler.queues.counters
        parked = scheduler.queues.host_pool.num_held if scheduler.queues.host_pool else 0
        device_bytes, host_bytes = footprint(
            self._settings, self._block_bytes, self._num_layers, scheduler.queues.pool.num_held, parked
        )
        preempted = counters.preemptions_recompute + counters.preemptions_swap
        self._note(
            StepRecord(
                t_s=now_s,
                elapsed_s=result.elapsed_s,
                prefill_tokens=batch.num_prefill_tokens,
                decode_tokens=batch.num_decode_tokens,
                seqs=batch.num_seqs,
                waiting=scheduler.queues.num_waiting,
                gathers=scheduler.queues.gathers,
                kv_device_bytes=device_bytes,
                kv_host_bytes=host_bytes,
                streamed_layers=self._settings.offload.streamed_in(batch),
                swapped_blocks=sum(len(swap.device) for swap in batch.swaps),
                copied_bytes=result.copied_bytes,
                preempted=preempted - self._preempted,
                exposed_copy_s=result.exposed_copy_s,
                hidden_copy_s=result.hidden_copy_s,
                predicted_s=self._prediction.step_s(batch, result, scheduler) if self._prediction else 0.0,
                finished=counters.finished - self._finished,
                sampled_tokens=len(result.token_ids),
            )
        )
        self._preempted = preempted
        self._finished = counters.finished
