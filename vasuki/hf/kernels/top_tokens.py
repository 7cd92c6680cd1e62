"""Which tokens may be drawn: the k likeliest, and the fewest that reach p, by putting them in order."""

from __future__ import annotations

import torch


def keep_top_p(shares: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all of a row but the smallest set of its likeliest tokens that reaches p; of equals the first ones stay.

    Args:
        shares: `[rows, vocab_size]`, overwritten.
        top_p: `[rows]` of a row's sum; one of next to nothing keeps the likeliest token.
    """
    return _keep_ordered(shares, *shares.sort(dim=-1, descending=True, stable=True), top_p)


def keep_top_k(shares: torch.Tensor, top_k: int, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the k likeliest tokens, and of those all behind the smallest set that reaches p of their sum."""
    if top_k <= shares.shape[-1] // 4:
        return _keep_ordered(shares, *shares.topk(top_k, dim=-1), top_p)
    ordered, order = shares.sort(dim=-1, descending=True, stable=True)
    return _keep_ordered(shares, ordered[:, :top_k], order[:, :top_k], top_p)


def _keep_ordered(
    shares: torch.Tensor, ordered: torch.Tensor, order: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Keep of the likeliest tokens, `[rows, k]` from the first on, those before which less than p is; of the others
    none."""
    sums = ordered.cumsum(dim=-1)  # whose last is the same for a row by itself, as a sum by several threads is not
    wanted = top_p.unsqueeze(-1) * sums[:, -1:]
    before = sums.sub_(ordered)
    before[:, 0] = -1.0  # the likeliest stays
    ordered.masked_fill_(before >= wanted, 0.0)
    return shares.zero_().scatter_(-1, order, ordered)
