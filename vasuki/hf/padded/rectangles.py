"""Vector shaping (Baton, section 4.1): chunks of unequal lengths as a rectangle, rows aligned on the right.

    columns       0   1   2   3   4   5   6
    a, decodes   a0  a1  a2  a3  a4  a5 [a6]      [ ] new tokens, the others are in the cache
    b, decodes    .   .   .  b0  b1  b2 [b3]       .  padding, masked
    c, prompt     .   .   .   .  [c0 c1  c2]      in a rectangle of its own, or as here with new columns 4 to 6

The paper pads new columns behind the token of a running row, which leaves holes in its cache. Here padding is in front:
a row's tokens are next to each other, so that distances between columns are distances between positions, and a column
that is padding in every row never is there to be released.
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
        mask: int64 `[rows, width]`, 1 where a row has a token.
        kept: int64 `[tokens]`, those of the flat `[rows * new]` that are no padding.
        written: int64 `[2, tokens]`, rows of the KV cache that they go to, see `KVCache.rows_of_slots`.
        read: int64 `[2, rows * width]`, rows of the KV cache by column; anything where there is padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    mask: torch.Tensor
    kept: torch.Tensor
    written: torch.Tensor
    read: torch.Tensor

    @classmethod
    def of(cls, chunks: list[ScheduledChunk], cache: KVCache) -> Rectangle:
        """Lay chunks out one below the other."""
        lengths = np.array([chunk.num_tokens for chunk in chunks])
        ends = np.array([chunk.end for chunk in chunks])
        new, width = int(lengths.max()), int(ends.max())
        positions = np.arange(width) - (width - ends)[:, None]  # [rows, width], below 0 in padding
        is_new = np.arange(new) >= (new - lengths)[:, None]  # [rows, new]
        token_ids = np.zeros((len(chunks), new), np.int64)
        token_ids[is_new] = np.concatenate([tokens_of(chunk.sequence, chunk.start, chunk.end) for chunk in chunks])
        seen, size = np.maximum(positions, 0), cache.block_tokens
        slots = np.take_along_axis(tables_of(chunks, size), seen // size, axis=1) * size + seen % size
        arrays = (
            token_ids,
            seen[:, width - new :],
            (positions >= 0).astype(np.int64),
            np.flatnonzero(is_new),
            slots[:, width - new :][is_new],
            slots,
        )
        flat = to_device(cache.layers[0].device, *(array.ravel() for array in arrays))
        input_ids, position_ids, mask = (part.view(len(chunks), -1) for part in flat[:3])
        return cls(input_ids, position_ids, mask, flat[3], *map(cache.rows_of_slots, flat[4:]))

    @property
    def past(self) -> int:
        """Columns before the new ones."""
        return self.mask.shape[1] - self.input_ids.shape[1]
