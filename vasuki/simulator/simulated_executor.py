"""Virtual time: an executor that asks the cost model how long a batch takes, instead of computing it.

Scheduler, ordering and loop are the same as in real runs; only what stands behind `engine.loop.Executor` differs. The
recorded output lengths are known here and nowhere else: a sequence stops when it has as many tokens as its record says.

Runs of steps in which nothing is decided are taken as one (`fast_forward`), up to the first sequence that ends or the
next row that arrives. Each of them is still priced by itself, with its own contexts.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Vector

from vasuki.engine.batch import Batch, StepResult
from vasuki.engine.sequence import Sequence, Status
from vasuki.engine.settings import EngineSettings
from vasuki.engine.shaping import Shaped, shaping_of
from vasuki.machines.cost_model import CostModel, StepTime
from vasuki.simulator.fast_forward import FastForward


class VirtualClock:
    """Seconds since the job began, and when the next row comes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.next_arrival_s = math.inf


class SimulatedExecutor:
    """Prices batches.

    Args:
        cost_model: says how long a step takes.
        output_tokens: recorded length of each row, by `Request.row`.
        settings: what the scheduler was built from.
        fast_forward: of the scheduler; None for single steps, so that observers see each of them.
    """

    steps_ahead = 0

    def __init__(
        self,
        cost_model: CostModel,
        output_tokens: Vector[int],
        settings: EngineSettings,
        fast_forward: FastForward | None = None,
    ) -> None:
        self.cost_model = cost_model
        self.clock = VirtualClock()  # moved on by every batch
        self._output_tokens = output_tokens
        # Where tokens are computed again in each step, no step is the one before with a token more.
        alike = cost_model.shape.backend != "uncached" and settings.offload.depth is None  # which is decided anew
        self._fast_forward = fast_forward if alike else None
        self._shaping = shaping_of(settings.policy)
        self._block_tokens = settings.block_tokens
        self._offload = settings.offload
        shape = cost_model.shape
        self._window = shape.sliding_window if shape.num_windowed_layers else 0
        self._stream_copy_bytes = settings.block_tokens * shape.kv_bytes_per_token_per_layer
        self._last_end_s = 0.0
        self._decode_steps = 0  # steps with decodes so far
        self._ends: list[tuple[int, int, Sequence]] = []  # heap: decode step in which a sequence ends
        self._num_entries = 0  # breaks ties

    def launch(self, batch: Batch) -> StepResult:
        """Let the batch's time pass, up to the first sequence that ends. Waiting for an arrival counts to the step."""
        clock = self.clock
        fast_forward = self._fast_forward
        most_steps = fast_forward.most_steps(batch, self._steps_to_next_end(batch)) if fast_forward else 1
        steps, now_s, exposed_s, hidden_s = 0, clock.now_s, 0.0, 0.0
        for step_s, step_exposed_s, step_hidden_s in self.step_times(batch, most_steps):
            now_s += step_s
            exposed_s += step_exposed_s
            hidden_s += step_hidden_s
            steps += 1
            if now_s >= clock.next_arrival_s:
                break
        clock.now_s = now_s
        stopped = self._stopped_decodes(batch, steps)
        for sequence, _, _, samples in batch.prefills:
            if samples:
                stopped.append(self._expect_end(sequence, sampled=1) == 0)
        for swap in batch.swaps:
            if not swap.to_host:
                self._expect_end(swap.sequence)
        elapsed_s = clock.now_s - self._last_end_s
        self._last_end_s = clock.now_s
        moved = self._copied_bytes(batch, steps)
        if fast_forward and steps > 1:
            fast_forward.skip(batch, steps - 1)
        return StepResult([0] * len(stopped), stopped, elapsed_s, (), exposed_s, hidden_s, moved, steps)

    # A decoding row joins nearly every step with decodes, so a heap of such steps finds the next row to end.
    # One that stalled ends later than noted, and one that was preempted leaves an entry behind: at worst either cuts a
    # run of steps short.

    def _expect_end(self, sequence: Sequence, sampled: int = 0) -> int:
        """Note when a sequence that decodes will end, if it does not stall. Returns the tokens that it lacks."""
        left = self._output_tokens[sequence.request.row] - sequence.num_output_tokens - sampled
        if left > 0:
            self._num_entries += 1
            heapq.heappush(self._ends, (self._decode_steps + left, self._num_entries, sequence))
        return left

    def _steps_to_next_end(self, batch: Batch) -> int:
        return self._ends[0][0] - self._decode_steps if batch.decodes and self._ends else sys.maxsize

    def _stopped_decodes(self, batch: Batch, steps: int) -> list[bool]:
        """Say of each decode whether it has ended after `steps` steps."""
        stopped = [False] * len(batch.decodes)
        if batch.decodes:
            self._decode_steps += steps
        while self._ends and self._ends[0][0] <= self._decode_steps:
            _, _, sequence = heapq.heappop(self._ends)
            if sequence in batch.decodes:
                if self._expect_end(sequence, sampled=steps) == 0:
                    stopped[batch.decodes.index(sequence)] = True
            elif sequence.status is Status.RUNNING:
                self._expect_end(sequence)
        return stopped

    def step_times(self, batch: Batch, most_steps: int) -> Iterator[StepTime]:
        """What the batch's steps take, one after the other, `most_steps` of them or fewer."""
        cost = self.cost_model
        copies = cost.swap_copies(batch, self._block_tokens) if batch.swaps or batch.depth else ()
        shaped = list(self._shaping(batch)) if self._shaping else None
        work = cost.batch_work(batch, copies, shaped)
        rooms = self._window_rooms(batch, shaped) if self._window else ()
        moved = self._offload.streamed_in(batch), self._stream_copy_bytes
        return cost.repeated(work, most_steps, *moved, rooms, may_be_recorded=self._offload.depth is None)

    def _window_rooms(self, batch: Batch, shaped: list[Shaped] | None) -> list[int]:
        """Tokens that each decode lacks whose context is shorter than the window."""
        last = self._window - 1
        if shaped and batch.decodes and not batch.prefills:  # as wide as the widest, all of them
            [(rows, columns)] = shaped
            start = max(columns - 1, *batch.starts)
            return [last - start] * len(rows) if start < last else []
        rooms = [last - start for start in batch.starts if start < last]
        return rooms + [last - start for _, start, count, _ in batch.prefills if count == 1 and start < last]

    def _copied_bytes(self, batch: Batch, steps: int) -> int:
        """Blocks of swaps over all layers, and in every step the streamed layers' context and new tokens."""
        streamed_layers = self._offload.streamed_in(batch)
        if not streamed_layers and not batch.swaps and not batch.depth:
            return 0
        shape, tokens = self.cost_model.shape, 0
        if streamed_layers:
            new = batch.num_tokens
            context = (
                sum(batch.starts) + len(batch.decodes) + sum([start + count for _, start, count, _ in batch.prefills])
            )
            tokens = steps * (context + new) + new * steps * (steps - 1) // 2
        swapped = self._block_tokens * sum([len(swap.device) for swap in batch.swaps])
        moved = 0
        if batch.depth is not None:
            layers = len(batch.depth.leaving) + len(batch.depth.returning)
            moved = self._block_tokens * len(batch.depth.held) * layers
        return shape.kv_bytes_per_token_per_layer * (streamed_layers * tokens + shape.num_layers * swapped + moved)
