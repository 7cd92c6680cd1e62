"""Vector shaping (Baton, section 4.1): chunks of unequal lengths as a rectangle, rows aligned on the right.

    columns       0   1   2   3   4   5   6
    a, decodes   a0  a1  a2  a3  a4  a5 [a6]      [ ] new tokens, the others are in the cache
    b, decodes    .   .   .  b0  b1  b2 [b3]       .  padding, masked
    c, prompt     .   .   .   .  [c0 c1  c2]      in a rectangle of its own, or as here with new columns 4 to 6

The paper pads new columns behind the token of a running row, which leaves holes in its cache. Here padding is in front:
a row's tokens are next to each other, so that distances between columns are distances between positions, and a column
that is padding in every row is there only where it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vasuki.engine.batch import ScheduledChunk
from vasuki.hf.attention.inputs import tables_of, tokens_of
from vasuki.hf.kernels.transfer import to_device
from vasuki.hf.kv.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Rectangle:
    """What a model is called with for some chunks, `rows` of them, `new` columns wide, over `width` columns of keys.

    Shapes:
        input_ids, position_ids: int64 `[rows, new]`.
        mask: int64 `[rows, width]`, 1 where a row has a token; or where chunks share rows, bool `[rows, 1, new, new]`,
            which token sees which.
        ends: int64 `[chunks]`, the last token of each in the flat `[rows * new]`; None where they end their rows.
        kept: int64 `[tokens]`, places in the flat `[rows * new]` that are not padding.
        written: int64 `[2, tokens]`, rows of the KV cache that they go to, see `KVCache.rows_of_slots`.
        read: int64 `[2, rows * width]`, rows of the KV cache by column; anything where there is padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    mask: torch.Tensor
    ends: torch.Tensor | None
    kept: torch.Tensor
    written: torch.Tensor
    read: torch.Tensor

    @classmethod
    def of(cls, rows: list[list[ScheduledChunk]], cache: KVCache, columns: int = 0) -> Rectangle:
        """Lay rows out one below the other, over at least `columns` columns. Chunks that share one are whole prompts,
        or begin one."""
        chunks = [chunk for row in rows for chunk in row]
        counts = np.array([len(row) for row in rows])
        lengths = np.array([chunk.num_tokens for chunk in chunks])
        sizes = np.add.reduceat(lengths, np.cumsum(counts) - counts)  # new tokens of each row
        ends = sizes + [row[0].start for row in rows]
        new, width = int(sizes.max()), max(columns, int(ends.max()))
        positions = np.arange(width) - (width - ends)[:, None]  # [rows, width], below 0 in padding
        is_new = np.arange(new) >= (new - sizes)[:, None]  # [rows, new]
        token_ids = np.zeros((len(rows), new), np.int64)
        token_ids[is_new] = np.concatenate([tokens_of(chunk.sequence, chunk.start, chunk.end) for chunk in chunks])
        lasts, chunk_of = lengths[:0], np.arange(len(rows))[:, None]
        if shared := len(chunks) > len(rows):
            lasts = np.flatnonzero(is_new)[np.cumsum(lengths) - 1]
            chunk_of = np.full((len(rows), new), -1)  # in padding, whose tokens see each other
            chunk_of[is_new] = np.repeat(np.arange(len(chunks)), lengths)
            positions[is_new] = np.concatenate([np.arange(length) for length in lengths])
        seen, size = np.maximum(positions, 0), cache.block_tokens
        slots = tables_of(chunks, size)[chunk_of, seen // size] * size + seen % size
        arrays = (
            token_ids,
            seen[:, width - new :],
            chunk_of if shared else (positions >= 0).astype(np.int64),
            lasts,
            np.flatnonzero(is_new),
            slots[:, width - new :][is_new],
            slots,
        )
        flat = to_device(cache.device, *(array.ravel() for array in arrays))
        input_ids, position_ids, mask = (part.view(len(rows), -1) for part in flat[:3])
        written, read = map(cache.rows_of_slots, flat[5:])
        if not shared:
            return cls(input_ids, position_ids, mask, None, flat[4], written, read)
        apart = (mask[:, None, :, None] == mask[:, None, None, :]).tril()
        return cls(input_ids, position_ids, apart, flat[3], flat[4], written, read)

    @property
    def past(self) -> int:
        """Columns before the new ones."""
        return self.mask.shape[-1] - self.input_ids.shape[1]
