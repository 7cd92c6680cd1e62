"""A batch through a model that knows no packed attention: logits of the tokens that it samples, in batch order.

`Padded` computes rectangles over blocks. `Alone` gives each row a cache of the model's own kind and computes one row
after another: for layers that carry a state from token to token, or that keep of tokens what no block holds.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import numpy as np
import torch

from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.rectangles import Rows
from vasuki.engine.sequence import Sequence, Status
from vasuki.engine.shaping import Shaping, Similar
from vasuki.hf.attention.inputs import tokens_of
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.kv.kv_mover import KVMover
from vasuki.hf.padded.block_cache import block_cache
from vasuki.hf.padded.calls import ModelCall
from vasuki.hf.padded.rectangles import Rectangle
from vasuki.models.shape import Backend


class Forward(Protocol):
    """Computes batches."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Compute every chunk. Returns `[num_samples, vocab_size]`."""
        ...


class Padded:
    """Rectangles over the blocks of a cache.

    Args:
        model: a causal LM of transformers.
        cache: its KV memory.
        offload: moves KV while layers compute.
        shaping: of its calls.
    """

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        offload: KVMover | None = None,
        shaping: Shaping | None = None,
    ) -> None:
        self._call, self._cache, self._offload = ModelCall(model), cache, offload
        self._shaping = shaping or Similar()

    def __call__(self, batch: Batch) -> torch.Tensor:
        logits: dict[int, torch.Tensor] = {}
        for rows, columns in self._shaping(batch):
            last = self._compute(batch, rows, columns)
            chunks = [*itertools.chain(*rows)]
            if len(chunks) > len(rows) and not torch.isfinite(last.amax(-1)).all():
                # One of them has spread what is no number over those that share its row, since 0 x NaN is NaN.
                last = self._compute(batch, [[i] for i in chunks])
            logits |= zip(chunks, last, strict=True)
        return _sampled(batch, logits)

    def _compute(self, batch: Batch, rows: Rows, columns: int = 0) -> torch.Tensor:
        """Logits `[chunks, vocab_size]` of a rectangle, row by row."""
        chunks = [[batch.chunks[i] for i in row] for row in rows]
        if self._offload is not None:
            self._offload.begin_call([*itertools.chain(*chunks)])
        rectangle = Rectangle.of(chunks, self._cache, columns)
        cache = block_cache(self._cache, rectangle, self._offload)
        last, _ = self._call(rectangle.input_ids, rectangle.position_ids, rectangle.mask, cache, rectangle.ends)
        return last


class Alone:
    """One row after another, each with a cache of its own.

    Most models can't go on with several tokens at once from such a state: a prompt that comes in chunks is computed
    with its last one. A row that was preempted is computed from its first token, and so is each of a model that keeps
    nothing.

    Args:
        model: a causal LM of transformers.
        backend: `alone`, or `uncached`.
    """

    def __init__(self, model: Any, backend: Backend) -> None:
        self._call = ModelCall(model, use_cache=backend != "uncached")
        self._device = model.device
        self._kept: dict[Sequence, tuple[int, Any]] = {}  # tokens of each running row, and its cache

    def __call__(self, batch: Batch) -> torch.Tensor:
        self._kept = {row: kept for row, kept in self._kept.items() if row.status is Status.RUNNING}
        return _sampled(batch, {i: self._compute(chunk) for i, chunk in enumerate(batch.chunks) if chunk.samples})

    def _compute(self, chunk: ScheduledChunk) -> torch.Tensor:
        """Logits `[vocab_size]` behind the chunk."""
        start, cache = self._kept.pop(chunk.sequence, (0, None))
        if start != chunk.start or chunk.num_tokens > 1:
            start, cache = 0, None
        tokens = np.asarray(tokens_of(chunk.sequence, start, chunk.end), np.int64)
        input_ids = torch.from_numpy(tokens).to(self._device).unsqueeze(0)
        positions = torch.arange(start, chunk.end, device=self._device).unsqueeze(0)
        logits, cache = self._call(input_ids, positions, None, cache)
        if cache is not None:
            self._kept[chunk.sequence] = chunk.end, cache
        return logits[0]


def _sampled(batch: Batch, logits: dict[int, torch.Tensor]) -> torch.Tensor:
    """Logits of the chunks that sample, `[num_samples, vocab_size]`."""
    samples = [logits[i] for i, chunk in enumerate(batch.chunks) if chunk.samples]
    return torch.stack(samples) if samples else torch.zeros(0, 1)
