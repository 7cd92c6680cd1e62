"""Tokens drawn on a GPU, all rows of a step in one launch. The plain twin is `vasuki.hf.sampler`.

A program has a row. It keeps nothing but the logits, which stay in a cache meanwhile, and computes each token's share
anew in every pass:

    top-k, top-p    the smallest share that is kept: three of its bits with each pass, by how many or by how much the
                    larger ones are. A sort would move each share and its place several times
    drawn           the first token up to which what is kept exceeds the row's number, summed in float64

It waits for nobody, and adds in the same order whatever its neighbours are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vasuki.hf.kernels.by_triton.launch import launch

_COLUMNS = 2048  # of a row at once
_NO_TOKEN = tl.constexpr(-1)
_NOWHERE = tl.constexpr(2**31 - 1)


def draw(
    logits: torch.Tensor,
    largest: torch.Tensor,
    settings: torch.Tensor,
    token_ids: torch.Tensor,
    by_count: bool,
    by_sum: bool,
) -> None:
    """Draw the tokens of some rows.

    Args:
        logits: `[rows, vocab_size]`, the tokens of a row side by side.
        largest: of each row, `[rows]`.
        settings: float64 `[6, drawn]`: the row, its temperature, k of top-k (0 for all), p of top-p, min-p, and the
            number in [0, 1) that decides.
        token_ids: int64 `[rows]`; of rows that have one (and not -1), it is replaced.
        by_count: whether any row has a k.
        by_sum: whether any row has a p below 1.
    """
    count, vocab_size = settings.shape[1], logits.shape[1]
    assert logits.stride(1) == 1
    launch(
        _draw, (count,),
        logits, largest, settings, token_ids, logits.stride(0), count, vocab_size,
        COLUMNS=_COLUMNS, BY_COUNT=by_count, BY_SUM=by_sum,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _draw(
    logits, largest, settings, token_ids, stride, count, vocab_size,
    COLUMNS: tl.constexpr, BY_COUNT: tl.constexpr, BY_SUM: tl.constexpr,
):  # fmt: skip
    """Draw the token of one row."""
    own = settings + tl.program_id(0)
    row = tl.load(own).to(tl.int64)
    if tl.load(token_ids + row) == _NO_TOKEN:
        return
    temperature = tl.load(own + count).to(tl.float32)
    min_p, number = tl.load(own + 4 * count).to(tl.float32), tl.load(own + 5 * count)
    most = tl.load(largest + row).to(tl.float32)
    logits += row * stride

    # Shares above `last` are kept, and of its equals the first `room`, as long as those kept before sum to less than p.
    last, room = most * 0.0, tl.full([], _NOWHERE, tl.int32)
    if BY_COUNT:
        k = tl.load(own + 2 * count).to(tl.float32)
        k = tl.where((k > 0) & (k < vocab_size), k, vocab_size)
        last, above = _reach(logits, most, temperature, vocab_size, k, COLUMNS, True)
        room = (k - above).to(tl.int32)
    enough, before = tl.full([], float("inf"), tl.float32), most * 0.0
    if BY_SUM:
        p = tl.load(own + 3 * count).to(tl.float32)
        column = tl.arange(0, COLUMNS)
        sums = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, vocab_size, COLUMNS):
            share = _shares(logits, most, temperature, first + column, vocab_size)
            sums += tl.where(share > last, share, 0.0)
        whole = tl.sum(sums, 0)
        if BY_COUNT:
            whole += last * room.to(tl.float32)
        asked = tl.maximum(p * whole, 1e-37)  # the likeliest token stays
        least, above = _reach(logits, most, temperature, vocab_size, asked, COLUMNS, False)
        if p < 1:
            room = tl.where(least > last, _NOWHERE, room)
            last, enough, before = tl.maximum(last, least), asked, above

    total = tl.zeros([], tl.float64)
    equals = tl.zeros([], tl.int32)  # so far
    for first in range(0, vocab_size, COLUMNS):
        kept, equals = _kept(
            logits, most, temperature, first, vocab_size, last, room, enough, before, min_p, equals, COLUMNS
        )
        total += tl.sum(kept, 0)
    wanted = number * total
    summed = tl.zeros([], tl.float64)
    equals = tl.zeros([], tl.int32)
    token = tl.full([], _NOWHERE, tl.int32)
    final = tl.zeros([], tl.int32)  # the last token that is kept, for a number that rounding has brought to the total
    for first in range(0, vocab_size, COLUMNS):
        kept, equals = _kept(
            logits, most, temperature, first, vocab_size, last, room, enough, before, min_p, equals, COLUMNS
        )
        place = first + tl.arange(0, COLUMNS)
        beyond = (kept > 0) & (summed + tl.cumsum(kept, 0) > wanted)
        token = tl.minimum(token, tl.min(tl.where(beyond, place, _NOWHERE), 0))
        final = tl.maximum(final, tl.max(tl.where(kept > 0, place, 0), 0))
        summed += tl.sum(kept, 0)
    tl.store(token_ids + row, tl.where(token == _NOWHERE, final, token).to(tl.int64))


@triton.jit
def _shares(logits, most, temperature, column, vocab_size):
    """Of no particular sum; the largest is 1, and what is no token has 0."""
    logit = tl.load(logits + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.exp(tl.div_rn(logit - most, temperature))


@triton.jit
def _reach(logits, most, temperature, vocab_size, wanted, COLUMNS: tl.constexpr, COUNTED: tl.constexpr):
    """The smallest of the fewest largest shares that are so many, or sum to so much; and how many or how much the
    larger ones are."""
    # Numbers of 0 and more are in the order of their bits, and 1 has thirty. The larger ones of `below` reach what is
    # wanted, those of `below + 8 steps` do not, and come to `above`.
    below = tl.full([], -1, tl.int32)
    above = most * 0.0
    way, column = tl.arange(0, 8), tl.arange(0, COLUMNS)
    for digit in range(10):
        step = 1 << (27 - 3 * digit)
        bounds = below + step * way
        sums = tl.zeros([8], tl.float32)
        for first in range(0, vocab_size, COLUMNS):
            share = _shares(logits, most, temperature, first + column, vocab_size)
            weight = tl.where(first + column < vocab_size, 1.0, 0.0) if COUNTED else share
            larger = share.to(tl.int32, bitcast=True)[:, None] > bounds[None, :]
            sums += tl.sum(tl.where(larger, weight[:, None], 0.0), 0)
        reaches = (sums >= wanted) | (way == 0)
        below += step * (tl.sum(reaches.to(tl.int32), 0) - 1)
        rest = tl.max(tl.where(reaches, -1.0, sums), 0)
        above = tl.where(rest >= 0, rest, above)
    return (below + 1).to(tl.float32, bitcast=True), above


@triton.jit
def _kept(
    logits, most, temperature, first, vocab_size, last, room, enough, before, min_p, equals, COLUMNS: tl.constexpr
):  # fmt: skip
    """Shares in float64 from a column on, 0 for what is not kept; and how many equals of the last there are so far."""
    column = first + tl.arange(0, COLUMNS)
    share = _shares(logits, most, temperature, column, vocab_size)
    is_equal = (share == last) & (column < vocab_size)
    earlier = equals + tl.cumsum(is_equal.to(tl.int32), 0) - is_equal.to(tl.int32)
    has_room = (earlier < room) & (before + earlier.to(tl.float32) * last < enough)
    stays = ((share > last) | (is_equal & has_room)) & (share >= min_p)
    return tl.where(stays, share, 0.0).to(tl.float64), equals + tl.sum(is_equal.to(tl.int32), 0)
