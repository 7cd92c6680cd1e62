"""Steps of single tokens on a GPU, recorded once for each of a few sizes, and replayed.

A step of decodes is some thousand kernels, and launching them one by one takes the host longer than few rows take the
device. A CUDA graph launches all of them at once. It reads and writes where it did when it was recorded, so what a step
brings is copied into buffers that stay, and its rows are padded to the next size:

    a step of 5 rows         a7 | b12 | c3 | d9 | e1
    in a graph of 8          a7 | b12 | c3 | d9 | e1 | - | - | -

A row of padding is a token at position 0 that sees itself alone, in a block that belongs to nobody.

A size is recorded once it has come up a few times, and used if it then answers what the same padded rows are answered
without a graph.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from vasuki.hf.attention.chunks import AttentionKernels, Chunks
from vasuki.hf.attention.inputs import StepInputs
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.machines.cost_model import MOST_RECORDED_ROWS

log = logging.getLogger(__name__)

Forward = Callable[[StepInputs], torch.Tensor]
Replay = Callable[[], torch.Tensor]
Record = Callable[[Replay], Replay]  # something that computes -> what computes it again, from and to the same memory

SIZES = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    MOST_RECORDED_ROWS,
)  # rows; padding is at most half of them
RECORD_AFTER = 8  # steps of a size: recording takes longer than a step, and does not pay for one that comes up rarely
_CLOSE = 0.01  # standard deviations of the logits: the same kernels on the same rows, but for sums in another order


class DecodeGraphs:
    """Recorded steps of one model and one cache.

    Args:
        forward: a step's logits `[num_samples, vocab_size]`.
        cache: its last block is for padding.
        kernels: those that attend.
        max_context: most tokens of a sequence.
        record: how a computation is recorded; `record_on_device` on CUDA.
        record_after: steps of a size before it is recorded.
    """

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        kernels: AttentionKernels,
        max_context: int,
        record: Record,
        record_after: int = RECORD_AFTER,
    ) -> None:
        self._forward, self._record, self._record_after = forward, record, record_after
        self._cache, self._kernels = cache, kernels
        self._width = min(-(-max_context // cache.block_tokens), cache.num_blocks)
        self._seen: Counter[int] = Counter()
        self._recorded: dict[int, _Recorded] = {}
        self._most_rows = SIZES[-1]  # that can be recorded
        self.replayed_steps = 0

    def __call__(self, step: StepInputs) -> torch.Tensor:
        """The logits of a step of single tokens that all sample."""
        count = len(step.sample_positions)
        if count > self._most_rows:
            return self._forward(step)
        size = SIZES[bisect_left(SIZES, count)]
        if recorded := self._recorded.get(size):
            self.replayed_steps += 1
            if step.offload is not None:
                step.offload.before_all_layers()
            return recorded(step)
        logits = self._forward(step)
        self._seen[size] += 1
        if self._seen[size] == self._record_after:
            self._try(size, step)
        return logits

    def _try(self, size: int, step: StepInputs) -> None:
        """Record a size, and use it if it answers a step as the same rows are answered without a graph."""
        try:
            recorded = _Recorded(size, self._width, self._cache, self._kernels, self._forward, self._record)
            answer = recorded(step).clone()
            expected = recorded.launched(step)
            worst = _apart(answer, expected)
        except RuntimeError as error:  # such as a layer that looks at what the device has computed
            reason = str(error).strip().splitlines() or [type(error).__name__]
            log.warning(
                "larger steps are launched kernel by kernel: a step of %d rows cannot be recorded: %s", size, reason[0]
            )
            self._most_rows = min(self._most_rows, max((each for each in SIZES if each < size), default=0))
            return
        if not worst <= _CLOSE:  # nor is what is no number
            log.warning(
                "steps of up to %d rows are launched kernel by kernel: a recorded one answers something else, by %.2g "
                "standard deviations",
                size,
                worst,
            )
            return
        self._recorded[size] = recorded


def _apart(answer: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of logits, in standard deviations."""
    return float((answer - expected).abs().max() / expected.float().std())


class _Recorded:
    """Steps of up to `size` rows, each with a table of up to `width` blocks."""

    def __init__(
        self, size: int, width: int, cache: KVCache, kernels: AttentionKernels, forward: Forward, record: Record
    ) -> None:
        device, block_tokens = cache.device, cache.block_tokens
        self._padding_block = cache.num_blocks - 1
        first = torch.full((1,), self._padding_block * block_tokens, device=device)
        self._padding_rows = cache.rows_of_slots(first)  # where the key and value of its first token go
        rows, ones = np.arange(size), np.ones(size, np.int64)
        tables = np.full((size, width), self._padding_block)
        # Recording computes too: each row sees a token, though kernels are told of the longest contexts that can come.
        chunks = Chunks(rows, ones, 0 * ones, ones > 0, tables, cache, kernels, width * block_tokens)
        self._step = StepInputs(
            input_ids=torch.zeros(1, size, dtype=torch.int64, device=device),
            position_ids=torch.zeros(1, size, dtype=torch.int64, device=device),
            rows=self._padding_rows.repeat(1, size),
            sample_positions=torch.arange(size, device=device),
            cache=cache,
            offload=None,
            chunks=chunks,
        )
        self._forward = forward
        forward(self._step)  # which lays the chunks out for those kernels that attend
        self._replay = record(lambda: forward(self._step))

    def __call__(self, step: StepInputs) -> torch.Tensor:
        """Return `[num_rows, vocab_size]`, valid until the next call."""
        self._take_over(step)
        return self._replay()[: len(step.sample_positions)]

    def launched(self, step: StepInputs) -> torch.Tensor:
        """Return the same without the graph, from the same padded rows."""
        self._take_over(step)
        return self._forward(self._step)[: len(step.sample_positions)]

    def _take_over(self, step: StepInputs) -> None:
        count, own = len(step.sample_positions), self._step
        for mine, theirs in ((own.input_ids[0], step.input_ids[0]), (own.position_ids[0], step.position_ids[0])):
            mine[:count].copy_(theirs)
            mine[count:].zero_()
        own.rows[:, :count].copy_(step.rows)
        own.rows[:, count:].copy_(self._padding_rows)
        own.chunks.load_contexts(step.chunks, self._padding_block)


def record_on_device() -> Record:
    """Record by CUDA graphs that share a pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Replay) -> Replay:
        # What kernels set up when they are first called cannot be recorded.
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            compute()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # A capture that fails does not always give the stream back by itself.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            output = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    return record
