"""Plain twins of what only a GPU has: torch's variable-length attention kernel, chunks that attend by it, graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vasuki.base.arrays import Ints
from vasuki.hf.attention.plain_attention import Variant, attend_eagerly
from vasuki.hf.cuda.step_graphs import Pause, Replay
from vasuki.hf.kernels.varlen import PAGE_TOKENS, PagedVarlen
from vasuki.hf.kv.kv_cache import KVCache


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    num_splits: int,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """What torch documents `varlen_attn` to compute, chunk by chunk, with the kernel's own checks of its arguments."""
    assert num_splits == 1
    assert enable_gqa or query.shape[1] == key.shape[-2]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q.is_contiguous()
    assert cu_seq_k.is_contiguous()
    assert int(cu_seq_q[-1]) == len(query)
    assert max_q == int(cu_seq_q.diff().max())
    assert max_k == int(cu_seq_k.diff().max())
    left, right = window_size
    assert right == 0 or (window_size == (-1, -1) and max_q == 1)
    outputs = []
    for row in range(len(cu_seq_q) - 1):
        if block_table is None:
            keys, values = (tensor[cu_seq_k[row] : cu_seq_k[row + 1]] for tensor in (key, value))
        else:
            assert seqused_k is not None
            assert block_table.dtype == seqused_k.dtype == torch.int32
            assert key.stride(-1) == 1
            assert key.shape[1] % PAGE_TOKENS == 0
            blocks = block_table[row, : -(-int(seqused_k[row]) // key.shape[1])].long()  # what lies beyond is not read
            keys, values = (each.index_select(0, blocks).flatten(0, 1)[: seqused_k[row]] for each in (key, value))
        variant = Variant(scaling=scale, window=None if left < 0 else left + 1)
        outputs.append(attend_eagerly(query[cu_seq_q[row] : cu_seq_q[row + 1]], keys, values, variant))
    return torch.cat(outputs)


def paged_varlen(lengths: Ints, ends: Ints, seen: Ints, tables: Ints, cache: KVCache) -> PagedVarlen:
    """Stand in for `chunks._varlen` on a CPU, so that steps there attend as on CUDA."""
    return PagedVarlen(lengths, ends, tables, cache.block_tokens, cache.device, True, plain_varlen, seen)


def as_it_is(compute: Callable[[Pause], object]) -> Replay:
    """Stand in for what records on a GPU: it computes again, and what comes between stretches where it pauses."""
    return lambda: compute(lambda between: between())
