"""A step's chunks, as each way of computing attention wants them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vasuki.base.arrays import Ints
from vasuki.hf.kernels import varlen
from vasuki.hf.kernels.float8 import Scales
from vasuki.hf.kernels.transfer import Shapes, to_device
from vasuki.hf.kernels.varlen import PagedVarlen
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.machines.profile import AttentionChoice

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
    shortest: int  # tokens that each row sees, itself included


TILE_NUMBERS = 5  # see `PagedTiles`


class TileKernel(Protocol):
    """Attention that is compiled for a device. Shapes as in `kernels.paged_attention`."""

    tile_tokens: int  # of a prompt, in a tile at most
    output_tile_tokens: int  # of an output; one where another kernel serves those than serves prompts

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, cache: torch.Tensor, scales: Scales, /
    ) -> None: ...

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
        scales: Scales,
        /,
    ) -> None: ...


class PlacedChunks(NamedTuple):
    """Chunks of a step, `[num_chunks]` of each."""

    firsts: Ints  # first token of each in the packed batch
    lengths: Ints  # tokens
    starts: Ints  # position of the first token
    prompts: Ints  # tokens of its sequence's prompt


class PagedTiles:
    """Chunks for a compiled kernel: cut into tiles that walk their sequences' blocks, those with most work first. None
    has tokens of a prompt and of its output.

    Attributes:
        tiles: int64 `[count, 5]`: first token in the packed batch, tokens, position of the first, row of `tables`, and
            whether they are of an output.
        longest: most tokens of a tile, or of one that may be loaded later.
        sampled: tiles of those tokens alone whose logits are wanted.
        tables: int64 `[num_chunks, width]`, padded with anything.
    """

    def __init__(
        self,
        kernel: TileKernel,
        chunks: PlacedChunks,
        wanted: Ints,
        tables: Ints,
        device: torch.device,
        longest: int = 1,
    ) -> None:
        self.kernel = kernel
        every, alone = tiles_of(kernel, chunks), _single_tiles(chunks, wanted)
        self.longest = max(longest, int(every[:, 1].max()))
        on_device = to_device(device, *(each.reshape(-1) for each in (every, alone, tables)))
        self.tiles, self.sampled = (each.view(-1, TILE_NUMBERS) for each in on_device[:2])
        self.tables = on_device[2].view(tables.shape)

    # --- in memory that stays, where each tile was of one token ------------------------------------------------------

    def shapes(self) -> Shapes:
        """What it has there: a tile for each token, and a table for each tile and one for padding, which comes last."""
        count, width = self.tables.shape
        return {"tiles": (tuple(self.tiles.shape), np.int64), "tables": ((count + 1, width), np.int64)}

    def move_to(self, there: Mapping[str, torch.Tensor], padding_block: int) -> None:
        """Attend from now on as is said there, where tables are `padding_block` alone until others come."""
        self.tiles, self.tables = there["tiles"], there["tables"].fill_(padding_block)

    def write(self, here: Mapping[str, np.ndarray], chunks: PlacedChunks, tables: Ints, padding_block: int) -> int:
        """Say how a step attends; tokens beyond its own each see the beginning of `padding_block`. Returns how many
        rows of tables that takes."""
        num_chunks, width = tables.shape
        tiles, num_tokens, room = tiles_of(self.kernel, chunks), int(chunks.lengths.sum()), len(here["tiles"])
        count = len(tiles) + room - num_tokens
        here["tiles"][: len(tiles)] = tiles
        here["tiles"][len(tiles) : count] = 0, 1, 0, room, 1
        here["tiles"][len(tiles) : count, 0] = np.arange(num_tokens, room)
        here["tiles"][count:] = 0  # of no tokens: tiles of several leave fewer
        here["tables"][:num_chunks, :width] = tables
        return int(num_chunks)

    def at(self, slots: torch.Tensor) -> PagedTiles:
        """The same with each block `b` at `slots[b]`."""
        elsewhere = copy.copy(self)
        elsewhere.tables = slots[self.tables]
        return elsewhere


def tiles_of(kernel: TileKernel, chunks: PlacedChunks) -> Ints:
    """Tiles of all tokens: int64 `[count, 5]`, as in `PagedTiles`."""
    firsts, lengths, starts, prompts = chunks
    of_prompt = np.clip(prompts - starts, 0, lengths)
    tokens = np.stack([of_prompt, lengths - of_prompt])  # [2, num_chunks], as is all that counts pieces
    sizes = np.array([[kernel.tile_tokens], [kernel.output_tile_tokens]])
    counts = -(-tokens // sizes)
    generated, chunk_of = (np.repeat(each.reshape(-1), counts.reshape(-1)) for each in np.indices(tokens.shape))
    behind = np.arange(len(chunk_of)) - np.repeat(np.cumsum(counts) - counts.reshape(-1), counts.reshape(-1))
    skipped = behind * sizes[generated, 0]  # of the tokens of a piece
    taken = np.minimum(tokens[generated, chunk_of] - skipped, sizes[generated, 0])
    skipped += generated * of_prompt[chunk_of]
    every = np.stack([firsts[chunk_of] + skipped, taken, starts[chunk_of] + skipped, chunk_of, generated], axis=1)
    return _most_work_first(every)


def _single_tiles(chunks: PlacedChunks, wanted: Ints) -> Ints:
    """Tiles of these tokens, one of each."""
    firsts, _, starts, prompts = chunks
    chunk_of = np.searchsorted(firsts, wanted, side="right") - 1
    positions = starts[chunk_of] + wanted - firsts[chunk_of]
    alone = np.stack([wanted, np.ones_like(wanted), positions, chunk_of, positions >= prompts[chunk_of]], axis=1)
    return _most_work_first(alone)


def _most_work_first(tiles: Ints) -> Ints:
    _, tokens, positions, *_ = tiles.T
    return tiles[np.argsort(-tokens * (positions + tokens), kind="stable")]


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The kernels that attend in an executor's steps. What none of them serves, torch's operators do."""

    ours: TileKernel | None = None
    choice: AttentionChoice = "packed"  # torch's wherever it can, ours, or the faster one

    def packs(self, lengths: Ints, block_tokens: int) -> bool:
        """Whether torch's kernel attends in a step of such chunks, where it can."""
        if self.ours is None:
            return self.choice != "paged"
        if self.choice == "paged" or not varlen.can_page(block_tokens):  # contexts would be copied for it
            return False
        return self.choice == "packed" or bool((lengths > 1).any())


class Reserve(NamedTuple):
    """The most that is loaded into a step's chunks later."""

    context: int = 1  # of a chunk
    tile: int = 1  # tokens of a tile


class Chunks:
    """Chunks of a step, laid out for each way of computing attention when it is first asked for.

    Args:
        placed: where they are.
        wanted: tokens whose logits are, `[num_wanted]`.
        tables: `[num_chunks, width]` blocks of each, padded with any block.
        cache: what the blocks are of.
        kernels: those that attend.
        reserve: what kernels are to expect, if larger chunks may be loaded later.
    """

    def __init__(
        self,
        placed: PlacedChunks,
        wanted: Ints,
        tables: Ints,
        cache: KVCache,
        kernels: AttentionKernels,
        reserve: Reserve | None = None,
    ) -> None:
        self._placed, self._wanted = placed, wanted
        self._firsts, self._lengths, self._starts, _ = placed
        self._tables, self._cache, self.kernels, self._reserve = tables, cache, kernels, reserve or Reserve()

    @property
    def are_single(self) -> bool:
        """Whether each chunk is of one token that samples."""
        return bool((self._lengths == 1).all() and len(self._wanted) == len(self._lengths))

    @property
    def width(self) -> int:
        """Blocks of the longest table."""
        return int(self._tables.shape[1])

    # --- for kernels -------------------------------------------------------------------------------------------------

    @cached_property
    def packs(self) -> bool:
        """Whether torch's packed kernel attends in this step, where it can."""
        return self.kernels.packs(self._lengths, self._cache.block_tokens)

    @cached_property
    def apart(self) -> int:
        """How many leading chunks of one token a kernel of ours serves, where torch's packed one serves the others."""
        if self.kernels.ours is None or self.kernels.choice == "packed":
            return 0
        longer = np.flatnonzero(self._lengths > 1)
        return int(longer[0]) if len(longer) else len(self._lengths)

    @cached_property
    def packed(self) -> PagedVarlen | None:
        """The chunks for torch's packed kernel, but for those apart; None where there is none."""
        lengths, starts, tables = (each[self.apart :] for each in (self._lengths, self._starts, self._tables))
        ends = starts + lengths
        return _varlen(lengths, np.maximum(ends, self._reserve.context), ends, tables, self._cache)

    @cached_property
    def tiles_apart(self) -> PagedTiles | None:
        """Those apart for the kernel of ours; None if there are none."""
        if not (apart := self.apart):
            return None
        assert self.kernels.ours is not None
        placed, nothing = PlacedChunks(*(each[:apart] for each in self._placed)), np.empty(0, np.int64)
        return PagedTiles(self.kernels.ours, placed, nothing, self._tables[:apart], self._cache.device)

    @cached_property
    def tiles(self) -> PagedTiles | None:
        """The chunks for a kernel of ours; None where there is none."""
        if self.kernels.ours is None:
            return None
        parts = self._placed, self._wanted, self._tables, self._cache.device
        return PagedTiles(self.kernels.ours, *parts, self._reserve.tile)

    # --- in memory that stays, where each chunk was of one token -----------------------------------------------------

    @property
    def _views(self) -> list[PagedVarlen | PagedTiles]:
        """What has been asked for."""
        return [view for name in ("packed", "tiles") if (view := vars(self).get(name)) is not None]

    def shapes(self) -> Shapes:
        """What its kernels read there."""
        return {name: shape for view in self._views for name, shape in view.shapes().items()}

    def move_to(self, there: Mapping[str, torch.Tensor], padding_block: int) -> None:
        """Attend from now on as is said there."""
        for view in self._views:
            view.move_to(there, padding_block)

    def write(self, here: Mapping[str, np.ndarray], step: Chunks, padding_block: int) -> int:
        """Say how a step attends: tokens beyond those of its chunks each see the first token of `padding_block`.
        Returns how many rows of the last array that takes."""
        return [view.write(here, step._placed, step._tables, padding_block) for view in self._views][-1]

    def at(self, slots: torch.Tensor) -> Chunks:
        """The chunks with each block `b` at `slots[b]`, int64 `[num_blocks]`: another layer's part of it."""
        return _ChunksElsewhere(self, slots)

    # --- for torch operators, which want each context in one piece ---------------------------------------------------

    @cached_property
    def long_chunks(self) -> list[LongChunk]:
        """Chunks of two tokens or more."""
        block_tokens, device = self._cache.block_tokens, self._cache.device
        ends = self._starts + self._lengths
        return [
            LongChunk(
                int(self._firsts[i]),
                int(self._firsts[i] + self._lengths[i]),
                int(ends[i]),
                to_device(device, self._tables[i, : -(-ends[i] // block_tokens)])[0],
            )
            for i in np.flatnonzero(self._lengths > 1)
        ]

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """Single tokens, longest context first, in groups whose padding stays small."""
        block_tokens, device = self._cache.block_tokens, self._cache.device
        single = np.flatnonzero(self._lengths == 1)
        order = single[np.argsort(-self._starts[single], kind="stable")]
        tokens, positions, tables = self._firsts[order], self._starts[order], self._tables[order]
        widths = positions // block_tokens + 1
        groups, first = [], 0
        while first < len(tokens):
            sizes = np.arange(1, len(tokens) - first + 1)
            padded = widths[first] * sizes <= _GROUP_PADDING * np.cumsum(widths[first:])
            size = int(np.argmin(padded)) or len(padded)
            rows = slice(first, first + size)
            table = tables[rows, : widths[first]]
            on_device = to_device(device, tokens[rows], positions[rows], table.reshape(-1))
            shortest = int(positions[rows][-1]) + 1
            groups.append(DecodeGroup(on_device[0], on_device[1], on_device[2].view(table.shape), shortest))
            first += size
        return groups


class _ChunksElsewhere(Chunks):
    """Chunks whose blocks lie elsewhere, laid out once for all layers."""

    def __init__(self, chunks: Chunks, slots: torch.Tensor) -> None:
        self._chunks, self._slots, self.kernels = chunks, slots, chunks.kernels

    @cached_property
    def packs(self) -> bool:
        return self._chunks.packs

    @cached_property
    def packed(self) -> PagedVarlen | None:
        packed = self._chunks.packed
        return None if packed is None else packed.at(self._slots)

    @cached_property
    def apart(self) -> int:
        return self._chunks.apart

    @cached_property
    def tiles_apart(self) -> PagedTiles | None:
        tiles = self._chunks.tiles_apart
        return None if tiles is None else tiles.at(self._slots)

    @cached_property
    def tiles(self) -> PagedTiles | None:
        tiles = self._chunks.tiles
        return None if tiles is None else tiles.at(self._slots)

    @cached_property
    def long_chunks(self) -> list[LongChunk]:
        return [replace(chunk, blocks=self._slots[chunk.blocks]) for chunk in self._chunks.long_chunks]

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        return [replace(group, blocks=self._slots[group.blocks]) for group in self._chunks.decode_groups]


def _varlen(lengths: Ints, ends: Ints, seen: Ints, tables: Ints, cache: KVCache) -> PagedVarlen | None:
    if all(varlen.why_unavailable(cache.layout.dtype, cache.device, head_dim) for head_dim in cache.layout.head_dims):
        return None
    return PagedVarlen(lengths, ends, tables, cache.block_tokens, cache.device, seen=seen)
