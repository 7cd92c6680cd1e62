"""Triton's kernels for a model on a GPU: those that compile there and answer as their plain twins do.

The kernels of a layer are compared where they take their place (`fused`), attention here.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vasuki.engine.sequence import Request, SamplingParams, Sequence
from vasuki.hf.attention.plain_attention import Variant, attend_eagerly
from vasuki.hf.fused.by_torch import SmallKernels
from vasuki.hf.fused.replace import close
from vasuki.hf.kernels.float8 import FLOAT8, Scales
from vasuki.hf.kv.kv_cache import KVCache, KVLayout
from vasuki.hf.sampler import Draw, sample

if TYPE_CHECKING:
    from vasuki.hf.kernels.by_triton.attention import TileAttention

log = logging.getLogger(__name__)

_BLOCK_TOKENS = 16
# Of the chunks that attention is compared on: within a block, a span, beyond, and so long that one row is split.
_CONTEXTS = (1, 37, 150, 1100)
_TOKENS = (1, 20, 1, 1)


def small_kernels(device: torch.device) -> SmallKernels | None:
    """The kernels of a layer; None where they do not compile."""
    try:
        from vasuki.hf.kernels.by_triton import layer

        ones = torch.ones(1, 4, device=device)
        layer.gated(ones, "silu")
    except Exception as error:  # whatever a compiler that is missing, or a driver that it does not know, may raise
        _without("layers", error)
        return None
    return SmallKernels(layer.turn_and_store, layer.gated, layer.normed, layer.round_rows)


def drawing_kernel(device: torch.device) -> Draw | None:
    """What draws all rows of a step in one launch; None where it does not compile, or draws something else."""
    try:
        from vasuki.hf.kernels.by_triton import sampling

        # Each share well below the next larger one: rounding decides nowhere.
        logits = (torch.arange(5000) * 37 % 5000 * -0.5).repeat(4, 1)
        asked = [SamplingParams(), SamplingParams(top_k=7), SamplingParams(top_p=0.5, min_p=0.1)]
        params = [replace(each, temperature=0.7, seed=1) for each in [*asked, replace(asked[1], top_p=0.5)]]
        rows = [Sequence(Request(row, row, 1, 1, sampling=each)) for row, each in enumerate(params)]
        expected = sample(logits.clone(), rows).token_ids
        if not torch.equal(sample(logits.to(device), rows, draw=sampling.draw).token_ids.cpu(), expected):
            raise ValueError("it draws other tokens than operators do")
    except Exception as error:
        _without("drawing", error)
        return None
    return sampling.draw


def tile_attention(
    layout: KVLayout, heads_per_kv_head: int, dtype: torch.dtype, device: torch.device
) -> TileAttention | None:
    """Attention for whatever a layer wants; None where it does not compile, or answers otherwise.

    Args:
        layout: of the KV cache.
        heads_per_kv_head: the most of any layer.
        dtype: of queries.
        device: where they are.
    """
    try:
        from vasuki.hf.kernels.by_triton.attention import TileAttention, takes_large_tiles

        generation = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        large = takes_large_tiles(generation, max(layout.head_dims), dtype)
        kernel = TileAttention(heads_per_kv_head, dtype, large)
        for num_kv_heads, head_dim in sorted({heads for heads in layout.heads if all(heads)}):
            scales = (Scales(0.25, 2.0),) if layout.dtype is FLOAT8 else ()
            one = replace(KVLayout.uniform(1, num_kv_heads, head_dim, layout.dtype), scales=scales)
            for variant in _variants(num_kv_heads * heads_per_kv_head, head_dim, device):
                if not _agrees(kernel, one, variant, heads_per_kv_head, dtype, device):
                    raise ValueError(f"it answers otherwise than torch for heads of {head_dim}, {variant}")
    except Exception as error:
        _without("attention", error)
        return None
    return kernel


def _without(what: str, error: Exception) -> None:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    log.warning("torch's operators compute %s, since Triton's kernels cannot be used: %s", what, reason)


def _variants(num_heads: int, head_dim: int, device: torch.device) -> list[Variant]:
    scaling = head_dim**-0.5
    sinks = torch.linspace(-1, 1, num_heads, device=device)
    return [Variant(scaling), Variant(scaling, window=30), Variant(scaling, softcap=5.0, sinks=sinks)]


def _agrees(
    kernel: TileAttention, layout: KVLayout, variant: Variant, group: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a few chunks get the same answers as by torch."""
    (num_kv_heads, head_dim), *_ = layout.heads
    width = -(-max(_CONTEXTS) // _BLOCK_TOKENS)
    cache = KVCache(layout, len(_CONTEXTS) * width, _BLOCK_TOKENS, device)
    numbers = torch.Generator(device="cpu").manual_seed(1)
    cache.layers[0].copy_(torch.randn(cache.layers[0].shape, generator=numbers))
    tables = torch.arange(cache.num_blocks, device=device).flip(0).view(-1, width).contiguous()
    query = torch.randn(sum(_TOKENS), num_kv_heads * group, head_dim, generator=numbers).to(device, dtype)
    tiles, first = [], 0
    for row, (tokens, context) in enumerate(zip(_TOKENS, _CONTEXTS, strict=True)):
        for done in range(0, tokens, kernel.tile_tokens):
            count = min(kernel.tile_tokens, tokens - done)
            tiles.append([first + done, count, context - tokens + done, row, 0])
        first += tokens
    longest = max(count for _, count, *_ in tiles)
    output = torch.empty_like(query)
    on_device = torch.tensor(tiles, device=device)
    options = variant.sinks, variant.window, variant.scaling, variant.softcap
    kernel(query, cache.layers[0], on_device, longest, tables, *options, output, layout.scales_of(0))
    first, is_close = 0, True
    for row, (tokens, context) in enumerate(zip(_TOKENS, _CONTEXTS, strict=True)):
        keys, values = cache.gather(0, tables[row], dtype)
        here = slice(first, first + tokens)
        is_close &= close(output[here], attend_eagerly(query[here], keys[:context], values[:context], variant))
        first += tokens
    return is_close
