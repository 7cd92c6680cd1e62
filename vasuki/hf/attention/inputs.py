"""A Batch -> the tensors of one packed forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from vasuki.base.arrays import Bools, Ints
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.sequence import Sequence
from vasuki.hf.kernels import varlen
from vasuki.hf.kernels.transfer import to_device
from vasuki.hf.kernels.varlen import PagedVarlen
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.kv.kv_mover import KVMover

# Rows of a decode group are padded to the longest; a group is closed when that would cost more than this factor.
_GROUP_PADDING = 1.3


@dataclass(frozen=True, slots=True)
class LongChunk:
    """A chunk whose attention is one fused call of its own."""

    first: int  # its tokens are [first, last) of the packed batch
    last: int
    end: int  # context length after the chunk
    blocks: torch.Tensor  # int64 [blocks_for(end)]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Chunks of one token with contexts of nearly equal length, padded to the longest of them."""

    tokens: torch.Tensor  # int64 [rows], their places in the packed batch
    positions: torch.Tensor  # int64 [rows]
    blocks: torch.Tensor  # int64 [rows, blocks_per_row]; padded with what the mask hides


class Gathered:
    """Chunks for attention by torch operators, which want each context in one piece. Laid out when first asked for."""

    def __init__(
        self, firsts: Ints, lengths: Ints, starts: Ints, tables: Ints, block_tokens: int, device: torch.device
    ) -> None:
        self._firsts, self._lengths, self._starts, self._tables = firsts, lengths, starts, tables
        self._block_tokens, self._device = block_tokens, device

    @cached_property
    def long_chunks(self) -> list[LongChunk]:
        """Chunks of two tokens or more."""
        ends = self._starts + self._lengths
        return [
            LongChunk(
                int(self._firsts[i]),
                int(self._firsts[i] + self._lengths[i]),
                int(ends[i]),
                to_device(self._device, self._tables[i, : -(-ends[i] // self._block_tokens)])[0],
            )
            for i in np.flatnonzero(self._lengths > 1)
        ]

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """Single tokens, longest context first, in groups whose padding stays small."""
        single = np.flatnonzero(self._lengths == 1)
        order = single[np.argsort(-self._starts[single], kind="stable")]
        tokens, positions, tables = self._firsts[order], self._starts[order], self._tables[order]
        widths = positions // self._block_tokens + 1
        groups, first = [], 0
        while first < len(tokens):
            sizes = np.arange(1, len(tokens) - first + 1)
            padded = widths[first] * sizes <= _GROUP_PADDING * np.cumsum(widths[first:])
            size = int(np.argmin(padded)) or len(padded)
            rows = slice(first, first + size)
            table = tables[rows, : widths[first]]
            on_device = to_device(self._device, tokens[rows], positions[rows], table.reshape(-1))
            groups.append(DecodeGroup(on_device[0], on_device[1], on_device[2].view(table.shape)))
            first += size
        return groups


class TileKernel(Protocol):
    """Attention that is compiled for a device. Shapes as in `kernels.paged_attention`."""

    tile_tokens: int  # of a tile at most

    def write(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, cache: torch.Tensor, /) -> None: ...

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        tiles: torch.Tensor,
        longest: int,
        tables: torch.Tensor,
        sinks: torch.Tensor | None,
        window: int | None,
        scaling: float,
        softcap: float | None,
        out: torch.Tensor,
        /,
    ) -> None: ...


class PagedTiles:
    """Chunks for a compiled kernel: cut into tiles that walk their sequences' blocks, those with most work first.

    Attributes:
        tiles: int64 `[count, 4]`: first token in the packed batch, tokens, position of the first, row of `tables`.
        longest: most tokens of a tile.
        sampled: tiles of those tokens alone whose logits are wanted.
        tables: int64 `[num_chunks, width]`, padded with anything.
    """

    def __init__(
        self,
        kernel: TileKernel,
        firsts: Ints,
        lengths: Ints,
        starts: Ints,
        samples: Bools,
        tables: Ints,
        device: torch.device,
    ) -> None:
        self.kernel = kernel
        size = kernel.tile_tokens
        counts = -(-lengths // size)
        chunk_of = np.repeat(np.arange(len(lengths)), counts)  # [count]
        skipped = (np.arange(len(chunk_of)) - (np.cumsum(counts) - counts)[chunk_of]) * size
        tokens = np.minimum(lengths[chunk_of] - skipped, size)
        lasts = lengths - 1
        every = np.stack([firsts[chunk_of] + skipped, tokens, starts[chunk_of] + skipped, chunk_of], axis=1)
        last = np.stack([firsts + lasts, np.ones_like(lasts), starts + lasts, np.arange(len(lasts))], axis=1)
        self.longest = int(tokens.max())
        on_device = to_device(
            device, *(each.reshape(-1) for each in (_most_work_first(every), _most_work_first(last[samples]), tables))
        )
        self.tiles, self.sampled = (each.view(-1, 4) for each in on_device[:2])
        self.tables = on_device[2].view(tables.shape)

    def load_contexts(self, other: PagedTiles, padding_block: int) -> None:
        """Attend from now on to another step's contexts, from the same memory as before. Both steps are of single
        tokens. Tokens beyond those of `other` see the first token of `padding_block`."""
        count, width = other.tables.shape
        self.tiles[:count].copy_(other.tiles)
        self.tiles[count:].copy_(self._padding[count:])
        self.tables[:count, :width].copy_(other.tables)
        self.tables[count:].fill_(padding_block)

    @cached_property
    def _padding(self) -> torch.Tensor:
        """Tiles of single tokens, each at the beginning of its own table."""
        rows = torch.arange(len(self.tables), device=self.tables.device)
        return torch.stack([rows, torch.ones_like(rows), torch.zeros_like(rows), rows], dim=1)


def _most_work_first(tiles: Ints) -> Ints:
    _, tokens, positions, _ = tiles.T
    return tiles[np.argsort(-tokens * (positions + tokens), kind="stable")]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything the model and its attention need for one step."""

    input_ids: torch.Tensor  # int64 [1, num_tokens]
    position_ids: torch.Tensor  # int64 [1, num_tokens], restarting with every chunk
    rows: torch.Tensor  # int64 [2, num_tokens], where each token's key and value go, see KVCache
    sample_positions: torch.Tensor  # int64 [num_samples], tokens whose logits are wanted
    cache: KVCache
    offload: KVMover | None  # moves KV beside the compute
    # The chunks, as each way of computing attention wants them.
    varlen: PagedVarlen | None  # torch's on CUDA, for layers whose attention is plain and whose heads it takes
    tiles: PagedTiles | None  # a kernel of ours, where there is one
    gathered: Gathered  # torch operators

    @contextmanager
    def at_layer(self, layer: int) -> Iterator[None]:
        """While a layer reads and writes its keys and values: those that move are there before, and may leave after."""
        if self.offload is not None:
            self.offload.before_layer(layer)
        yield
        if self.offload is not None:
            self.offload.after_layer(layer)


class LastTokens:
    """Tokens that the step before sampled, on the device: the host may not have seen them yet.

    Args:
        sequences: those that were sampled for.
        token_ids: int64 `[num_sequences]`.
    """

    def __init__(self, sequences: list[Sequence], token_ids: torch.Tensor) -> None:
        self._row_of = {sequence: row for row, sequence in enumerate(sequences)}
        self._token_ids = token_ids

    def fill_in(self, input_ids: torch.Tensor, batch: Batch, lasts: Ints) -> None:
        """Give each chunk that ends with a pending token that token; `lasts` are the places behind the chunks."""
        chunks = zip(batch.chunks, lasts, strict=True)
        late = [
            (last - 1, self._row_of[c.sequence]) for c, last in chunks if c.samples and c.sequence.num_pending_tokens
        ]
        if late:
            places, rows = to_device(input_ids.device, *np.array(late).T)
            input_ids[places] = self._token_ids[rows]


def build_inputs(
    batch: Batch,
    cache: KVCache,
    device: torch.device,
    kernel: TileKernel | None = None,
    offload: KVMover | None = None,
    last_tokens: LastTokens | None = None,
) -> StepInputs:
    """Lay the chunks of a batch end to end."""
    lengths = np.array([chunk.num_tokens for chunk in batch.chunks])
    lasts = np.cumsum(lengths)
    firsts = lasts - lengths
    starts = np.array([chunk.start for chunk in batch.chunks])
    chunk_of = np.repeat(np.arange(len(lengths)), lengths)  # [num_tokens]
    positions = np.arange(lasts[-1]) - firsts[chunk_of] + starts[chunk_of]
    tables = tables_of(batch.chunks, cache.block_tokens)
    slots = tables[chunk_of, positions // cache.block_tokens] * cache.block_tokens + positions % cache.block_tokens
    token_ids = np.concatenate([tokens_of(chunk.sequence, chunk.start, chunk.end) for chunk in batch.chunks])
    samples = np.array([chunk.samples for chunk in batch.chunks])
    input_ids, position_ids, slots, sample_positions = to_device(
        device, token_ids.astype(np.int64), positions, slots, lasts[samples] - 1
    )
    if last_tokens is not None:
        last_tokens.fill_in(input_ids, batch, lasts)
    walks_any = kernel is not None and not varlen.can_page(cache.block_tokens)  # ours takes blocks of any size
    return StepInputs(
        input_ids=input_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        rows=cache.rows_of_slots(slots),
        sample_positions=sample_positions,
        cache=cache,
        offload=offload,
        tiles=None if kernel is None else PagedTiles(kernel, firsts, lengths, starts, samples, tables, device),
        varlen=None if walks_any else _varlen(lengths, starts + lengths, tables, cache, device),
        gathered=Gathered(firsts, lengths, starts, tables, cache.block_tokens, device),
    )


def _varlen(
    lengths: np.ndarray, ends: np.ndarray, tables: np.ndarray, cache: KVCache, device: torch.device
) -> PagedVarlen | None:
    if all(varlen.why_unavailable(cache.layout.dtype, device, head_dim) for head_dim in cache.layout.head_dims):
        return None
    return PagedVarlen(lengths, ends, tables, cache.block_tokens, device)


def tables_of(chunks: list[ScheduledChunk], block_tokens: int) -> np.ndarray:
    """Blocks in use by each chunk's sequence: int64 [num_chunks, widest], padded with its first:
    one of another sequence may be on the move."""
    used = [-(-chunk.end // block_tokens) for chunk in chunks]
    tables = np.empty((len(used), max(used)), dtype=np.int64)
    for row, (chunk, count) in enumerate(zip(chunks, used, strict=True)):
        blocks = chunk.sequence.block_table.device
        tables[row, :count], tables[row, count:] = blocks[:count], blocks[0]
    return tables


def tokens_of(sequence: Sequence, start: int, end: int) -> np.ndarray | list[int]:
    """Token ids at positions [start, end) of prompt and output, with 0 for a pending one."""
    num_prompt = sequence.num_prompt_tokens
    if start >= num_prompt:
        output = sequence.output_token_ids[start - num_prompt : end - num_prompt]
        return output + [0] * (end - start - len(output))
    prompt = np.asarray(sequence.request.prompt_token_ids[start:end])
    if end <= num_prompt:
        return prompt
    return np.concatenate([prompt, np.asarray(tokens_of(sequence, num_prompt, end))])
