"""A layer's small operators as Triton kernels, each for several of torch's: rotation with the write into the KV cache,
and the gate of an MLP.

On a GPU a small kernel takes as long as its launch, however little it computes. Products stay torch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vasuki.hf.kernels.by_triton.launch import launch

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_COLUMNS = 1024  # of an MLP's width in one program


def turn_and_store(
    heads: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    cache: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, and put keys and values into the cache.

    Its plain twins are `fused.by_torch.rotate` and `KVCache.write`.

    Args:
        heads: `[num_tokens, num_heads + 2 num_kv_heads, head_dim]`, contiguous: queries, keys, values.
        num_heads: of queries.
        cos: `[num_tokens, rotated]` of the angles; what lies beyond them in a head stays.
        sin: likewise.
        rows: int64 `[2, num_tokens]`, see `KVCache.rows_of_slots`.
        cache: `[num_blocks, 2, block_tokens, num_kv_heads, head_dim]`.

    Returns:
        The queries, `[num_tokens, num_heads, head_dim]`.
    """
    tokens, all_heads, head_dim = heads.shape
    query = torch.empty((tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    half = cos.shape[-1] // 2
    launch(
        _turn_and_store, (tokens,),
        heads, cos, sin, rows, cache, query, cos.stride(0), sin.stride(0), rows.stride(0),
        HEADS=num_heads, KV_HEADS=(all_heads - num_heads) // 2, DIM=head_dim, HALF=half, REST=head_dim - 2 * half,
        HEADS_PADDED=triton.next_power_of_2(all_heads), HALF_PADDED=triton.next_power_of_2(half),
        REST_PADDED=triton.next_power_of_2(max(1, head_dim - 2 * half)),
    )  # fmt: skip
    return query


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return `activation(gate) * up`.

    Its plain twin is in `fused.by_torch.JoinedMLP`.

    Args:
        gate_up: `[..., 2 * width]`, contiguous: gate, then up.
        activation: of `ACTIVATIONS`.
    """
    width = gate_up.shape[-1] // 2
    output = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    rows = output.numel() // width
    grid = (rows, triton.cdiv(width, _COLUMNS))
    launch(_gated, grid, gate_up, output, width, ACTIVATION=activation, COLUMNS=_COLUMNS)
    return output


@triton.jit
def _turn_and_store(
    heads, cos, sin, rows, cache, query, cos_token, sin_token, values_after,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HEADS_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    """One token, all its heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PADDED)[:, None]
    is_query, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    turns = is_query | is_key
    from_head = heads + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    to_query = query + (token * HEADS + head) * DIM
    to_key = cache + (tl.load(rows + token) * KV_HEADS + head - HEADS) * DIM
    to_value = cache + (tl.load(rows + values_after + token) * KV_HEADS + head - HEADS - KV_HEADS) * DIM

    dim = tl.arange(0, HALF_PADDED)[None, :]
    is_dim = dim < HALF
    there = (turns | is_value) & is_dim
    first = tl.load(from_head + dim, mask=there, other=0.0).to(tl.float32)
    second = tl.load(from_head + HALF + dim, mask=there, other=0.0).to(tl.float32)
    cos_1 = tl.load(cos + token * cos_token + dim, mask=is_dim, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + token * sin_token + dim, mask=is_dim, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + token * cos_token + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + token * sin_token + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
    turned_1 = tl.where(turns, first * cos_1 - second * sin_1, first)
    turned_2 = tl.where(turns, second * cos_2 + first * sin_2, second)
    tl.store(to_query + dim, turned_1.to(query.dtype.element_ty), mask=is_query & is_dim)
    tl.store(to_query + HALF + dim, turned_2.to(query.dtype.element_ty), mask=is_query & is_dim)
    # A key is rounded as the model rounds it before the cache rounds it once more.
    kept_1, kept_2 = turned_1.to(heads.dtype.element_ty), turned_2.to(heads.dtype.element_ty)
    tl.store(to_key + dim, kept_1.to(cache.dtype.element_ty), mask=is_key & is_dim)
    tl.store(to_key + HALF + dim, kept_2.to(cache.dtype.element_ty), mask=is_key & is_dim)
    tl.store(to_value + dim, kept_1.to(cache.dtype.element_ty), mask=is_value & is_dim)
    tl.store(to_value + HALF + dim, kept_2.to(cache.dtype.element_ty), mask=is_value & is_dim)

    if REST:
        left = 2 * HALF + tl.arange(0, REST_PADDED)[None, :]
        is_left = left < DIM
        same = tl.load(from_head + left, mask=(turns | is_value) & is_left, other=0.0)
        tl.store(to_query + left, same, mask=is_query & is_left)
        tl.store(to_key + left, same.to(cache.dtype.element_ty), mask=is_key & is_left)
        tl.store(to_value + left, same.to(cache.dtype.element_ty), mask=is_value & is_left)


@triton.jit
def _gated(gate_up, output, width, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    x = tl.load(gate_up + 2 * row * width + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + column, mask=there, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:  # gelu by tanh, which is 2 sigmoid(2 x) - 1
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    # Rounded as torch rounds what it multiplies.
    y = y.to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * width + column, (y * up).to(output.dtype.element_ty), mask=there)
