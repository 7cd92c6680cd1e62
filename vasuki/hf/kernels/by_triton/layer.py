"""A layer's small operators as Triton kernels, each for several of torch's: norms of heads and rotation with the write
into the KV cache, the gate of an MLP, and norms that torch has none for.

On a GPU a small kernel takes as long as its launch, however little it computes. Products stay torch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vasuki.hf.kernels.by_triton.float8 import factors, kept
from vasuki.hf.kernels.by_triton.launch import launch
from vasuki.hf.kernels.float8 import FLOAT8, LARGEST, SMALLEST_ROW, UNSCALED, Scales, indexable

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_COLUMNS = 1024  # of an MLP's width in one program
_ROUNDED_COLUMNS = 2048  # of a row at a time
_LARGEST, _SMALLEST_ROW = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_ROW)


def turn_and_store(
    heads: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    cache: torch.Tensor,
    rotated: int,
    norms: tuple[torch.Tensor, torch.Tensor, float, float] | None = None,
    scales: Scales = UNSCALED,
) -> torch.Tensor:
    """Norm and rotate queries and keys, and put keys and values into the cache.

    Its plain twins are `fused.attention.FusedAttention.norm`, `fused.by_torch.rotate` and `KVCache.write`.

    Args:
        heads: `[num_tokens, num_heads + 2 num_kv_heads, head_dim]`, contiguous: queries, keys, values.
        num_heads: of queries.
        cos: `[num_tokens, rotated]` of the angles, or half as many, by which both halves of a head turn.
        sin: likewise.
        rows: int64 `[2, num_tokens]`, see `KVCache.rows_of_slots`.
        cache: `[num_blocks, 2, block_tokens, num_kv_heads, head_dim]`.
        rotated: numbers of a head that turn; those behind them stay.
        norms: of heads before they turn: weights `[head_dim]` for queries and for keys, what is added to the mean
            square, and what to the weights.
        scales: of what is in the cache.

    Returns:
        The queries, `[num_tokens, num_heads, head_dim]`.
    """
    tokens, all_heads, head_dim = heads.shape
    cos, sin = cos.contiguous(), sin.contiguous()  # transformers 5.17 gives some transposed
    query = torch.empty((tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    half, rest = rotated // 2, head_dim - rotated
    query_norm, key_norm, eps, offset = norms or (heads, heads, 0.0, 0.0)
    launch(
        _turn_and_store, (tokens,),
        heads, cos, sin, rows, indexable(cache), query, query_norm, key_norm, eps, offset, *factors(scales),
        rows.stride(0),
        HEADS=num_heads, KV_HEADS=(all_heads - num_heads) // 2, DIM=head_dim, HALF=half, REST=rest,
        OTHER_HALF=cos.shape[-1] - half, NORMS=norms is not None,
        HEADS_PADDED=triton.next_power_of_2(all_heads), HALF_PADDED=triton.next_power_of_2(half),
        REST_PADDED=triton.next_power_of_2(max(1, rest)),
    )  # fmt: skip
    return query


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Return `x / rms(x) * (weight + offset)`, computed in float32 and rounded once.

    Its plain twin is in `fused.by_torch.OffsetNorm`.

    Args:
        x: `[..., width]`.
        weight: `[width]`.
        eps: added to the mean square.
        offset: added to the weight.
    """
    x = x.contiguous()
    width, output = x.shape[-1], torch.empty_like(x)
    launch(
        _normed, (output.numel() // width,),
        x, weight, output, eps, offset, WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width),
    )  # fmt: skip
    return output


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in 8 bits, and their scales.

    Its plain twin is `kernels.float8.rounded_rows`.
    """
    rows = rows.contiguous()
    count, width = rows.shape
    numbers = torch.empty(rows.shape, dtype=FLOAT8, device=rows.device)
    scales = torch.empty((count, 1), dtype=torch.float32, device=rows.device)
    launch(_round_rows, (count,), rows, indexable(numbers), scales, WIDTH=width, COLUMNS=_ROUNDED_COLUMNS)
    return numbers, scales


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


@triton.jit(do_not_specialize=["values_after"])  # as many as there are tokens
def _turn_and_store(
    heads, cos, sin, rows, cache, query, query_norm, key_norm, eps, offset, key_factor, value_factor, values_after,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    OTHER_HALF: tl.constexpr, NORMS: tl.constexpr,
    HEADS_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    """Norm and turn all heads of one token, and store its keys and values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PADDED)[:, None]
    is_query, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    turns = is_query | is_key
    from_head = heads + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    to_query = query + (token * HEADS + head) * DIM
    to_key = cache + (tl.load(rows + token) * KV_HEADS + head - HEADS) * DIM
    to_value = cache + (tl.load(rows + values_after + token) * KV_HEADS + head - HEADS - KV_HEADS) * DIM

    dim, rest = tl.arange(0, HALF_PADDED)[None, :], tl.arange(0, REST_PADDED)[None, :]
    is_dim, is_rest = dim < HALF, rest < REST
    there, left = (turns | is_value) & is_dim, (turns | is_value) & is_rest
    first = tl.load(from_head + dim, mask=there, other=0.0).to(tl.float32)
    second = tl.load(from_head + HALF + dim, mask=there, other=0.0).to(tl.float32)
    same = tl.load(from_head + 2 * HALF + rest, mask=left, other=0.0).to(tl.float32)
    if NORMS:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(same * same, 1)
        scale = 1 / tl.sqrt(squares / DIM + eps)[:, None]
        first = _scaled(first, scale, query_norm + dim, key_norm + dim, offset, is_dim, is_query, is_key, heads)
        behind = HALF + dim
        second = _scaled(second, scale, query_norm + behind, key_norm + behind, offset, is_dim, is_query, is_key, heads)
        behind = 2 * HALF + rest
        same = _scaled(same, scale, query_norm + behind, key_norm + behind, offset, is_rest, is_query, is_key, heads)
    angles = OTHER_HALF + HALF
    cos_1 = tl.load(cos + token * angles + dim, mask=is_dim, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + token * angles + dim, mask=is_dim, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + token * angles + OTHER_HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + token * angles + OTHER_HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
    turned_1 = tl.where(turns, first * cos_1 - second * sin_1, first)
    turned_2 = tl.where(turns, second * cos_2 + first * sin_2, second)
    tl.store(to_query + dim, turned_1.to(query.dtype.element_ty), mask=is_query & is_dim)
    tl.store(to_query + HALF + dim, turned_2.to(query.dtype.element_ty), mask=is_query & is_dim)
    # A key is rounded as the model rounds it before the cache rounds it once more.
    turned_1, turned_2 = turned_1.to(heads.dtype.element_ty), turned_2.to(heads.dtype.element_ty)
    tl.store(to_key + dim, kept(turned_1, key_factor, cache), mask=is_key & is_dim)
    tl.store(to_key + HALF + dim, kept(turned_2, key_factor, cache), mask=is_key & is_dim)
    tl.store(to_value + dim, kept(turned_1, value_factor, cache), mask=is_value & is_dim)
    tl.store(to_value + HALF + dim, kept(turned_2, value_factor, cache), mask=is_value & is_dim)
    if REST:
        tl.store(to_query + 2 * HALF + rest, same.to(query.dtype.element_ty), mask=is_query & is_rest)
        tl.store(to_key + 2 * HALF + rest, kept(same, key_factor, cache), mask=is_key & is_rest)
        tl.store(to_value + 2 * HALF + rest, kept(same, value_factor, cache), mask=is_value & is_rest)


@triton.jit
def _scaled(x, scale, query_norm, key_norm, offset, there, is_query, is_key, heads):
    """Values of some heads; queries and keys are normed, and rounded as the model rounds them."""
    of_query, of_key = tl.load(query_norm, mask=there, other=0.0), tl.load(key_norm, mask=there, other=0.0)
    y = x * scale * (tl.where(is_query, of_query, of_key).to(tl.float32) + offset)
    return tl.where(is_query | is_key, y.to(heads.dtype.element_ty).to(tl.float32), x)


@triton.jit
def _normed(x, weight, output, eps, offset, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr):
    """Norm one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PADDED)
    there = column < WIDTH
    numbers = tl.load(x + row * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=there, other=0.0).to(tl.float32) + offset
    mean = tl.sum(numbers * numbers, 0) / WIDTH
    y = numbers / tl.sqrt(mean + eps) * scale
    tl.store(output + row * WIDTH + column, y.to(output.dtype.element_ty), mask=there)


@triton.jit
def _round_rows(rows, numbers, scales, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Round one row, once its largest number is known."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    sizes = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        x = tl.load(rows + row * WIDTH + first + columns, mask=first + columns < WIDTH, other=0.0)
        sizes = tl.maximum(sizes, tl.abs(x.to(tl.float32)))
    largest = tl.maximum(tl.max(sizes, 0), _SMALLEST_ROW)
    factor = tl.div_rn(_LARGEST * 1.0, largest)
    for first in range(0, WIDTH, COLUMNS):
        there = first + columns < WIDTH
        x = tl.load(rows + row * WIDTH + first + columns, mask=there, other=0.0)
        tl.store(numbers + row * WIDTH + first + columns, kept(x, factor, numbers), mask=there)
    tl.store(scales + row, tl.div_rn(largest, _LARGEST * 1.0))


@triton.jit
def _gated(gate_up, output, width, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr):
    """Gate some columns of one row."""
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
