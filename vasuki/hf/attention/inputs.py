"""A Batch -> the tensors of one packed forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything the model and its attention need for one step."""

    input_ids: torch.Tensor  # int64 [1, num_tokens]
    position_ids: torch.Tensor  # int64 [1, num_tokens], restarting with every chunk
    rows: torch.Tensor  # int64 [2, num_tokens], where each token's key and value go, see KVCache
    sample_positions: torch.Tensor  # int64 [num_wanted], tokens whose logits are wanted
    cache: KVCache
    offload: Mover | None  # moves KV while layers compute; None where nothing moves in this step
    chunks: Chunks  # what attends to what

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
            input_ids[places] = self._token_ids[rows].clamp(min=0)  # a row without a token ends, whatever follows


def build_inputs(
    batch: Batch,
    cache: KVCache,
    kernels: AttentionKernels | None = None,
    offload: Mover | None = None,
    last_tokens: LastTokens | None = None,
    wanted: Ints | None = None,
) -> StepInputs:
    """Lay the chunks of a batch end to end. `wanted` are tokens whose logits are, if not those that are sampled for."""
    device = cache.device
    lengths = np.array([chunk.num_tokens for chunk in batch.chunks])
    lasts = np.cumsum(lengths)
    firsts = lasts - lengths
    starts = np.array([chunk.start for chunk in batch.chunks])
    chunk_of = np.repeat(np.arange(len(lengths)), lengths)  # [num_tokens]
    positions = np.arange(lasts[-1]) - firsts[chunk_of] + starts[chunk_of]
    tables = tables_of(batch.chunks, cache.block_tokens)
    slots = tables[chunk_of, positions // cache.block_tokens] * cache.block_tokens + positions % cache.block_tokens
    token_ids = np.concatenate([tokens_of(chunk.sequence, chunk.start, chunk.end) for chunk in batch.chunks])
    prompts = np.array([chunk.sequence.num_prompt_tokens for chunk in batch.chunks])
    placed = PlacedChunks(firsts, lengths, starts, prompts)
    if wanted is None:
        wanted = lasts[[chunk.samples for chunk in batch.chunks]] - 1
    input_ids, position_ids, slots, sample_positions = to_device(
        device, token_ids.astype(np.int64), positions, slots, wanted
    )
    if last_tokens is not None:
        last_tokens.fill_in(input_ids, batch, lasts)
    step = StepInputs(
        input_ids=input_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        rows=cache.rows_of_slots(slots),
        sample_positions=sample_positions,
        cache=cache,
        offload=offload,
        chunks=Chunks(placed, wanted, tables, cache, kernels or AttentionKernels()),
    )
    return replace(step, by_layer=_by_layer(step, slots, offload)) if isinstance(offload, DepthMover) else step


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
