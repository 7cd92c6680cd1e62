"""Engine steps as lines of the trace, for real and simulated runs alike."""

from __future__ import annotations

from vasuki.batch import Batch, StepResult
from vasuki.io.trace import StepRecord, TraceWriter
from vasuki.plan import EngineSettings
from vasuki.refine import RunningPrediction
from vasuki.scheduler import Scheduler


class StepTracer:
    """An engine observer that writes each step to a trace.

    Args:
        trace: where to.
        settings: those of the run.
        prediction: what was predicted of a step; it has to see the step first. None in a simulation, which is one.
    """

    def __init__(
        self, trace: TraceWriter, settings: EngineSettings, prediction: RunningPrediction | None = None
    ) -> None:
        self._trace = trace
        self._streams = settings.streamed_layers > 0
        self._prediction = prediction
        self._preempted = 0

    def record(self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler) -> None:
        """Note a step."""
        counters = scheduler.counters
        held = scheduler.pool.num_held
        parked = scheduler.host_pool.num_held if scheduler.host_pool else 0
        preempted = counters.preemptions_recompute + counters.preemptions_swap
        self._trace.record(
            StepRecord(
                t_s=now_s,
                elapsed_s=result.elapsed_s,
                prefill_tokens=batch.num_prefill_tokens,
                decode_tokens=batch.num_decode_tokens,
                seqs=batch.num_seqs,
                waiting=len(scheduler.waiting) + len(scheduler.parked),
                kv_device_blocks=held,
                kv_host_blocks=parked + (held if self._streams else 0),
                swapped_blocks=sum(len(swap.device) for swap in batch.swaps),
                copied_bytes=result.copied_bytes,
                preempted=preempted - self._preempted,
                exposed_copy_s=result.exposed_copy_s,
                hidden_copy_s=result.hidden_copy_s,
                predicted_s=self._prediction.step_s if self._prediction else 0.0,
                finished=sum(chunk.sequence.is_finished for chunk in batch.chunks),
            )
        )
        self._preempted = preempted
