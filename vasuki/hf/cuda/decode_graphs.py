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

from vasuki.hf.attention.inputs import Gathered, PagedTiles, StepInputs, TileKernel
from vasuki.hf.attention.probe import observe
from vasuki.hf.kernels import varlen
from vasuki.hf.kernels.varlen import PagedVarlen, Varlen, can_page
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.loading.load_model import LoadedModel
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
        max_context: most tokens of a sequence.
        record: how a computation is recorded; `record_on_device` on CUDA.
        record_after: steps of a size before it is recorded.
        varlen: torch's attention kernel, unless another is given.
        kernel: ours, for layers that torch has none for.
    """

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        max_context: int,
        record: Record,
        record_after: int = RECORD_AFTER,
        varlen: Varlen | None = None,
        kernel: TileKernel | None = None,
    ) -> None:
        self._forward, self._record, self._record_after = forward, record, record_after
        self._cache, self._varlen, self._kernel = cache, varlen, kernel
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
            recorded = _Recorded(
                size, self._width, self._cache, self._forward, self._record, self._varlen, self._kernel
            )
            answer = recorded(step).clone()
            expected = recorded.launched(step)
            worst = float((answer - expected).abs().max() / expected.float().std())
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


class _Recorded:
    """Steps of up to `size` rows, each with a table of up to `width` blocks."""

    def __init__(
        self,
        size: int,
        width: int,
        cache: KVCache,
        forward: Forward,
        record: Record,
        varlen: Varlen | None,
        kernel: TileKernel | None = None,
    ) -> None:
        device, block_tokens = cache.layers[0].device, cache.block_tokens
        self._padding_block = cache.num_blocks - 1
        first = torch.full((1,), self._padding_block * block_tokens, device=device)
        self._padding_rows = cache.rows_of_slots(first)  # where the key and value of its first token go
        rows, ones = np.arange(size), np.ones(size, np.int64)
        tables = np.full((size, width), self._padding_block)
        # Sizes that the kernel is told, not what it reads: the longest contexts that can come.
        self._varlen = None
        if can_page(block_tokens) or varlen is not None:
            self._varlen = PagedVarlen(ones, ones * width * block_tokens, tables, block_tokens, device, True, varlen)
            self._varlen.see_one_token()  # recording computes too, and need not read the longest contexts
        self._tiles = None
        if kernel is not None:
            self._tiles = PagedTiles(kernel, rows, ones, 0 * ones, ones > 0, tables, device)
        self._step = StepInputs(
            input_ids=torch.zeros(1, size, dtype=torch.int64, device=device),
            position_ids=torch.zeros(1, size, dtype=torch.int64, device=device),
            rows=self._padding_rows.repeat(1, size),
            sample_positions=torch.arange(size, device=device),
            cache=cache,
            offload=None,
            varlen=self._varlen,
            tiles=self._tiles,
            gathered=Gathered(rows, ones, 0 * ones, tables, block_tokens, device),
        )
        self._forward = forward
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
        if self._varlen is not None:
            assert step.varlen is not None
            self._varlen.load_contexts(step.varlen, self._padding_block)
        if self._tiles is not None:
            assert step.tiles is not None
            self._tiles.load_contexts(step.tiles, self._padding_block)


def can_record(loaded: LoadedModel, block_tokens: int) -> bool:
    """Whether a model's steps of single tokens can be recorded: not where the size of some tensor depends on contexts,
    nor where copies wait between layers, nor where layers carry a state. Parked sequences are waited for beforehand."""
    if loaded.recurrent or not loaded.compiles or loaded.copies is not None:
        return False
    return (loaded.device.type == "cuda" and loaded.kernel is not None) or attends_by_varlen(loaded, block_tokens)


def attends_by_varlen(loaded: LoadedModel, block_tokens: int) -> bool:
    """Whether torch's packed kernel serves all layers of a model, from the blocks as they lie."""
    layout = loaded.kv_layout
    if any(varlen.why_unavailable(layout.dtype, loaded.device, head_dim) for head_dim in layout.head_dims):
        return False
    if not can_page(block_tokens) or layout.dtype is not loaded.dtype:
        return False
    return all(seen.variant.is_plain for seen in observe(loaded.model).values())


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
