"""Packed attention on CUDA, by the variable-length FlashAttention kernel that comes with torch.

    query tokens   a7 | b12 | c4 c5 c6 c7        cu_seq_q   0 1 | 0 4       (the leading single tokens are a call of
    context        a0..a7 | b0..b12 | c0..c7     used_k     8 13 | 8         their own: it reads each KV head once)

The kernel aligns the end of a chunk with the end of its context, which is what the engine's chunks are. Keys and values
reach it in one of two ways:

    paged     it walks the block table itself. Needs torch 2.12 and blocks of a multiple of `PAGE_TOKENS` tokens.
    gathered  the contexts are copied end to end first, twice the traffic and more, for any size of blocks.

Never more than one split: with a block table, split calls of FlashAttention-2 leave rows unwritten (pytorch issue
194167), and with one split a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vasuki.hf.kernels.transfer import Shapes, to_device

PAGE_TOKENS = 256  # the paged kernel takes blocks of a multiple of it (FlashAttention-2's largest tile of keys)
_MOST_HEAD_DIM = 256
_AMPERE = (8, 0)

Varlen = Callable[..., Any]  # a tensor, or with more where more is asked for


def takes(head_dim: int) -> bool:
    """Whether the kernel is made for heads of that size."""
    return head_dim % 8 == 0 and head_dim <= _MOST_HEAD_DIM


def why_unavailable(dtype: torch.dtype, device: torch.device, head_dim: int) -> str:
    """Empty if the kernel serves such a model, else what is in the way."""
    if device.type != "cuda":
        return f"the kernel runs on CUDA, not on {device.type}"
    if torch.version.hip is not None:
        return "the kernel is not checked on ROCm"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not takes(head_dim):
        return f"the kernel takes heads of a multiple of 8 up to {_MOST_HEAD_DIM} dimensions, not {head_dim}"
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return "the kernel needs compute capability 8.0"
    if not {"scale", "window_size"} <= _parameters():
        return f"torch {torch.__version__} has no varlen_attn with scale and window_size"
    return ""


def can_page(block_tokens: int) -> bool:
    """Whether the kernel of this torch walks tables of such blocks itself."""
    return block_tokens % PAGE_TOKENS == 0 and {"block_table", "seqused_k", "num_splits"} <= _parameters()


def preferred_block_tokens(dtype: torch.dtype, device: torch.device, head_dim: int) -> int | None:
    """Tokens of a block for which the kernel pages; None where it does not, and any size is as good."""
    return PAGE_TOKENS if not why_unavailable(dtype, device, head_dim) and can_page(PAGE_TOKENS) else None


@dataclass(frozen=True, slots=True)
class _Call:
    """Chunks that go to the kernel together."""

    first: int  # their tokens are [first, last) of the packed batch
    last: int
    cu_seq_q: torch.Tensor  # int32 [chunks + 1]
    cu_seq_k: torch.Tensor  # int32 [chunks + 1]
    used_k: torch.Tensor  # int32 [chunks], context that each sees
    table: torch.Tensor  # int32 [chunks, width]
    max_q: int
    max_k: int
    rows: torch.Tensor | None  # int64 [total context], where each key lies in the cache; None if the kernel pages


class PagedVarlen:
    """Attention of one step's chunks, called for each layer.

    Args:
        lengths: `[chunks]` tokens of each chunk, in the order of the packed batch.
        ends: `[chunks]` context of each after the chunk, or of the longest that may take its place.
        tables: `[chunks, width]` blocks of each, padded with any block.
        block_tokens: tokens of a block.
        device: where query and cache are.
        paged: let the kernel walk the tables; by default wherever it can.
        varlen: the kernel, `torch.nn.attention.varlen.varlen_attn` unless given.
        seen: `[chunks]` context that each sees until others are told, where that is not all.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        ends: np.ndarray,
        tables: np.ndarray,
        block_tokens: int,
        device: torch.device,
        paged: bool | None = None,
        varlen: Varlen | None = None,
        seen: np.ndarray | None = None,
    ) -> None:
        self.paged = can_page(block_tokens) if paged is None else paged
        self._block_tokens = block_tokens
        self._varlen = varlen or _torch_varlen()
        self._device = device
        singles = int(np.argmax(lengths != 1)) if (lengths != 1).any() else len(lengths)
        arrays = lengths, ends, ends if seen is None else seen, tables
        self._calls = [
            self._call(int(lengths[:first].sum()), *(array[first:last] for array in arrays))
            for first, last in ((0, singles), (singles, len(lengths)))
            if last > first
        ]

    # --- in memory that stays, where all are single tokens and the kernel pages --------------------------------------

    def shapes(self) -> Shapes:
        """What it has there."""
        [call] = self._calls
        return {"used_k": (tuple(call.used_k.shape), np.int32), "table": (tuple(call.table.shape), np.int32)}

    def move_to(self, there: Mapping[str, torch.Tensor], padding_block: int) -> None:
        """Attend from now on as is said there, where tables are `padding_block` alone until others come."""
        [call] = self._calls
        self._calls = [replace(call, used_k=there["used_k"].fill_(1), table=there["table"].fill_(padding_block))]

    def write(
        self, here: Mapping[str, np.ndarray], chunks: Sequence[np.ndarray], tables: np.ndarray, padding_block: int
    ) -> int:
        """Say what single tokens see: `chunks` has the lengths and starts of theirs at 1 and 2. All others see the
        first token of `padding_block`. Returns how many rows of `table` that takes."""
        (count, width), (_, lengths, starts, *_) = tables.shape, chunks
        here["used_k"][:count], here["used_k"][count:] = starts + lengths, 1
        here["table"][:count, :width], here["table"][count:, 0] = tables, padding_block
        return len(here["table"])

    def at(self, slots: torch.Tensor) -> PagedVarlen:
        """The same with each block `b` at `slots[b]`, int64 `[num_blocks]`."""

        def moved(call: _Call) -> _Call:
            table = slots[call.table.long()].to(torch.int32)
            if call.rows is None:
                return replace(call, table=table)
            size = 2 * self._block_tokens
            return replace(call, table=table, rows=slots[call.rows // size] * size + call.rows % size)

        elsewhere = copy.copy(self)
        elsewhere._calls = [moved(call) for call in self._calls]
        return elsewhere

    def __call__(
        self, query: torch.Tensor, cache_layer: torch.Tensor, scaling: float, window: int | None = None
    ) -> torch.Tensor:
        """Attend. The step's keys and values are in the cache already. Soft caps and sinks are beyond the kernel.

        Args:
            query: `[num_tokens, num_heads, head_dim]`, as is what is returned.
            cache_layer: as in `KVCache.layers`.
            scaling: of the scores.
            window: a token sees itself and the window - 1 tokens before it; None for all of them.
        """
        parts = [(call, query[call.first : call.last]) for call in self._calls]
        outputs = [self._attend(call, part, cache_layer, scaling, window) for call, part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(
        self, call: _Call, query: torch.Tensor, layer: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        if window is not None and window >= call.max_k:  # it covers every context
            window = None
        window_size = (-1, 0) if window is None else (window - 1, 0)
        # A single last token sees everything; unmasked, the kernel serves its heads together.
        if call.max_q == 1 and window is None:
            window_size = (-1, -1)
        options: dict[str, Any] = {"scale": scaling, "window_size": window_size}
        supported = _parameters_of(self._varlen)
        if "enable_gqa" in supported:  # without it the number of heads is not checked, and may differ
            options["enable_gqa"] = query.shape[1] != layer.shape[3]
        if "num_splits" in supported:
            options["num_splits"] = 1
        if call.rows is None:
            keys, values = layer.unbind(1)
            options |= {"seqused_k": call.used_k, "block_table": call.table}
        else:
            flat = layer.view(-1, *layer.shape[3:])
            keys = flat.index_select(0, call.rows)
            values = flat.index_select(0, call.rows + self._block_tokens)
        output: torch.Tensor = self._varlen(
            query, keys, values, call.cu_seq_q, call.cu_seq_k, call.max_q, call.max_k, **options
        )
        return output

    def _call(self, first: int, lengths: np.ndarray, ends: np.ndarray, seen: np.ndarray, tables: np.ndarray) -> _Call:
        cu_seq_q, cu_seq_k = _cumulative(lengths), _cumulative(ends)
        on_device_q, on_device_k, used_k, table = to_device(
            self._device, cu_seq_q, cu_seq_k, seen.astype(np.int32), tables.astype(np.int32).reshape(-1)
        )
        table = table.view(tables.shape)
        return _Call(
            first=first,
            last=first + int(cu_seq_q[-1]),
            cu_seq_q=on_device_q,
            cu_seq_k=on_device_k,
            used_k=used_k,
            table=table,
            max_q=int(lengths.max()),
            max_k=int(ends.max()),
            rows=None if self.paged else self._rows(table, on_device_k, used_k, int(cu_seq_k[-1])),
        )

    def _rows(self, table: torch.Tensor, cu_seq_k: torch.Tensor, used_k: torch.Tensor, total: int) -> torch.Tensor:
        """Row of each context token's key in the `[num_blocks * 2 * block_tokens, ...]` view of a layer."""
        chunks = torch.arange(len(used_k), device=self._device)
        chunk = torch.repeat_interleave(chunks, used_k.long(), output_size=total)  # the size saves a synchronisation
        position = torch.arange(total, device=self._device) - cu_seq_k[chunk]
        block = table[chunk, position // self._block_tokens].long()
        return block * (2 * self._block_tokens) + position % self._block_tokens


def _cumulative(sizes: np.ndarray) -> np.ndarray:
    """`[n + 1]` int32 sums of the first 0 to n."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


@functools.cache
def _parameters_of(function: Varlen) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _parameters() -> frozenset[str]:
    """Names of the parameters of torch's function; none where there is no such function."""
    try:
        return _parameters_of(_torch_varlen())
    except ImportError:
        return frozenset()


def _torch_varlen() -> Varlen:
    from torch.nn.attention.varlen import varlen_attn  # registers operators, and is absent before torch 2.10

    return varlen_attn
