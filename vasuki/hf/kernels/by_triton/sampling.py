"""Top-p of whole rows of probabilities without putting them in order, on a GPU.

A sort moves each probability and its place several times. Here a row's program looks for the smallest number whose
larger ones sum to less than p: three of its bits with each pass over the row, which stays in a cache meanwhile. It
waits for nobody, adds in the same order whatever its neighbours are, and is exact. The plain twin is
`kernels.top_tokens.keep_top_p`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vasuki.hf.kernels.by_triton.launch import launch

_COLUMNS = 2048  # of a row at once


def keep_top_p(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all of a row but the smallest set of its likeliest tokens that reaches p; of equals the first ones stay.

    Args:
        probabilities: float32 `[rows, vocab_size]`, contiguous, from 0 to 1 each, of any sum; overwritten.
        top_p: float32 `[rows]`, a share of the sum.

    Returns:
        The probabilities.
    """
    rows, vocab_size = probabilities.shape
    launch(_keep_top_p, (rows,), probabilities, top_p, vocab_size, COLUMNS=_COLUMNS)
    return probabilities


@triton.jit
def _keep_top_p(probabilities, top_p, vocab_size, COLUMNS: tl.constexpr):
    """Keep the likeliest tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    own = probabilities + row * vocab_size
    column = tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, vocab_size, COLUMNS):
        sums += tl.load(own + first + column, mask=first + column < vocab_size, other=0.0)
    wanted = tl.maximum(tl.load(top_p + row) * tl.sum(sums, 0), 1e-37)  # the likeliest token stays

    # Numbers of 0 and more are in the order of their bits, and 1 has thirty. The larger ones of `below` reach p, those
    # of `below + 8 steps` do not, and sum to `above`.
    below = tl.full([], -1, tl.int32)
    above = tl.full([], 0.0, tl.float32)
    way = tl.arange(0, 8)
    for digit in tl.static_range(10):
        step = 1 << (27 - 3 * digit)
        bounds = below + step * way
        sums_of = tl.zeros([8], tl.float32)
        for first in range(0, vocab_size, COLUMNS):
            p = tl.load(own + first + column, mask=first + column < vocab_size, other=0.0)
            larger = p.to(tl.int32, bitcast=True)[:, None] > bounds[None, :]
            sums_of += tl.sum(tl.where(larger, p[:, None], 0.0), 0)
        reaches = (sums_of >= wanted) | (way == 0)
        below += step * (tl.sum(reaches.to(tl.int32), 0) - 1)
        rest = tl.max(tl.where(reaches, -1.0, sums_of), 0)
        above = tl.where(rest >= 0, rest, above)
    last = (below + 1).to(tl.float32, bitcast=True)

    equals = tl.full([], 0, tl.int32)  # so far
    for first in range(0, vocab_size, COLUMNS):
        there = first + column < vocab_size
        p = tl.load(own + first + column, mask=there, other=0.0)
        is_equal = (p == last) & there
        before = equals + tl.cumsum(is_equal.to(tl.int32), 0) - is_equal.to(tl.int32)
        stays = (p > last) | (is_equal & (above + before.to(tl.float32) * last < wanted))
        tl.store(own + first + column, tl.where(stays, p, 0.0), mask=there)
        equals += tl.sum(is_equal.to(tl.int32), 0)
