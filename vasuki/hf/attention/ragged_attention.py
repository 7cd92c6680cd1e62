"""Attention of packed chunks over paged blocks.

The model's layers call `interface` through transformers' attention interface with queries, keys and values of all the
step's tokens. It stores the new keys and values in their blocks, then lets every chunk attend to its own sequence:

    tokens     a5 a6 a7 | b12 | c0 c1 c2 c3          one packed row, no padding
    a5..a7 see a0..a7     b12 sees b0..b12     c0..c3 see themselves, causally
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from vasuki.hf.attention.chunks import PagedTiles
from vasuki.hf.attention.inputs import StepInputs
from vasuki.hf.attention.plain_attention import Variant, attend_gathered
from vasuki.hf.kernels import varlen
from vasuki.hf.kernels.float8 import Scales

NAME = "vasuki_ragged"


class Unsupported(Exception):
    """The model asks its attention for something that this backend does not do."""


# Keyword arguments that transformers hands to attention functions and that change nothing here.
_INERT = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "is_causal"}
_INERT |= {"output_router_logits", "position_embeddings", "num_items_in_batch", "logits_to_keep", "deterministic"}


class AttentionProbe(Protocol):
    """Answers in the place of attention while a model is looked at (`probe`)."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        variant: Variant,
        mask: torch.Tensor | None,
    ) -> torch.Tensor: ...


def refuse_unknown(other: Mapping[str, Any]) -> None:
    """Raises Unsupported for keyword arguments of transformers that may change what attention comes to."""
    if asked := {name for name, given in other.items() if given is not None and name not in _INERT}:
        raise Unsupported(f"its attention needs {', '.join(sorted(asked))}")


def interface(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    step: StepInputs | AttentionProbe | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' calling convention: `[1, num_heads, num_tokens, head_dim]` in, `[1, num_tokens, ...]` out.

    Value heads may be narrower than key heads (multi-head latent attention); the output's heads are as wide as values'.
    """
    variant = Variant(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    if not isinstance(step, StepInputs):
        refuse_unknown(other)
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    width = value.shape[-1]
    is_narrow = width < key.shape[-1]
    if is_narrow:  # keys and values are stored equally wide, so latent attention's values are padded
        value = pad(value, (0, key.shape[-1] - width))
    output = attend_or_observe(module, query, key, value, step, variant, attention_mask)
    return (output[..., :width] if is_narrow else output).unsqueeze(0), None


# No mask is registered for it: each chunk's follows from its positions, and a model that builds one waits for the
# device to do so.
AttentionInterface.register(NAME, interface)


def attend_or_observe(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepInputs | AttentionProbe | None,
    variant: Variant,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend` for a layer of a model, or what an observer answers."""
    if isinstance(step, StepInputs):
        return attend(query, key, value, module.layer_idx, step, variant)
    if step is None:
        raise Unsupported("it does not hand keyword arguments on to its attention")
    return step.attend(module, query, key, value, variant, mask)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, step: StepInputs, variant: Variant
) -> torch.Tensor:
    """Attention of one layer for all tokens of a step.

    Shapes: query `[num_tokens, num_heads, head_dim]`, key and value `[num_tokens, num_kv_heads, head_dim]`.
    Returns `[num_tokens, num_heads, head_dim]`.
    """
    with step.at_layer(layer) as here:
        store(key, value, layer, here)
        return attend_stored(query, layer, here, variant)


def attend_stored(query: torch.Tensor, layer: int, step: StepInputs, variant: Variant) -> torch.Tensor:
    """Attention of one layer, as `attend`, where the step's keys and values are in their blocks already."""
    chunks, cache_layer, scales = step.chunks, step.cache.layers[layer], step.cache.layout.scales_of(layer)
    packed = chunks.packed if chunks.packs else None
    if packed is not None and _packs(query, cache_layer, variant):
        output = packed(query[chunks.apart :].contiguous(), cache_layer, variant.scaling, variant.window)
        if chunks.tiles_apart is None:
            return output
        singles = _attend_tiles(query[: chunks.apart], cache_layer, scales, chunks.tiles_apart, variant)
        return torch.cat([singles, output])
    if chunks.tiles is not None:
        return _attend_tiles(query, cache_layer, scales, chunks.tiles, variant)
    return attend_gathered(query, layer, step, variant)


def _packs(query: torch.Tensor, cache_layer: torch.Tensor, variant: Variant) -> bool:
    """Whether torch's packed kernel serves a layer."""
    return variant.is_plain and query.dtype is cache_layer.dtype and varlen.takes(query.shape[-1])


def store(key: torch.Tensor, value: torch.Tensor, layer: int, step: StepInputs) -> None:
    """Put a step's keys and values `[num_tokens, num_kv_heads, head_dim]` into their blocks."""
    if (kernel := step.chunks.kernels.ours) is not None:
        kernel.write(key, value, step.rows, step.cache.layers[layer], step.cache.layout.scales_of(layer))
    else:
        step.cache.write(layer, key, value, step.rows)


def _attend_tiles(
    query: torch.Tensor, cache_layer: torch.Tensor, scales: Scales, tiles: PagedTiles, variant: Variant
) -> torch.Tensor:
    """Attend by a compiled kernel."""
    output = query.new_empty(query.shape)
    tiles.kernel(
        query,
        cache_layer,
        tiles.tiles,
        tiles.longest,
        tiles.tables,
        variant.sinks,
        variant.window,
        variant.scaling,
        variant.softcap,
        output,
        scales,
    )
    return output
