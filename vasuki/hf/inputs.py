"""A Batch -> the tensors of one packed forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vasuki.batch import Batch
from vasuki.hf import cuda_attention
from vasuki.hf.cuda_attention import PagedVarlen
from vasuki.hf.kv_cache import KVCache
from vasuki.hf.native import PagedKernel
from vasuki.hf.offload import Offload
from vasuki.sequence import Sequence


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
    blocks: torch.Tensor  # int64 [rows, blocks_per_row]; padded with block 0, which the mask hides


@dataclass(frozen=True, slots=True)
class PagedTokens:
    """Tokens that each walk their sequence's blocks, in one call of the compiled kernel."""

    tokens: torch.Tensor  # int64 [count], their places in the packed batch
    positions: torch.Tensor  # int64 [count]
    table_of: torch.Tensor  # int64 [count], row of `tables`
    tables: torch.Tensor  # int64 [num_chunks, width], padded with anything


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything the model and its attention need for one step."""

    input_ids: torch.Tensor  # int64 [1, num_tokens]
    position_ids: torch.Tensor  # int64 [1, num_tokens], restarting with every chunk
    rows: torch.Tensor  # int64 [num_tokens], where each token's key goes, see KVCache
    sample_positions: torch.Tensor  # int64 [num_samples], tokens whose logits are wanted
    cache: KVCache
    offload: Offload | None  # moves KV beside the compute
    long_chunks: list[LongChunk]
    # The rest of the chunks, in one of two forms: for the compiled kernel, or for torch operators.
    kernel: PagedKernel | None
    paged_tokens: PagedTokens | None
    decode_groups: list[DecodeGroup]
    varlen: PagedVarlen | None  # serves all chunks in one or two calls, where a layer's attention is plain


# Up to this length a chunk's tokens go through the compiled kernel one by one; beyond it a fused call is faster.
_KERNEL_CHUNK = 48
# Rows of a decode group are padded to the longest; a group is closed when that would cost more than this factor.
_GROUP_PADDING = 1.3


def build_inputs(
    batch: Batch,
    cache: KVCache,
    device: torch.device,
    kernel: PagedKernel | None = None,
    offload: Offload | None = None,
) -> StepInputs:
    """Lay the chunks of a batch end to end."""
    lengths = np.array([chunk.num_tokens for chunk in batch.chunks])
    lasts = np.cumsum(lengths)
    firsts = lasts - lengths
    starts = np.array([chunk.start for chunk in batch.chunks])
    chunk_of = np.repeat(np.arange(len(lengths)), lengths)  # [num_tokens]
    positions = np.arange(lasts[-1]) - firsts[chunk_of] + starts[chunk_of]
    tables = _tables(batch, cache.block_tokens)
    slots = tables[chunk_of, positions // cache.block_tokens] * cache.block_tokens + positions % cache.block_tokens

    is_long = lengths > (_KERNEL_CHUNK if kernel else 1)
    long_chunks = [
        LongChunk(
            int(firsts[i]),
            int(lasts[i]),
            int(starts[i] + lengths[i]),
            torch.from_numpy(tables[i, : -(-(starts[i] + lengths[i]) // cache.block_tokens)]).to(device),
        )
        for i in np.flatnonzero(is_long)
    ]
    paged_tokens, decode_groups = None, []
    short = np.flatnonzero(~is_long[chunk_of])
    if kernel and len(short):
        paged_tokens = PagedTokens(
            torch.from_numpy(short),
            torch.from_numpy(positions[short]),
            torch.from_numpy(chunk_of[short]),
            torch.from_numpy(tables),
        )
    elif len(short):
        decode_groups = _group(short, positions[short], tables[chunk_of[short]], cache.block_tokens, device)

    token_ids = np.concatenate([_tokens(chunk.sequence, chunk.start, chunk.end) for chunk in batch.chunks])
    samples = lasts[[chunk.samples for chunk in batch.chunks]] - 1
    return StepInputs(
        input_ids=torch.from_numpy(token_ids.astype(np.int64)).unsqueeze(0).to(device),
        position_ids=torch.from_numpy(positions).unsqueeze(0).to(device),
        rows=cache.rows_of_slots(torch.from_numpy(slots).to(device)),
        sample_positions=torch.from_numpy(samples).to(device),
        cache=cache,
        offload=offload,
        long_chunks=long_chunks,
        kernel=kernel,
        paged_tokens=paged_tokens,
        decode_groups=decode_groups,
        varlen=_varlen(lengths, starts + lengths, tables, cache, device),
    )


def _varlen(
    lengths: np.ndarray, ends: np.ndarray, tables: np.ndarray, cache: KVCache, device: torch.device
) -> PagedVarlen | None:
    if cuda_attention.is_available(cache.layout.dtype, device, cache.layout.head_dim):
        return None
    return PagedVarlen(lengths, ends, tables, cache.block_tokens, device)


def _tables(batch: Batch, block_tokens: int) -> np.ndarray:
    """Blocks in use by each chunk's sequence: int64 [num_chunks, widest], padded with block 0."""
    used = [-(-chunk.end // block_tokens) for chunk in batch.chunks]
    tables = np.zeros((len(used), max(used)), dtype=np.int64)
    for row, (chunk, count) in enumerate(zip(batch.chunks, used, strict=True)):
        tables[row, :count] = chunk.sequence.block_table.device[:count]
    return tables


def _tokens(sequence: Sequence, start: int, end: int) -> np.ndarray | list[int]:
    """Token ids at positions [start, end) of prompt and output."""
    num_prompt = sequence.num_prompt_tokens
    if start >= num_prompt:
        return sequence.output_token_ids[start - num_prompt : end - num_prompt]
    prompt = np.asarray(sequence.request.prompt_token_ids[start:end])
    if end <= num_prompt:
        return prompt
    return np.concatenate([prompt, np.asarray(sequence.output_token_ids[: end - num_prompt])])


def _group(
    tokens: np.ndarray, positions: np.ndarray, tables: np.ndarray, block_tokens: int, device: torch.device
) -> list[DecodeGroup]:
    """Split single-token chunks, longest first, into groups whose padding stays small."""
    order = np.argsort(-positions, kind="stable")
    tokens, positions, tables = tokens[order], positions[order], tables[order]
    widths = positions // block_tokens + 1
    groups, first = [], 0
    while first < len(tokens):
        sizes = np.arange(1, len(tokens) - first + 1)
        padded = widths[first] * sizes <= _GROUP_PADDING * np.cumsum(widths[first:])
        size = int(np.argmin(padded)) or len(padded)
        rows = slice(first, first + size)
        groups.append(
            DecodeGroup(
                torch.from_numpy(tokens[rows]).to(device),
                torch.from_numpy(positions[rows]).to(device),
                torch.from_numpy(tables[rows, : widths[first]].copy()).to(device),
            )
        )
        first += size
    return groups
