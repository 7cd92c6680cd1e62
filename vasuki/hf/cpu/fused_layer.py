"""Decoder layers of a model with activations in float32 on a CPU, from kernel to kernel: in a step of few rows, what
lies between them, a module and a handful of views each, takes as long as a product.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from vasuki.hf.attention import ragged_attention
from vasuki.hf.attention.inputs import StepInputs
from vasuki.hf.attention.ragged_attention import AttentionProbe
from vasuki.hf.cpu.packed_linear import GatedMLP, PackedMatrix
from vasuki.hf.cpu.rms_norm import FusedNorm
from vasuki.hf.fused.attention import FusedAttention
from vasuki.hf.fused.replace import replace_where_equal

_PARTS: dict[str, type[torch.nn.Module]] = {
    "input_layernorm": FusedNorm,
    "self_attn": FusedAttention,
    "post_attention_layernorm": FusedNorm,
    "mlp": GatedMLP,
}


class _Norm(ctypes.Structure):
    """`Norm` of decoder_layer.hpp."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))

    @classmethod
    def of(cls, norm: FusedNorm) -> _Norm:
        return cls(norm.weight.data_ptr(), norm.eps)


class Angles(ctypes.Structure):
    """`Angles` of decoder_layer.hpp. Valid as long as the tensors that it was made of."""

    _fields_ = (("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("rotated", ctypes.c_int64))

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """Take two contiguous `[..., num_tokens, rotated]`."""
        return cls(cos.data_ptr(), sin.data_ptr(), cos.shape[-1])


class Layer(ctypes.Structure):
    """`DecoderLayer` of decoder_layer.hpp."""

    _fields_ = (
        ("first", _Norm),
        ("second", _Norm),
        ("query", _Norm),
        ("key", _Norm),
        ("qkv", PackedMatrix),
        ("o", PackedMatrix),
        ("up", PackedMatrix),
        ("gate", PackedMatrix),
        ("down", PackedMatrix),
        ("query_heads", ctypes.c_int64),
        ("key_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
    )


class LayerKernel:
    """What lies before and behind a layer's attention, each in a call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.before_attention = library.vasuki_before_attention
        self.after_attention = library.vasuki_after_attention
        layer, tensor, size = ctypes.POINTER(Layer), ctypes.c_void_p, ctypes.c_int64
        self.before_attention.argtypes = [layer, ctypes.POINTER(Angles), tensor, tensor, size]
        self.after_attention.argtypes = [layer, tensor, tensor, tensor, size, size]
        self.before_attention.restype = self.after_attention.restype = None


class FusedLayer(torch.nn.Module):
    """What takes the place of a layer `y + mlp(norm(y))` of `y = x + attend(norm(x))`, which is its plain twin."""

    input_layernorm: FusedNorm
    post_attention_layernorm: FusedNorm
    mlp: torch.nn.Module

    def __init__(self, layer: Any, kernel: LayerKernel) -> None:
        super().__init__()
        for name in _PARTS:
            setattr(self, name, getattr(layer, name))
        # Models look at what their layers say of themselves, such as the kind of their attention.
        vars(self).update({name: value for name, value in vars(layer).items() if name not in vars(self)})
        self._kernel = kernel
        self._parts: tuple[FusedAttention, GatedMLP] = layer.self_attn, layer.mlp
        self._panels: torch.Tensor = layer.self_attn.qkv_proj.panels
        self._layer = Layer()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepInputs | AttentionProbe | None = None,
        **inert: Any,
    ) -> torch.Tensor:
        """`[1, num_tokens, hidden_size]` -> the same shape."""
        x, layer, (own, mlp) = hidden_states[0].contiguous(), self.pointers(), self._parts
        num_tokens = len(x)
        cos, sin = (angles.contiguous() for angles in position_embeddings)
        joined = x.new_empty(num_tokens, layer.qkv.out_features)
        self._kernel.before_attention(layer, Angles.of(cos, sin), x.data_ptr(), joined.data_ptr(), num_tokens)
        query, key, value = joined.view(num_tokens, -1, own.head_dim).split_with_sizes(own.splits, dim=1)
        attended = ragged_attention.attend_or_observe(own, query, key, value, step, own.variant).contiguous()
        y = torch.empty_like(hidden_states)
        whole = self.mlp is mlp
        self._kernel.after_attention(layer, attended.data_ptr(), x.data_ptr(), y.data_ptr(), num_tokens, whole)
        return y if whole else y.add_(self.mlp(self.post_attention_layernorm(y)))  # which skips some tokens

    @property
    def is_plain(self) -> bool:
        """Whether `Layer` says all that its attention wants."""
        return self._parts[0].variant.is_plain

    def pointers(self) -> Layer:
        """The weights where they are now: a streamed layer's move, all together."""
        if self._layer.qkv.panels != self._panels.data_ptr():
            own, mlp = self._parts
            norms = [self.input_layernorm, self.post_attention_layernorm, *own.norms]
            matrices = (own.qkv_proj, own.o_proj, mlp.up_proj, mlp.gate_proj, mlp.down_proj)
            self._layer = Layer(
                *[_Norm.of(norm) for norm in norms],
                *[_Norm()] * (4 - len(norms)),
                *[part.matrix for part in matrices],
                *own.splits[:2],
                own.head_dim,
                own.variant.window or 0,
                own.variant.scaling,
            )
        return self._layer


def fuse_layers(model: torch.nn.Module, kernel: LayerKernel) -> None:
    """Replace the decoder layers of a model whose kernels compute what their twin does on a few tokens."""
    replace_where_equal(model, _is_candidate, lambda layer: FusedLayer(layer, kernel))


def _is_candidate(module: torch.nn.Module) -> bool:
    parts = dict(module.named_children())
    if parts.keys() != _PARTS.keys() or not all(type(parts[name]) is kind for name, kind in _PARTS.items()):
        return False
    own: Any = parts["self_attn"]
    return all(type(norm) is FusedNorm and len(norm.weight) == own.head_dim for norm in own.norms)
