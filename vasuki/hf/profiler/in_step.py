"""Measures what operators take within whole steps, over what they take one by one.

In a model, an operator shares the caches with all others, and finds its input where another thread has left it. On a
CPU that makes a step a tenth or a quarter longer than the sum of its operators, each measured in a loop of its own. So
whole steps are run on a model with the shape's own layers, as many as the caches cannot hold.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from functools import partial

import numpy as np

from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.policy import find_policy
from vasuki.engine.sequence import Sequence
from vasuki.engine.settings import EngineSettings, Limits
from vasuki.hf.device.device import available_bytes
from vasuki.hf.profiler.operator_times import BLOCK_TOKENS, MEMORY_SHARE, Bench, cold_bytes
from vasuki.hf.profiler.rows import row_at
from vasuki.hf.profiler.step_overheads import cut, stand_in
from vasuki.hf.profiler.timing import HostClock, affordable
from vasuki.hf.ragged_executor import build_executor
from vasuki.machines.cost_model import CostModel
from vasuki.machines.measured_points import InStep
from vasuki.models.shape import ModelShape

_CONTEXT = 256  # of each decode
_LEAST_LAYERS = 4  # the last one computes less than the others, and not the same in every implementation
_RATIOS = (0.5, 3.0)  # what is plausible


class WholeSteps:
    """Whole steps of the effort's sizes on a CPU.

    A machine that is shared is now faster, now slower, for seconds or minutes. Operators are measured one after the
    other, but a run meets all of that, so whole steps are sampled from the first measurement to the last.

    Args:
        bench: the device, and the shape to imitate.
    """

    def __init__(self, bench: Bench) -> None:
        self.shape = cut(bench.shape, _num_layers(bench.shape, cold_bytes(bench.device)))
        self._batches: list[Batch] = []
        self._timings: list[list[float]] = []
        if self.shape.weight_bytes > MEMORY_SHARE * available_bytes(bench.device):
            return
        shape = self.shape
        loaded = stand_in(shape, shape.num_layers, bench.dtype, bench.device, bench.saved)
        context = min(_CONTEXT, shape.max_context_tokens)
        sizes = [(rows, min(chunk, shape.max_context_tokens)) for rows, chunk in bench.effort.steps]
        num_blocks = max(rows * _blocks(context) + _blocks(chunk) for rows, chunk in sizes)
        limits = Limits(max(rows + chunk for rows, chunk in sizes), max(rows + 1 for rows, _ in sizes))
        self._executor = build_executor(loaded, EngineSettings(find_policy("vasuki"), limits, num_blocks, BLOCK_TOKENS))
        batches = [_batch(rows, context, chunk, shape.vocab_size) for rows, chunk in sizes]
        effort = replace(bench.effort, max_call_s=bench.effort.max_step_s)
        count = len(affordable([partial(self._executor.execute, batch) for batch in batches], HostClock(), effort))
        self._batches = batches[:count]
        self._timings = [[] for _ in self._batches]

    def sample(self) -> None:
        """Run a step of each size, after one for what lay in the caches before."""
        if self._batches:
            self._executor.execute(self._batches[0])
        for batch, timings in zip(self._batches, self._timings, strict=True):
            started_s = time.perf_counter()
            self._executor.execute(batch)
            timings.append(time.perf_counter() - started_s)

    def in_step(self, cost_model: CostModel) -> InStep | None:
        """The samples over what a model without `InStep` says of `shape`; None if no such model fits into memory.

        A step is long enough to meet whatever usually disturbs this machine, so medians count.
        """
        ratios: dict[int, float] = {}
        for batch, timings in zip(self._batches, self._timings, strict=True):
            cost = cost_model.step(cost_model.batch_work(batch))
            seconds, (low, high) = statistics.median(timings), _RATIOS
            ratios[batch.num_tokens] = min(high, max(low, (seconds - (cost.total_s - cost.device_s)) / cost.device_s))
        if not ratios:
            return None
        return InStep(tokens=tuple(ratios), ratio=tuple(float(f"{ratio:.3g}") for ratio in ratios.values()))


def _num_layers(shape: ModelShape, cold: int) -> int:
    """Return how many layers to measure: more than any cache holds, a few at least, at most all."""
    return min(shape.num_layers, max(_LEAST_LAYERS, math.ceil(cold / shape.layer_weight_bytes)))


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _batch(rows: int, context: int, chunk: int, vocab_size: int) -> Batch:
    """`rows` decodes of one context, and one chunk that begins a prompt."""
    rng = np.random.default_rng(0)
    blocks = iter(range(rows * _blocks(context) + _blocks(chunk)))

    def sequence(row: int, tokens: int, computed: int) -> Sequence:
        token_ids = rng.integers(1, vocab_size, tokens)
        return row_at(row, token_ids, computed, [next(blocks) for _ in range(_blocks(tokens))])

    decodes = [sequence(row, context, context - 1) for row in range(rows)]
    prefills = [ScheduledChunk(sequence(rows, chunk, 0), 0, chunk, True)] if chunk else []
    return Batch(decodes=decodes, starts=[context - 1] * rows, prefills=prefills, swaps=[])
