"""Vector embedding (Baton, section 4.2): a cache of transformers whose columns are read from blocks.

A model hands each layer's new keys and values to its cache, and gets back keys and values of all columns. New ones go
to the blocks of their sequences, padding nowhere; then the rectangle is gathered, each row's on the right. So a row
that joins, leaves, is parked or returns changes no tensor of another row, and memory is what the scheduler counts. A
rectangle of one layer is in memory at a time; transformers' own cache copies as much when it grows by a column.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from vasuki.hf.attention.ragged_attention import Unsupported
from vasuki.hf.kv.kv_cache import KVCache, KVLayout
from vasuki.hf.kv.kv_mover import KVMover
from vasuki.hf.padded.rectangles import Rectangle

_PLAIN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}  # by name: older transformers lack the last


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a rectangle. Windows are its mask's business: it keeps every column."""

    is_sliding = False

    def __init__(self, layer: int, cache: KVCache, rectangle: Rectangle, offload: KVMover | None) -> None:
        super().__init__()
        self.is_initialized = True
        self._layer, self._cache, self._rectangle, self._offload = layer, cache, rectangle, offload

    def lazy_initialization(self, *_: Any) -> None: ...

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[rows, num_kv_heads, new, head_dim]` in, `[rows, num_kv_heads, width, head_dim]` out."""
        layer, cache, rectangle = self._layer, self._cache, self._rectangle
        if self._offload is not None:
            self._offload.before_layer(layer)
        head_dim = cache.layout.heads[layer][1]
        new = [_flat(states, head_dim)[rectangle.kept] for states in (key_states, value_states)]
        cache.write(layer, new[0], new[1], rectangle.written)
        stored = cache.layers[layer].view(-1, *cache.layout.heads[layer])
        keys, values = (stored[rows] for rows in rectangle.read)
        if self._offload is not None:
            self._offload.after_layer(layer)
        return self._columns(keys, key_states), self._columns(values, value_states)

    def _columns(self, states: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        rows = self._rectangle.input_ids.shape[0]
        return states.view(rows, -1, *states.shape[1:])[..., : like.shape[-1]].transpose(1, 2).to(like.dtype)

    def get_seq_length(self) -> int:
        return self._rectangle.past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rectangle.past + query_length, 0

    def get_max_length(self) -> int:
        return -1


def block_cache(cache: KVCache, rectangle: Rectangle, offload: KVMover | None = None) -> Cache:
    """The cache that a model is called with for a rectangle."""
    return Cache(layers=[_Layer(i, cache, rectangle, offload) for i in range(cache.layout.num_layers)])


def layout_of(cache: Any, dtype: torch.dtype) -> KVLayout:
    """What blocks store of a model's layers, from a cache of transformers that it has filled. Keys and values are
    stored equally wide, as the wider of both. Raises Unsupported where blocks would not hold all that a row keeps."""
    if not all(type(layer).__name__ in _PLAIN_LAYERS for layer in getattr(cache, "layers", (None,))):
        raise Unsupported("it keeps more of a row than keys and values")
    heads = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or not keys.numel():
            heads.append((0, 0))
        elif keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise Unsupported("its keys and values are not stored head by head")
        else:
            heads.append((keys.shape[1], max(keys.shape[-1], values.shape[-1])))
    return KVLayout(tuple(heads), dtype)


def _flat(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[rows, heads, new, any]` -> `[rows * new, heads, head_dim]`."""
    filled = pad(states, (0, head_dim - states.shape[-1]))
    return filled.transpose(1, 2).reshape(-1, states.shape[1], head_dim)
