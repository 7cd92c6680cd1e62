"""Attention layers of a model with activations in float32 on a CPU: one product over packed weights gives queries, keys
and values, and they are rotated where they lie."""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from vasuki.hf.cpu.packed_linear import LinearKernel, PackedLinear
from vasuki.hf.fused.attention import fuse_attention


class Rotary:
    """Rotates heads in place. Its plain twin is `apply_rotary_pos_emb` of transformers' models."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.vasuki_rotate
        self._function.restype = None
        self._function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 5

    def __call__(self, heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The first `count` of heads `[num_tokens, num_heads, head_dim]`, by angles `[num_tokens, rotated]`."""
        num_tokens, _, head_dim = heads.shape
        self._function(
            heads.data_ptr(),
            cos.contiguous().data_ptr(),
            sin.contiguous().data_ptr(),
            num_tokens,
            heads.stride(0),
            count,
            head_dim,
            cos.shape[-1],
        )
        return heads[:, :count]


def _joined(kernel: LinearKernel, layers: list[PackedLinear]) -> PackedLinear:
    """One layer with the outputs of all."""
    biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    outputs = sum(layer.out_features for layer in layers)
    linear = torch.nn.Linear(layers[0].in_features, outputs, bias=bool(biases), device="meta")
    linear.weight = torch.nn.Parameter(torch.cat([layer.unpacked() for layer in layers]), requires_grad=False)
    if biases:
        linear.bias = torch.nn.Parameter(torch.cat(biases), requires_grad=False)
    return PackedLinear(linear, kernel)


def fuse_packed_attention(model: torch.nn.Module, linear: LinearKernel, rotate: Rotary) -> None:
    """Replace a model's attention layers whose projections are packed."""
    fuse_attention(model, PackedLinear, partial(_joined, linear), rotate)
