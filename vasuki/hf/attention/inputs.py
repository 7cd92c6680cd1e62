"""A Batch -> the tensors of one packed forward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vasuki.base.arrays import Ints
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.sequence import Sequence
from vasuki.hf.attention.chunks import AttentionKernels, Chunks, PlacedChunks
from vasuki.hf.kernels.transfer import to_device
from vasuki.hf.kv.depth_mover import DepthMover
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.kv.kv_mover import KVMover

Mover = KVMover | DepthMover


class BetweenLayers(Protocol):
    """Moves KV while layers compute."""

    def before_layer(self, layer: int) -> None:
        """Called before a layer's new keys and values are written: afterwards, all that the layer needs is in place."""
        ...

    def after_layer(self, layer: int) -> None:
        """Called after a layer's attention."""
        ...


class Group(NamedTuple):
    """Chunks that pass recurrent layers together: equally long, of rows whose slots follow one another."""

    tokens: torch.Tensor  # int64 [rows * length], their places in the packed batch, row by row
    slots: slice  # of the rows
    is_fresh: bool  # they begin their rows: nothing came before

    @property
    def num_rows(self) -> int:
        return int(self.slots.stop - self.slots.start)


class Passing(NamedTuple):
    """A `Group` on the host."""

    tokens: Ints
    slots: slice
    is_fresh: bool
    are_all: bool = False  # no other row has a state

    def on(self, device: torch.device) -> Group:
        """The same for a device."""
        [tokens] = to_device(device, self.tokens)
        return Group(tokens, self.slots, self.is_fresh)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything the model and its attention need for one step."""

    input_ids: torch.Tensor  # int64 [1, num_tokens]
    position_ids: torch.Tensor  # int64 [1, num_tokens], restarting with every chunk
    rows: torch.Tensor  # int64 [2, num_tokens], where each token's key and value go, see KVCache
    sample_positions: torch.Tensor  # int64 [num_wanted], tokens whose logits are wanted
    cache: KVCache
    offload: BetweenLayers | None  # None where nothing moves in this step
    chunks: Chunks  # what attends to what
    groups: tuple[Group, ...] = ()  # how rows pass recurrent layers

    by_layer: tuple[StepInputs, ...] = ()  # what each layer sees, where their blocks are not at the same slots

    @contextmanager
    def at_layer(self, layer: int) -> Iterator[StepInputs]:
        """A context in which a layer reads and writes its keys and values, as what is yielded says: blocks that move
        are in place before it, and may leave after it."""
        if self.offload is not None:
            self.offload.before_layer(layer)
        yield self.by_layer[layer] if self.by_layer else self
        if self.offload is not None:
            self.offload.after_layer(layer)


class LastTokens:
    """Tokens that the step before sampled, on the device: the host may not have seen them yet.

    Args:
        sequences: those that were sampled for.
        token_ids: int64 `[num_sequences]`; negative for a row without one.
    """

    def __init__(self, sequences: list[Sequence], token_ids: torch.Tensor) -> None:
        self._place_of = {sequence: place for place, sequence in enumerate(sequences, 1)}
        self.token_ids = token_ids

    def late(self, batch: Batch, num_tokens: int) -> Ints:
        """Which of these each token of a batch is, counted from 1, and 0 for those that the host knows."""
        late, last = np.zeros(num_tokens, np.int64), len(batch.decodes)
        late[:last] = [self._place_of[row] if row.num_pending_tokens else 0 for row in batch.decodes]
        for chunk in batch.prefills:
            last += chunk.num_tokens
            if chunk.samples and chunk.sequence.num_pending_tokens:
                late[last - 1] = self._place_of[chunk.sequence]
        return late


@dataclass(frozen=True, slots=True)
class LaidOut:
    """The chunks of a batch end to end, as numbers on the host."""

    token_ids: Ints  # [num_tokens], 0 where late
    late: Ints  # [num_tokens], see `LastTokens`
    positions: Ints  # [num_tokens], restarting with every chunk
    slots: Ints  # [num_tokens], where each token's key and value go
    wanted: Ints  # [num_wanted], tokens whose logits are
    cache: KVCache
    offload: Mover | None
    chunks: Chunks
    last_tokens: LastTokens | None = None  # those that are late
    passing: tuple[Passing, ...] = ()  # how rows pass recurrent layers

    @property
    def passes_as_one(self) -> bool:
        """Whether all rows that have a state go on side by side."""
        return len(self.passing) == 1 and self.passing[0].are_all and not self.passing[0].is_fresh

    @property
    def rows(self) -> Ints:
        """`[2, num_tokens]`, see KVCache."""
        return self.cache.rows_of_slots(self.slots)

    def on_device(self) -> StepInputs:
        """As tensors of their own, in one copy."""
        device, rows = self.cache.device, self.rows
        input_ids, position_ids, keys, sample_positions = to_device(
            device, self.token_ids, self.positions, rows.reshape(-1), self.wanted
        )
        places = np.flatnonzero(self.late)
        if self.last_tokens is not None and len(places):
            at, which = to_device(device, places, self.late[places] - 1)
            sampled = self.last_tokens.token_ids[which].clamp(min=0)  # a row without a token ends, whatever follows
            input_ids = input_ids.index_copy(0, at, sampled)  # on a CPU, its memory is that of `token_ids`
        step = StepInputs(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            rows=keys.view(rows.shape),
            sample_positions=sample_positions,
            cache=self.cache,
            offload=self.offload,
            chunks=self.chunks,
            groups=tuple(rows.on(device) for rows in self.passing),
        )
        if not isinstance(self.offload, DepthMover):
            return step
        return replace(step, by_layer=_by_layer(step, to_device(device, self.slots)[0], self.offload))


def lay_out(
    batch: Batch,
    cache: KVCache,
    kernels: AttentionKernels | None = None,
    offload: Mover | None = None,
    last_tokens: LastTokens | None = None,
    wanted: Ints | None = None,
    passing: tuple[Passing, ...] = (),
) -> LaidOut:
    """Lay the chunks of a batch end to end. `wanted` are tokens whose logits are, if not those that are sampled for."""
    decodes, prefills, chunks = batch.decodes, batch.prefills, batch.chunks
    lengths = np.array([1] * len(decodes) + [chunk.num_tokens for chunk in prefills])
    lasts = np.cumsum(lengths)
    firsts = lasts - lengths
    starts = np.array(batch.starts + [chunk.start for chunk in prefills])
    chunk_of = np.repeat(np.arange(len(lengths)), lengths)  # [num_tokens]
    positions = np.arange(lasts[-1]) - firsts[chunk_of] + starts[chunk_of]
    tables = tables_of(chunks, cache.block_tokens)
    slots = tables[chunk_of, positions // cache.block_tokens] * cache.block_tokens + positions % cache.block_tokens
    last = [_token_of(sequence, start) for sequence, start in zip(decodes, batch.starts, strict=True)]
    others = [tokens_of(chunk.sequence, chunk.start, chunk.end) for chunk in prefills]
    token_ids = np.concatenate([np.array(last, np.int64), *others])
    prompts = np.array([chunk.sequence.num_prompt_tokens for chunk in chunks])
    placed = PlacedChunks(firsts, lengths, starts, prompts)
    if wanted is None:
        wanted = lasts[[True] * len(decodes) + [chunk.samples for chunk in prefills]] - 1
    return LaidOut(
        token_ids=token_ids.astype(np.int64),
        late=np.zeros_like(positions) if last_tokens is None else last_tokens.late(batch, len(positions)),
        positions=positions,
        slots=slots,
        wanted=wanted,
        cache=cache,
        offload=offload,
        chunks=Chunks(placed, wanted, tables, cache, kernels or AttentionKernels()),
        last_tokens=last_tokens,
        passing=passing,
    )


def _by_layer(step: StepInputs, slots: torch.Tensor, mover: DepthMover) -> tuple[StepInputs, ...]:
    """What each layer sees of a step whose `slots` are those of blocks: a layer at another place finds them elsewhere.

    Layers at one place share what they see.
    """
    arena, depth = mover.device, mover.depth
    size = arena.block_tokens
    slots_at = arena.slots_here[: depth.places, slots // size] * size + slots % size  # [places, num_tokens]
    rows = arena.rows_of_slots(slots_at)
    places = [
        replace(step, rows=rows[:, place].contiguous(), chunks=step.chunks.at(arena.slots_here[place]))
        for place in range(depth.places)
    ]
    return tuple(places[depth.place_of(layer)] for layer in range(depth.num_layers))


def tables_of(chunks: list[ScheduledChunk], block_tokens: int) -> np.ndarray:
    """Blocks in use by each chunk's sequence: int64 [num_chunks, widest], padded with its first:
    one of another sequence may be on the move."""
    used = np.array([-(-chunk.end // block_tokens) for chunk in chunks])
    blocks = [chunk.sequence.block_table.device for chunk in chunks]
    counts = used.tolist()
    flat = itertools.chain.from_iterable([some[:count] for some, count in zip(blocks, counts, strict=True)])
    tables = np.repeat(np.array([[some[0]] for some in blocks]), used.max(), axis=1)
    tables[np.arange(tables.shape[1]) < used[:, None]] = np.fromiter(flat, np.int64, sum(counts))
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


def _token_of(sequence: Sequence, position: int) -> int:
    """The same of one position."""
    place, output = position - sequence.num_prompt_tokens, sequence.output_token_ids
    if place < 0:
        return int(sequence.request.prompt_token_ids[position])
    return output[place] if place < len(output) else 0
