"""Attention layers of a model with activations in float32 on a CPU: one product gives queries, keys and values, and
they are rotated where they lie. In a step of few rows, a layer's own dozens of small operators take as long as its
products.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from vasuki.hf.attention import ragged_attention
from vasuki.hf.attention.inputs import StepInputs
from vasuki.hf.attention.plain_attention import Variant
from vasuki.hf.attention.probe import Observation, observe_calls, observe_layer
from vasuki.hf.attention.ragged_attention import AttentionProbe
from vasuki.hf.cpu.packed_linear import LinearKernel, PackedLinear
from vasuki.hf.cpu.replace import replace_modules

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_LARGE = 1e3  # times what a norm gives: some layers clip what they project
_PARTS = ({*_PROJECTIONS, "o_proj"}, {*_PROJECTIONS, "o_proj", "q_norm", "k_norm"})


class Rotary:
    """Rotates heads in place. Its plain twin is `apply_rotary_pos_emb` of transformers' models."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.vasuki_rotate
        self._function.restype = None
        self._function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 5

    def __call__(self, heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
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


class FusedAttention(torch.nn.Module):
    """What takes the place of a layer `o(attend(rotate(q(x)), rotate(k(x)), v(x)))`, which is its plain twin.

    Args:
        layer: the twin, with packed projections; it may norm the heads of queries and keys.
        head_dim: numbers of a head.
        variant: what it asks of its attention.
    """

    def __init__(self, layer: Any, head_dim: int, variant: Variant, linear: LinearKernel, rotate: Rotary) -> None:
        super().__init__()
        self.qkv_proj = _joined([getattr(layer, name) for name in _PROJECTIONS], linear)
        self.o_proj = layer.o_proj
        self.norms = torch.nn.ModuleList([layer.q_norm, layer.k_norm] if hasattr(layer, "q_norm") else [])
        self.layer_idx = layer.layer_idx
        self.variant = variant
        self.head_dim = head_dim
        self.splits = [getattr(layer, name).out_features // head_dim for name in _PROJECTIONS]
        self._rotate = rotate

    def project(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """`[1, num_tokens, hidden_size]` -> queries, keys and values `[num_tokens, num_(kv_)heads, head_dim]`."""
        heads = self.qkv_proj(hidden_states)[0].unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split(self.splits, dim=1)
        for norm, states in zip(self.norms, (query, key), strict=False):
            states.copy_(norm(states))
        cos, sin = position_embeddings
        self._rotate(heads, query.shape[1] + key.shape[1], cos[0], sin[0])
        return query, key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepInputs | AttentionProbe | None = None,
        **inert: Any,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = self.project(hidden_states, position_embeddings)
        output = ragged_attention.attend_or_observe(self, query, key, value, step, self.variant)
        return self.o_proj(output.flatten(1).unsqueeze(0)), None


def _joined(layers: list[PackedLinear], kernel: LinearKernel) -> PackedLinear:
    """One layer with the outputs of all."""
    biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    outputs = sum(layer.out_features for layer in layers)
    linear = torch.nn.Linear(layers[0].in_features, outputs, bias=bool(biases), device="meta")
    linear.weight = torch.nn.Parameter(torch.cat([layer.unpacked() for layer in layers]), requires_grad=False)
    if biases:
        linear.bias = torch.nn.Parameter(torch.cat(biases), requires_grad=False)
    return PackedLinear(linear, kernel)


@torch.inference_mode()
def fuse_attention(model: torch.nn.Module, linear: LinearKernel, rotate: Rotary) -> None:
    """Replace a model's attention layers: those with such parts that compute on a few tokens what their twin does."""
    calls: dict[torch.nn.Module, tuple[dict[str, Any], Any]] = {}

    def remember(layer: torch.nn.Module, args: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> None:
        if not args:
            calls[layer] = arguments, output

    observed = observe_calls(model, filter(_is_candidate, model.modules()), remember)

    def twin(layer: torch.nn.Module) -> FusedAttention | None:
        call, seen = calls.pop(layer, None), observed.pop(layer, None)
        if call is None or seen is None:
            return None
        arguments, output = call
        fused = FusedAttention(layer, seen.query.shape[-1], seen.variant, linear, rotate)
        if not _agree(fused, seen, arguments, output):
            return None
        large = {**arguments, "hidden_states": _LARGE * arguments["hidden_states"]}
        seen, output = observe_layer(layer, large)
        return fused if _agree(fused, seen, large, output, _LARGE) else None

    replace_modules(model, twin)


def _is_candidate(module: torch.nn.Module) -> bool:
    parts = dict(module.named_children())
    projections = [parts.get(name) for name in (*_PROJECTIONS, "o_proj")]
    if set(parts) not in _PARTS or not hasattr(module, "layer_idx"):
        return False
    return all(isinstance(part, PackedLinear) for part in projections)


def _agree(
    fused: FusedAttention, seen: Observation, arguments: dict[str, Any], output: Any, scale: float = 1.0
) -> bool:
    """Whether the twin computes what the layer handed to its attention, and what it answered."""

    def close(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5 * scale)

    try:
        projected = fused.project(arguments["hidden_states"], arguments["position_embeddings"])
    except (KeyError, TypeError, RuntimeError):  # it is called with something else, or its parts do not fit together
        return False
    if not all(map(close, projected, (seen.query, seen.key, seen.value))):
        return False
    answer = fused.o_proj(seen.output.flatten(1).unsqueeze(0))
    return isinstance(output, tuple) and len(output) == 2 and close(answer, output[0])
