"""All layers of a model with activations in float32 on a CPU in one call, attention included: in a step of few rows, a
fifth of the time goes into coming back to Python for every part of every layer.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from vasuki.hf.attention.chunks import PagedTiles
from vasuki.hf.attention.inputs import StepInputs
from vasuki.hf.attention.ragged_attention import AttentionProbe
from vasuki.hf.cpu.fused_layer import Angles, FusedLayer, Layer
from vasuki.hf.cpu.rms_norm import FusedNorm
from vasuki.hf.fused.replace import replace_where_equal
from vasuki.hf.kernels.paged_attention import PagedKernel

_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}


class _Tiles(ctypes.Structure):
    """`Tiles` of decoder.cpp."""

    _fields_ = (("at", ctypes.c_void_p), ("count", ctypes.c_int64), ("longest", ctypes.c_int64))


class _Attention(ctypes.Structure):
    """`Attention` of decoder.cpp. Valid as long as the step's tensors."""

    _fields_ = (
        ("write", ctypes.c_void_p),
        ("attend", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("block_tokens", ctypes.c_int64),
        ("all", _Tiles),
        ("sampled", _Tiles),
    )

    @classmethod
    def of(cls, step: StepInputs, tiles: PagedTiles) -> _Attention:
        assert isinstance(tiles.kernel, PagedKernel)
        return cls(
            *tiles.kernel.addresses,
            step.rows.data_ptr(),
            tiles.tables.data_ptr(),
            tiles.tables.shape[1],
            step.cache.block_tokens,
            _Tiles(tiles.tiles.data_ptr(), len(tiles.tiles), tiles.longest),
            _Tiles(tiles.sampled.data_ptr(), len(tiles.sampled), 1),
        )


class DecoderKernel:
    """Takes tokens through layers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.vasuki_layers
        self._function.restype = None
        tensor, size = ctypes.c_void_p, ctypes.c_int64
        layers, angles, step, caches = (ctypes.POINTER(of) for of in (Layer, Angles, _Attention, ctypes.c_void_p))
        self._function.argtypes = [layers, size, angles, step, caches, tensor, size, tensor, tensor]

    def __call__(
        self,
        layers: ctypes.Array[Layer],
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        step: StepInputs,
        tiles: PagedTiles,
    ) -> torch.Tensor:
        """`[num_tokens, hidden_size]` in float32, contiguous, which is overwritten -> `[num_samples, hidden_size]`."""
        cos, sin = (part.contiguous() for part in angles)
        caches = (ctypes.c_void_p * len(layers))(*(cache.data_ptr() for cache in step.cache.layers))
        samples, attention = step.sample_positions, _Attention.of(step, tiles)
        y = x.new_empty(len(samples), x.shape[1])
        pointers = [tensor.data_ptr() for tensor in (samples, y)]
        self._function(layers, len(layers), Angles.of(cos, sin), attention, caches, x.data_ptr(), len(x), *pointers)
        return y


class FusedDecoder(torch.nn.Module):
    """What takes the place of a model `norm(layers(embed_tokens(ids)))`, which is its plain twin where it counts: in a
    step, the last layer's answers are for the tokens that are sampled."""

    embed_tokens: torch.nn.Module
    layers: Any  # a list of `FusedLayer`
    norm: torch.nn.Module
    rotary_emb: torch.nn.Module

    def __init__(self, decoder: Any, kernel: DecoderKernel) -> None:
        super().__init__()
        for name in _PARTS:
            setattr(self, name, getattr(decoder, name))
        self._kernel = kernel
        self._of_layers: list[Layer] = []
        self._side_by_side = (Layer * 0)()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        step: StepInputs | AttentionProbe | None = None,
        **inert: Any,
    ) -> BaseModelOutputWithPast:
        """`[1, num_tokens]` of both -> `[1, num_tokens, hidden_size]`."""
        x = self.embed_tokens(input_ids)
        angles = self.rotary_emb(x, position_ids)
        if isinstance(step, StepInputs) and self._in_one_call(step) and (tiles := step.chunks.tiles) is not None:
            sampled = self._kernel(self._pointers(), x[0], angles, step, tiles)
            x.index_copy_(1, step.sample_positions, self.norm(sampled).unsqueeze(0))  # its memory is free by now
            return BaseModelOutputWithPast(last_hidden_state=x)
        for layer in self.layers:
            x = layer(x, angles, step=step)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    def _in_one_call(self, step: StepInputs) -> bool:
        """Whether one call computes all layers: not if copies or hooks come between them."""
        hooked = any(layer._forward_pre_hooks or layer._forward_hooks for layer in self.layers)
        return step.offload is None and not hooked

    def _pointers(self) -> ctypes.Array[Layer]:
        of_layers = [layer.pointers() for layer in self.layers]
        if self._of_layers != of_layers:  # the same objects, unless weights have moved
            self._of_layers, self._side_by_side = of_layers, (Layer * len(of_layers))(*of_layers)
        return self._side_by_side


def fuse_decoder(model: torch.nn.Module, kernel: DecoderKernel) -> None:
    """Replace a model's decoder, if it is of such parts and computes on a few tokens what its twin does."""
    replace_where_equal(model, _is_candidate, lambda decoder: FusedDecoder(decoder, kernel))


def _is_candidate(module: torch.nn.Module) -> bool:
    parts = dict(module.named_children())
    if parts.keys() != _PARTS or type(parts["norm"]) is not FusedNorm:
        return False
    layers: Any = parts["layers"]
    return all(type(layer) is FusedLayer and layer.is_plain for layer in layers)
