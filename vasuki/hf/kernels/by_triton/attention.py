"""Attention over paged blocks by Triton kernels, on a GPU: whatever a layer wants, over blocks of any size.

    tile       successive tokens of one chunk; with the heads that share a KV head they are the rows of one program
    span       keys that a program takes at once, each found by its sequence's block table
    split      a part of a tile's keys: where few tiles would leave most of the card idle, several programs share one

The softmax is accumulated online, span by span, and splits are merged by their sums (FlashAttention-2, arXiv
2307.08691, section 3.1; FlashDecoding). The plain twin is `attention.plain_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vasuki.hf.kernels.by_triton.float8 import factors, kept, read, to_read
from vasuki.hf.kernels.by_triton.launch import launch
from vasuki.hf.kernels.float8 import UNSCALED, Scales, indexable

# By the bytes of a number: queries of a program (tokens times the heads that share a KV head), and numbers of its keys
# in a span. With what it prefetches they fit the 99 KiB that a program has on the smallest of these cards (sm_86).
_TILE_ROWS = {2: 64, 4: 16}
_SPAN_NUMBERS = {2: 2**13, 4: 2**12}
# Where a program may have 227 KiB (sm_90), larger tiles read keys half as often. With fewer warps their sums spill.
_LARGE_ROWS, _LARGE_WARPS, _LARGE_STAGES = 128, 8, 3
_MOST_LARGE_BYTES = 256  # of a head
_SPANS = (16, 64)  # tokens, least and most
_LEAST_ROWS = 16  # that the card's matrix units take
# Of a tile of few rows: programs of one warp, many on a processor, that fetch several spans ahead wait for memory
# least. On an H200 they read KV at 98 % of a long copy's rate (256 rows of 1,024 tokens, heads of 128).
_SHORT_SPAN, _SHORT_STAGES = 16, 5
_MOST_SHORT_BYTES = 512  # of a head: several spans ahead fit a processor's shared memory for several programs
_LOG2_E = tl.constexpr(1.4426950408889634)
_PROGRAMS = 264  # that fill a large card twice
_SPLIT_TOKENS = 256  # of context at least in a split, or merging takes longer than it saves
_MOST_SPLITS = 16


class TileAttention:
    """Calls the kernels on torch tensors, as `kernels.paged_attention.PagedKernel` does on a CPU.

    Args:
        heads_per_kv_head: query heads that share a KV head; the most of any layer.
        dtype: of queries.
        large_tiles: whether the card has room for them, see `takes_large_tiles`.
    """

    def __init__(self, heads_per_kv_head: int, dtype: torch.dtype, large_tiles: bool = False) -> None:
        self._large_tiles = large_tiles
        rows = _LARGE_ROWS if large_tiles else _TILE_ROWS[dtype.itemsize]
        self.tile_tokens = self.output_tile_tokens = max(1, rows // triton.next_power_of_2(heads_per_kv_head))

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: torch.Tensor,
        cache: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> None:
        """Store keys and values `[num_tokens, num_kv_heads, head_dim]`. Its plain twin is `KVCache.write`."""
        tokens, num_kv_heads, head_dim = keys.shape
        launch(
            _write, (tokens,),
            keys, values, rows, indexable(cache), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            *factors(scales),
            BLOCK_TOKENS=cache.shape[2], KV_HEADS=num_kv_heads, DIM=head_dim,
            HEADS_PADDED=triton.next_power_of_2(num_kv_heads), DIM_PADDED=triton.next_power_of_2(head_dim),
        )  # fmt: skip

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
        scales: Scales = UNSCALED,
    ) -> None:
        """Serve `tiles` of the packed `query`, writing their rows of `out`.

        Args:
            query: `[num_tokens, num_heads, head_dim]`, as is `out`.
            cache: `[num_blocks, 2, block_tokens, num_kv_heads, head_dim]`, as in `KVCache.layers`.
            tiles: int64 `[count, 5]`, as `PagedTiles` has them.
            longest: most tokens of a tile, or of one that may take its place in a recorded step.
            tables: int64 `[num_chunks, width]`, blocks in the order of positions.
            sinks: `[num_heads]`, one more logit in each softmax, which takes weight and gives no value.
            window: a token sees itself and the window - 1 tokens before it; None for all of them.
            scaling: of the scores.
            softcap: scores are squashed to (-softcap, softcap).
            out: contiguous.
            scales: of what is in the cache.
        """
        _, _, block_tokens, num_kv_heads, head_dim = cache.shape
        group = query.shape[1] // num_kv_heads
        context = tables.shape[1] * block_tokens  # of a tile at most
        if window is not None:
            context = min(context, window + longest)
        splits = num_splits(len(tiles) * num_kv_heads, context)
        partial, sums = out, out
        if splits > 1:
            partial = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
            sums = torch.empty((splits, 2, *out.shape[:2]), dtype=torch.float32, device=out.device)
        dim_padded = max(16, triton.next_power_of_2(head_dim))
        # In a step with both, single tokens by programs made for them.
        for tokens in dict.fromkeys((longest, 1)):
            launch(
                _attend, (len(tiles), num_kv_heads, splits),
                query, to_read(cache), tiles, tables, query if sinks is None else sinks, partial, sums,
                query.stride(0), query.stride(1), tables.stride(0), len(out), splits,
                scaling * scales.key, softcap or 1.0, window or 0, scales.value,
                BLOCK_TOKENS=block_tokens, KV_HEADS=num_kv_heads, GROUP=group, DIM=head_dim, DIM_PADDED=dim_padded,
                SPLIT=splits > 1, SINGLE=tokens == 1, SINKS=sinks is not None, SOFTCAP=softcap is not None,
                WINDOW=window is not None,
                **_sizes(tokens * group, dim_padded, query.itemsize, self._large_tiles),
            )  # fmt: skip
        if splits > 1:
            launch(
                _merge, tuple(out.shape[:2]),
                partial, sums, out, len(out), splits, HEADS=out.shape[1], DIM=head_dim,
                DIM_PADDED=triton.next_power_of_2(head_dim), MOST_SPLITS=_MOST_SPLITS,
            )  # fmt: skip


def takes_large_tiles(generation: tuple[int, int], head_dim: int, dtype: torch.dtype) -> bool:
    """Whether a card of that compute capability has room for large tiles of heads up to `head_dim`."""
    head_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    return generation == (9, 0) and dtype.itemsize == 2 and head_bytes <= _MOST_LARGE_BYTES


def _sizes(rows: int, dim_padded: int, number_bytes: int, large_tiles: bool) -> dict[str, int]:
    """Of a program with as many rows, and how it is compiled."""
    rows = max(_LEAST_ROWS, triton.next_power_of_2(rows))
    if rows == _LEAST_ROWS and dim_padded * number_bytes <= _MOST_SHORT_BYTES:
        return {"ROWS": rows, "SPAN": _SHORT_SPAN, "num_warps": 1, "num_stages": _SHORT_STAGES}
    span = min(max(_SPAN_NUMBERS[number_bytes] // dim_padded, _SPANS[0]), _SPANS[1])
    if large_tiles and rows == _LARGE_ROWS:  # many heads may share one without
        return {"ROWS": rows, "SPAN": span, "num_warps": _LARGE_WARPS, "num_stages": _LARGE_STAGES}
    return {"ROWS": rows, "SPAN": span}


def num_splits(programs: int, context: int) -> int:
    """Programs that share a tile's keys: a power of two, so that few kernels are compiled."""
    wanted = min(_PROGRAMS // max(1, programs), context // _SPLIT_TOKENS, _MOST_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


@triton.jit
def _write(
    keys, values, rows, cache, key_token, key_head, value_token, value_head, key_factor, value_factor,
    BLOCK_TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Store a token's keys and values in its row of the cache."""
    token = tl.program_id(0)
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    there = (head < KV_HEADS) & (dim < DIM)
    to = cache + tl.load(rows + token) * KV_HEADS * DIM + head * DIM + dim
    key = tl.load(keys + token * key_token + head * key_head + dim, mask=there)
    value = tl.load(values + token * value_token + head * value_head + dim, mask=there)
    tl.store(to, kept(key, key_factor, cache), mask=there)
    tl.store(to + BLOCK_TOKENS * KV_HEADS * DIM, kept(value, value_factor, cache), mask=there)


# Numbers that change from step to step are not compiled for: a kernel is there once it has been compiled once.
_STEP = ["table_width", "num_tokens", "splits", "window"]


@triton.jit(do_not_specialize=_STEP)
def _attend(
    query, cache, tiles, tables, sinks, out, sums,
    query_token, query_head, table_width, num_tokens, splits, scaling, softcap, window, value_scale,
    BLOCK_TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr, SINGLE: tl.constexpr,
    SINKS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend over one split of one tile's keys, for the query heads of one KV head. Tiles of single tokens and of
    several are served by launches of their own."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(tiles + 5 * tile)
    count = tl.load(tiles + 5 * tile + 1)
    if (count == 1) != SINGLE:
        return
    start = tl.load(tiles + 5 * tile + 2)
    table = tables + tl.load(tiles + 5 * tile + 3) * table_width

    row = tl.arange(0, ROWS)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    dim = tl.arange(0, DIM_PADDED)
    is_row, is_dim = token < count, dim < DIM
    where = query + (first + token)[:, None] * query_token + head[:, None] * query_head + dim[None, :]
    q = tl.load(where, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    q_position = start + token

    # Keys [begin, end) of the context, of which this program has every span from its own on to that of the next split.
    begin = start * 0
    if WINDOW:
        begin = tl.maximum(start - window + 1, 0) // SPAN * SPAN
    end = start + count
    spans = (tl.cdiv(end - begin, SPAN) + splits - 1) // splits
    own = begin + split * spans * SPAN
    end = tl.minimum(end, own + spans * SPAN)
    whole = own  # up to here each row sees all keys of each span
    if not WINDOW:
        whole = tl.maximum(own, tl.minimum(end, start + 1) // SPAN * SPAN)

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # of the first split
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        most, total = tl.where(split == 0, sink, most), tl.where(split == 0, 1.0, total)
    summed = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for from_key in range(own, whole, SPAN):
        most, total, summed = _take_span(
            q, q_position, cache, table, kv_head, from_key, end, scaling, softcap, window, most, total, summed,
            BLOCK_TOKENS, KV_HEADS, DIM, DIM_PADDED, SPAN, SOFTCAP, WINDOW, False,
        )  # fmt: skip
    for from_key in range(whole, end, SPAN):
        most, total, summed = _take_span(
            q, q_position, cache, table, kv_head, from_key, end, scaling, softcap, window, most, total, summed,
            BLOCK_TOKENS, KV_HEADS, DIM, DIM_PADDED, SPAN, SOFTCAP, WINDOW, True,
        )  # fmt: skip

    summed = summed * value_scale
    is_out = is_row[:, None] & is_dim[None, :]
    place = ((first + token) * (KV_HEADS * GROUP) + head)[:, None] * DIM + dim[None, :]
    if not SPLIT:
        divisor = tl.where(is_row, total, 1.0)
        tl.store(out + place, (summed / divisor[:, None]).to(out.dtype.element_ty), mask=is_out)
    else:
        num_rows = num_tokens * KV_HEADS * GROUP
        tl.store(out + split * num_rows * DIM + place, summed, mask=is_out)
        of_row = sums + 2 * split * num_rows + (first + token) * (KV_HEADS * GROUP) + head
        tl.store(of_row, most, mask=is_row)
        tl.store(of_row + num_rows, total, mask=is_row)


@triton.jit
def _take_span(
    q, q_position, cache, table, kv_head, from_key, end, scaling, softcap, window, most, total, summed,
    BLOCK_TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    SPAN: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys of one span to each row's softmax; powers of two are what the card computes. `MASKED` where a row
    may not see all of them."""
    position, dim = from_key + tl.arange(0, SPAN), tl.arange(0, DIM_PADDED)
    is_key = position < end
    if BLOCK_TOKENS % SPAN == 0:  # it lies in one block
        block = tl.load(table + from_key // BLOCK_TOKENS)
    elif MASKED:
        block = tl.load(table + position // BLOCK_TOKENS, mask=is_key, other=0)
    else:
        block = tl.load(table + position // BLOCK_TOKENS)
    slot = (block * 2 * BLOCK_TOKENS + position % BLOCK_TOKENS) * KV_HEADS + kv_head
    lies = cache + slot[:, None] * DIM + dim[None, :]
    if MASKED or DIM != DIM_PADDED:
        there = is_key[:, None] & (dim < DIM)[None, :]
        k = read(tl.load(lies, mask=there, other=0.0), q)
        v = read(tl.load(lies + BLOCK_TOKENS * KV_HEADS * DIM, mask=there, other=0.0), q)
    else:
        k = read(tl.load(lies), q)
        v = read(tl.load(lies + BLOCK_TOKENS * KV_HEADS * DIM), q)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if SOFTCAP:
        scores = (2 * tl.sigmoid(2 * scores * scaling / softcap) - 1) * (softcap * _LOG2_E)
    else:
        scores = scores * (scaling * _LOG2_E)
    if MASKED:
        seen = is_key[None, :] & (position[None, :] <= q_position[:, None])
        if WINDOW:
            seen = seen & (position[None, :] > q_position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(most, tl.max(scores, 1))
    safe = tl.where(larger == float("-inf"), 0.0, larger)  # of a row that has seen nothing yet
    weights, shrunk = tl.exp2(scores - safe[:, None]), tl.exp2(most - safe)
    total = total * shrunk + tl.sum(weights, 1)
    summed = summed * shrunk[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="tf32x3")
    return larger, total, summed


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _merge(
    partial, sums, out, num_tokens, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a token's head into one."""
    row = tl.program_id(0) * HEADS + tl.program_id(1)
    num_rows = num_tokens * HEADS
    split, dim = tl.arange(0, MOST_SPLITS), tl.arange(0, DIM_PADDED)
    is_split = split < splits
    most = tl.load(sums + 2 * split * num_rows + row, mask=is_split, other=float("-inf"))
    total = tl.load(sums + (2 * split + 1) * num_rows + row, mask=is_split, other=0.0)
    share = tl.exp2(most - tl.max(most, 0))
    there = is_split[:, None] & (dim < DIM)[None, :]
    parts = tl.load(partial + (split[:, None] * num_rows + row) * DIM + dim[None, :], mask=there, other=0.0)
    merged = tl.sum(parts * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + row * DIM + dim, merged.to(out.dtype.element_ty), mask=dim < DIM)
