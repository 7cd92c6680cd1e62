"""Attention by torch operators: the plain twin of the kernels, for any device and whatever a layer may want.

It gathers a sequence's keys and values from its blocks, then computes single tokens in padded groups and longer chunks
in a fused call each, or spells the softmax out where no fused call has what the layer wants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from vasuki.hf.attention.chunks import DecodeGroup
from vasuki.hf.attention.inputs import StepInputs

_SCORES = 2**24  # that are written down at once, several times over: 64 MiB each


@dataclass(frozen=True, slots=True)
class Variant:
    """Options of a layer beyond plain causal attention."""

    scaling: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores are squashed to (-softcap, softcap)
    sinks: torch.Tensor | None = (
        None  # [num_heads], one more logit in each softmax that takes weight and gives no value
    )

    @property
    def is_plain(self) -> bool:
        """Return whether `scaled_dot_product_attention` can express it."""
        return self.softcap is None and self.sinks is None


def attend_gathered(query: torch.Tensor, layer: int, step: StepInputs, variant: Variant) -> torch.Tensor:
    """Attention of one layer for all tokens of a step: query `[num_tokens, num_heads, head_dim]`, and so the output."""
    output = query.new_empty(query.shape)
    for group in step.chunks.decode_groups:
        keys, values = step.cache.gather(layer, group.blocks, query.dtype)
        _clear_hidden(keys, values, group)
        output[group.tokens] = _decode(query[group.tokens], keys, values, group.positions, variant)
    for chunk in step.chunks.long_chunks:
        start = chunk.end - (chunk.last - chunk.first)
        unseen_blocks = _first_seen(start, variant.window) // step.cache.block_tokens
        keys, values = step.cache.gather(layer, chunk.blocks[unseen_blocks:], query.dtype)
        end = chunk.end - unseen_blocks * step.cache.block_tokens
        function = _sdpa if variant.is_plain else attend_eagerly
        output[chunk.first : chunk.last] = function(query[chunk.first : chunk.last], keys[:end], values[:end], variant)
    return output


def _clear_hidden(keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup) -> None:
    """Zero what no row of a group may see: others may have left there what is no number, and 0 x NaN is NaN.

    Keys and values are `[rows, length, num_kv_heads, head_dim]`, copied from the cache.
    """
    columns = torch.arange(group.shortest, keys.shape[1], device=keys.device)
    hidden = (columns > group.positions[:, None])[..., None, None]
    for states in (keys, values):
        states[:, group.shortest :].masked_fill_(hidden, 0)


def _first_seen(position: int, window: int | None) -> int:
    """Return the first position that a query sees."""
    return 0 if window is None else max(0, position - window + 1)


def _mask(queries: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """Return which of `num_keys` positions each query may see: `[*queries.shape, num_keys]`, bool."""
    positions = torch.arange(num_keys, device=queries.device)
    visible = positions <= queries.unsqueeze(-1)
    if window is not None:
        visible &= positions > queries.unsqueeze(-1) - window
    return visible


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, variant: Variant
) -> torch.Tensor:
    """Attend with one query for each row: query `[rows, num_heads, head_dim]`, keys `[rows, length, num_kv_heads,
    head_dim]`.

    The query heads that share a KV head are laid out as if they were positions, so that each key is read once.
    """
    rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[-2]
    grouped = query.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = _mask(positions, keys.shape[1], variant.window)[:, None, None, :]
    if variant.is_plain:
        output = scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=variant.scaling
        )
    else:
        sinks = None if variant.sinks is None else variant.sinks.view(1, num_kv_heads, -1, 1)
        output = _softmax_attention(grouped, keys.transpose(1, 2), values.transpose(1, 2), mask, sinks, variant)
    return output.reshape(rows, num_heads, head_dim)


def _sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, variant: Variant) -> torch.Tensor:
    """A chunk's attention by torch's fused kernel. The chunk is the end of the context."""
    length, num_keys = query.shape[0], keys.shape[0]
    first = num_keys - length
    mask = None
    if first > 0 or (variant.window is not None and variant.window < num_keys):
        mask = _mask(torch.arange(first, num_keys, device=query.device), num_keys, variant.window)
    sharing = query.shape[1] // keys.shape[1]
    if sharing > 1 and query.device.type == "cuda":
        # Of the fused kernels there, the one for masks and float32 wants a KV head for each head. Copied heads take
        # less than the scores that torch would write down without it.
        keys, values = (states.repeat_interleave(sharing, dim=1) for states in (keys, values))
    output = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=variant.scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return output[0].transpose(0, 1)


def attend_eagerly(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, variant: Variant) -> torch.Tensor:
    """A chunk's attention spelled out, for soft caps and sinks: slice by slice of its queries, as their scores are
    written down, each over the keys that it sees."""
    length, num_heads, _ = query.shape
    first = len(keys) - length
    size = max(1, _SCORES // (num_heads * len(keys)))
    outputs = []
    for begin in range(0, length, size):
        some = query[begin : begin + size]
        seen = slice(_first_seen(first + begin, variant.window), first + begin + len(some))
        outputs.append(_attend_slice(some, keys[seen], values[seen], variant))
    return torch.cat(outputs)


def _attend_slice(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, variant: Variant) -> torch.Tensor:
    """Attend with queries that are the end of the context."""
    length, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    grouped = query.view(length, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, length, dim]
    mask = _mask(torch.arange(num_keys - length, num_keys, device=query.device), num_keys, variant.window)
    sinks = None if variant.sinks is None else variant.sinks.view(num_kv_heads, -1, 1, 1)
    output = _softmax_attention(
        grouped, keys.permute(1, 0, 2).unsqueeze(1), values.permute(1, 0, 2).unsqueeze(1), mask, sinks, variant
    )
    return output.permute(2, 0, 1, 3).reshape(length, num_heads, head_dim)


def _softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
    variant: Variant,
) -> torch.Tensor:
    """softmax(scores) @ values over the last two dimensions, in float32 where it matters."""
    scores = query @ keys.transpose(-1, -2) * variant.scaling
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    scores = scores.float().masked_fill(~mask, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(values.dtype) @ values
