"""Attention of packed chunks over paged blocks.

The model's layers call `_interface` through transformers' attention interface with queries, keys and values of all the
step's tokens. It stores the new keys and values in their blocks, then lets every chunk attend to its own sequence:

    tokens     a5 a6 a7 | b12 | c0 c1 c2 c3          one packed row, no padding
    a5..a7 see a0..a7     b12 sees b0..b12     c0..c3 see themselves, causally
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from vasuki.hf.inputs import PagedTiles, StepInputs
from vasuki.hf.kv_cache import KVLayout

NAME = "vasuki_ragged"


class Unsupported(Exception):
    """The model asks its attention for something that this backend does not do."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a layer wants beyond plain causal attention."""

    scaling: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores are squashed to (-softcap, softcap)
    sinks: torch.Tensor | None = (
        None  # [num_heads], one more logit in each softmax that takes weight and gives no value
    )

    @property
    def is_plain(self) -> bool:
        """Whether `scaled_dot_product_attention` can express it."""
        return self.softcap is None and self.sinks is None


# Keyword arguments that transformers hands to attention functions and that change nothing here.
_INERT = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "is_causal"}
_INERT |= {"output_router_logits", "position_embeddings", "num_items_in_batch", "logits_to_keep"}


@dataclass(frozen=True, slots=True)
class Observation:
    """What a layer handed to its attention, `[num_tokens, num_(kv_)heads, head_dim]`, and what it got for it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    variant: Variant

    @property
    def output(self) -> torch.Tensor:
        """The queries stand for the attention that is not computed."""
        return self.query


_observed: dict[torch.nn.Module, Observation] | None = None  # while a model is observed


def _interface(
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
    step: StepInputs | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' calling convention: `[1, num_heads, num_tokens, head_dim]` in, `[1, num_tokens, ...]` out."""
    variant = Variant(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    if step is None:
        asked = {name for name, given in other.items() if given is not None and name not in _INERT}
        if asked:
            raise Unsupported(f"its attention needs {', '.join(sorted(asked))}")
        if attention_mask is not None:
            raise Unsupported("it builds an attention mask of its own")
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend_or_observe(module, query, key, value, step, variant).unsqueeze(0), None


AttentionInterface.register(NAME, _interface)
# Each chunk's mask follows from its positions, so the model has none to build.
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def attend_or_observe(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepInputs | None, variant: Variant
) -> torch.Tensor:
    """`attend` for a layer of a model; without a step, only while the model is observed."""
    if step is not None:
        return attend(query, key, value, module.layer_idx, step, variant)
    if _observed is None:
        raise Unsupported("it does not hand keyword arguments on to its attention")
    if value.shape[-1] != query.shape[-1]:
        raise Unsupported(f"its value heads have {value.shape[-1]} dimensions and its keys {query.shape[-1]}")
    _observed[module] = Observation(query, key, value, variant)
    return _observed[module].output


def observe(model: Any) -> dict[torch.nn.Module, Observation]:
    """Run the model on a few tokens to see what its layers ask of their attention. Raises Unsupported by name."""
    global _observed
    observed: dict[torch.nn.Module, Observation] = {}
    _observed = observed
    try:
        tokens = torch.arange(4, device=model.device).unsqueeze(0)
        with torch.inference_mode():
            model(input_ids=tokens, position_ids=tokens, use_cache=False)
    finally:
        _observed = None
    return observed


def observe_calls(
    model: Any, modules: Iterable[torch.nn.Module], see: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
) -> dict[torch.nn.Module, Observation]:
    """`observe`, which shows `see` what some modules are called with and answer.

    Nothing is observed where there are no such modules, nor of a model that cannot be served: it is refused with its
    name where it is described.
    """
    hooks = [module.register_forward_hook(see, with_kwargs=True) for module in modules]
    try:
        return observe(model) if hooks else {}
    except Unsupported:
        return {}
    finally:
        for hook in hooks:
            hook.remove()


def probe(model: Any, num_layers: int) -> KVLayout:
    """What a model's layers store. Raises Unsupported by name."""
    heads: dict[int, tuple[int, int]] = {}  # (num_kv_heads, head_dim) by layer
    for layer, seen in observe(model).items():
        _, num_kv_heads, head_dim = seen.value.shape
        heads[cast(int, layer.layer_idx)] = (num_kv_heads, head_dim)
    if heads.keys() != set(range(num_layers)):
        raise Unsupported(f"{len(heads)} of its {num_layers} layers use the attention interface")
    if len(set(heads.values())) > 1:
        raise Unsupported("its layers differ in the number or size of their KV heads")
    return KVLayout(num_layers, *heads[0], dtype=model.dtype)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, step: StepInputs, variant: Variant
) -> torch.Tensor:
    """Attention of one layer for all tokens of a step.

    Shapes: query `[num_tokens, num_heads, head_dim]`, key and value `[num_tokens, num_kv_heads, head_dim]`.
    Returns `[num_tokens, num_heads, head_dim]`.
    """
    if step.offload is not None:
        step.offload.before_layer(layer)
    store(key, value, layer, step)
    if step.tiles is not None:
        output = _attend_tiles(query, layer, step, step.tiles, variant)
    elif step.varlen is not None and variant.is_plain and query.dtype is step.cache.layout.dtype:
        output = step.varlen(query.contiguous(), step.cache.layers[layer], variant.scaling, variant.window)
    else:
        output = _attend_gathered(query, layer, step, variant)
    if step.offload is not None:
        step.offload.after_layer(layer)
    return output


def store(key: torch.Tensor, value: torch.Tensor, layer: int, step: StepInputs) -> None:
    """Put a step's keys and values `[num_tokens, num_kv_heads, head_dim]` into their blocks."""
    if step.tiles is not None:
        step.tiles.kernel.write(key, value, step.rows, step.cache.layers[layer])
    else:
        step.cache.write(layer, key, value, step.rows)


def _attend_tiles(
    query: torch.Tensor, layer: int, step: StepInputs, tiles: PagedTiles, variant: Variant
) -> torch.Tensor:
    """By the compiled kernel."""
    output = query.new_empty(query.shape)
    tiles.kernel(
        query,
        step.cache.layers[layer],
        tiles.tiles,
        tiles.longest,
        tiles.tables,
        None if variant.sinks is None else variant.sinks.float().contiguous(),
        variant.window,
        variant.scaling,
        variant.softcap,
        output,
    )
    return output


def _attend_gathered(query: torch.Tensor, layer: int, step: StepInputs, variant: Variant) -> torch.Tensor:
    """By torch operators: single tokens in padded groups, longer chunks in a fused call each."""
    output = query.new_empty(query.shape)
    for group in step.gathered.decode_groups:
        keys, values = step.cache.gather(layer, group.blocks, query.dtype)
        output[group.tokens] = _decode(query[group.tokens], keys, values, group.positions, variant)
    for chunk in step.gathered.long_chunks:
        keys, values = step.cache.gather(layer, chunk.blocks, query.dtype)
        chunk_query = query[chunk.first : chunk.last]
        function = _sdpa if variant.is_plain else _eager
        output[chunk.first : chunk.last] = function(chunk_query, keys[: chunk.end], values[: chunk.end], variant)
    return output


def _mask(queries: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """Which of `num_keys` positions each query position may see: `[*queries.shape, num_keys]`, bool."""
    positions = torch.arange(num_keys, device=queries.device)
    visible = positions <= queries.unsqueeze(-1)
    if window is not None:
        visible &= positions > queries.unsqueeze(-1) - window
    return visible


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, variant: Variant
) -> torch.Tensor:
    """One query for each row: query `[rows, num_heads, head_dim]`, keys `[rows, length, num_kv_heads, head_dim]`.

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


def _eager(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, variant: Variant) -> torch.Tensor:
    """A chunk's attention spelled out, for soft caps and sinks."""
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
