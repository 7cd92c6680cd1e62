"""Engine steps as lines of the trace, for real and simulated runs alike."""

from __future__ import annotations

from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.scheduler import Scheduler
from vasuki.engine.sequence import Sequence
from vasuki.engine.settings import EngineSettings
from vasuki.io.output.trace import StepRecord, TraceWriter
from vasuki.machines.cost_model import CostModel
from vasuki.planner import RunningPrediction
from vasuki.planner.offload.algorithms import LayerTraffic, StreamPlan, choose_stream


class StepTracer:
    """An engine observer that writes each step to a trace.

    Args:
        trace: where to.
        settings: those of the run.
        cost_model: of the plan; where layers stream, it says what each way of streaming could hide in a step.
        prediction: what was predicted of a step; it has to see the step first. None in a simulation, which is one.
    """

    def __init__(
        self,
        trace: TraceWriter,
        settings: EngineSettings,
        cost_model: CostModel,
        prediction: RunningPrediction | None = None,
    ) -> None:
        self._trace = trace
        self._settings = settings
        self._cost_model = cost_model
        self._prediction = prediction
        self._preempted = 0
        self._finished = 0

    def record(
        self, now_s: float, batch: Batch, result: StepResult, scheduler: Scheduler, finished: list[Sequence]
    ) -> None:
        """Note a step."""
        counters = scheduler.queues.counters
        held = scheduler.queues.pool.num_held
        parked = scheduler.queues.host_pool.num_held if scheduler.queues.host_pool else 0
        streamed = self._settings.offload.streamed_layers
        ways = self._ways_to_stream(batch) if streamed and batch.chunks else None
        preempted = counters.preemptions_recompute + counters.preemptions_swap
        self._trace.record(
            StepRecord(
                t_s=now_s,
                elapsed_s=result.elapsed_s,
                prefill_tokens=batch.num_prefill_tokens,
                decode_tokens=batch.num_decode_tokens,
                seqs=batch.num_seqs,
                waiting=len(scheduler.queues.waiting) + len(scheduler.queues.parked),
                kv_device_blocks=held,
                kv_host_blocks=parked + (held if streamed else 0),
                streamed_layers=streamed,
                stream_first_last=ways.first_last if ways else 0,
                stream_ring=ways.ring if ways else 0,
                stream_spread=ways.spread if ways else 0,
                swapped_blocks=sum(len(swap.device) for swap in batch.swaps),
                copied_bytes=result.copied_bytes,
                preempted=preempted - self._preempted,
                exposed_copy_s=result.exposed_copy_s,
                hidden_copy_s=result.hidden_copy_s,
                predicted_s=self._prediction.step_s if self._prediction else 0.0,
                finished=counters.finished - self._finished,
            )
        )
        self._preempted = preempted
        self._finished = counters.finished

    def _ways_to_stream(self, batch: Batch) -> StreamPlan:
        """What Algorithms 1 and 2 and the spread layers say of this very step. The layers were chosen for the job."""
        cost = self._cost_model
        work = cost.batch_work(batch)
        context_tokens = work.decode_context_tokens + work.chunk_context_tokens
        copy_bytes = self._settings.block_tokens * cost.shape.kv_bytes_per_token_per_layer
        sequences = work.num_decodes + work.num_chunks
        layer = cost.stream_copies(1, context_tokens, work.num_tokens, copy_bytes, sequences)
        traffic = LayerTraffic(layer.to_device_bytes, layer.to_host_bytes, layer.copy_bytes)
        return choose_stream(cost.shape.num_layers, cost.layer_time_s(work), traffic, cost.profile.link)
