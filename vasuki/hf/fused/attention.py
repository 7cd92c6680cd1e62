"""Attention layers with one product for queries, keys and values, which are rotated together. In a step of few rows, a
layer's own dozens of small operators take as long as its products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from vasuki.hf.attention import ragged_attention
from vasuki.hf.attention.inputs import StepInputs
from vasuki.hf.attention.plain_attention import Variant
from vasuki.hf.attention.probe import Observation, observe_calls, observe_layer
from vasuki.hf.attention.ragged_attention import AttentionProbe
from vasuki.hf.fused.replace import close, replace_modules
from vasuki.hf.kernels.float8 import UNSCALED, Scales
from vasuki.hf.kv.kv_cache import KVCache, KVLayout

Join = Callable[[list[Any]], torch.nn.Module]  # linear layers -> one with the outputs of all
# Heads `[num_tokens, num_heads, head_dim]`, which may be overwritten, how many of them turn, and cosines and sines of
# their angles `[num_tokens, rotated]` -> those heads, turned. The plain twin is transformers' `apply_rotary_pos_emb`.
Rotate = Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor], torch.Tensor]

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_LARGE = 1e3  # times what a norm gives: some layers clip what they project
_PARTS = (
    {*PROJECTIONS, "o_proj"},
    {*PROJECTIONS, "o_proj", "q_norm", "k_norm"},
    {"qkv_proj", "o_proj"},  # in this order
)


class HeadNorms(NamedTuple):
    """RMS norms of each head of queries and of keys."""

    query: torch.Tensor  # weights [head_dim]
    key: torch.Tensor
    eps: float
    offset: float  # what is added to the weights


class TurnAndStore(Protocol):
    """Norms and turns heads while it writes the cache: see `kernels.by_triton.layer`."""

    def __call__(
        self,
        heads: torch.Tensor,
        num_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: torch.Tensor,
        cache: torch.Tensor,
        rotated: int,
        norms: HeadNorms | None,
        scales: Scales,
        /,
    ) -> torch.Tensor: ...


class FusedAttention(torch.nn.Module):
    """What takes the place of a layer `o(attend(rotate(q(x)), rotate(k(x)), v(x)))`, which is its plain twin.

    Args:
        layer: the twin; it may norm queries and keys, head by head or all together.
        seen: what it asks of its attention.
        join: makes one layer of its projections.
        rotate: turns heads.
        turn_and_store: does it while it writes the cache, if there is such a kernel.
        repeats_angles: whether both halves of a head turn by the angles that the layer is given, not each by a half.
    """

    def __init__(
        self,
        layer: Any,
        seen: Observation,
        join: Join,
        rotate: Rotate,
        turn_and_store: TurnAndStore | None = None,
        repeats_angles: bool = False,
    ) -> None:
        super().__init__()
        joined = hasattr(layer, "qkv_proj")
        self.qkv_proj = layer.qkv_proj if joined else join([getattr(layer, name) for name in PROJECTIONS])
        self.o_proj = layer.o_proj
        self.norms = torch.nn.ModuleList([layer.q_norm, layer.k_norm] if hasattr(layer, "q_norm") else [])
        self.layer_idx = layer.layer_idx
        self.sinks = seen.variant.sinks  # a parameter, as a rule, which moves with the others
        self.head_dim = seen.query.shape[-1]
        self.splits = [states.shape[1] for states in (seen.query, seen.key, seen.value)]
        self._variant, self._repeats_angles = seen.variant, repeats_angles
        self._rotate, self.turn_and_store = rotate, turn_and_store

    @property
    def variant(self) -> Variant:
        """The options that the layer asks of its attention."""
        return self._variant if self.sinks is None else replace(self._variant, sinks=self.sinks)

    @property
    def stores(self) -> bool:
        """Whether it writes the cache itself."""
        return self.turn_and_store is not None

    @property
    def head_norms(self) -> HeadNorms | None:
        """Its norms, where they are of single heads and differ only in weights."""
        parts: list[Any] = [norm for norm in self.norms if hasattr(norm, "offset")]
        if len(parts) < 2:
            return None
        query, key = parts
        norms = HeadNorms(query.weight, key.weight, query.eps, query.offset)
        are_equal = (query.eps, query.offset) == (key.eps, key.offset)
        return norms if are_equal and len(norms.query) == len(norms.key) == self.head_dim else None

    def heads(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[1, num_tokens, hidden_size]` -> queries, keys and values `[num_tokens, heads of all, head_dim]`."""
        heads: torch.Tensor = self.qkv_proj(hidden_states)[0].unflatten(-1, (-1, self.head_dim))
        return heads

    def norm(self, heads: torch.Tensor) -> torch.Tensor:
        """Norm the queries and keys among such heads, in place."""
        norms: list[Any] = list(self.norms)
        for norm, states in zip(norms, heads.split_with_sizes(self.splits, dim=1), strict=False):
            whole = states if len(norm.weight) == self.head_dim else states.flatten(1)
            states.copy_(norm(whole).view_as(states))
        return heads

    def project(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """`[1, num_tokens, hidden_size]` -> queries, keys and values `[num_tokens, num_(kv_)heads, head_dim]`."""
        heads = self.norm(self.heads(hidden_states))
        cos, sin = (angles[0] for angles in position_embeddings)
        if self._repeats_angles:
            cos, sin = (torch.cat([angles, angles], dim=-1) for angles in (cos, sin))
        query, key = self._rotate(heads, sum(self.splits[:2]), cos, sin).split_with_sizes(self.splits[:2], dim=1)
        return query, key, heads[:, sum(self.splits[:2]) :]

    def project_into(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        cache_layer: torch.Tensor,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        """Return queries alone; keys and values are in the cache then, see `TurnAndStore`."""
        assert self.turn_and_store is not None
        heads, norms = self.heads(hidden_states), self.head_norms
        if norms is None:
            heads = self.norm(heads)
        cos, sin = (angles[0] for angles in position_embeddings)
        rotated = cos.shape[-1] * (1 + self._repeats_angles)
        return self.turn_and_store(heads, self.splits[0], cos, sin, rows, cache_layer, rotated, norms, scales)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepInputs | AttentionProbe | None = None,
        **inert: Any,
    ) -> tuple[torch.Tensor, None]:
        if self.stores and isinstance(step, StepInputs):
            layer = self.layer_idx
            with step.at_layer(layer) as here:
                cache, scales = here.cache.layers[layer], here.cache.layout.scales_of(layer)
                query = self.project_into(hidden_states, position_embeddings, here.rows, cache, scales)
                output = ragged_attention.attend_stored(query, layer, here, self.variant)
        else:
            query, key, value = self.project(hidden_states, position_embeddings)
            output = ragged_attention.attend_or_observe(self, query, key, value, step, self.variant)
        return self.o_proj(output.flatten(1).unsqueeze(0)), None


@torch.inference_mode()
def fuse_attention(
    model: torch.nn.Module,
    linear: type[torch.nn.Module],
    join: Join,
    rotate: Rotate,
    turn_and_store: TurnAndStore | None = None,
) -> None:
    """Replace a model's attention layers: those that project by linear layers of that type and compute on a few tokens
    what their twin does."""
    calls: dict[torch.nn.Module, tuple[dict[str, Any], Any]] = {}

    def remember(layer: torch.nn.Module, args: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> None:
        if not args:
            calls[layer] = arguments, output

    observed = observe_calls(model, (each for each in model.modules() if _is_candidate(each, linear)), remember)

    def twin(layer: torch.nn.Module) -> FusedAttention | None:
        call, seen = calls.pop(layer, None), observed.pop(layer, None)
        if call is None or seen is None:
            return None
        arguments, output = call
        large = {**arguments, "hidden_states": _LARGE * arguments["hidden_states"]}
        for repeats_angles in (False, True):
            fused = FusedAttention(layer, seen, join, rotate, turn_and_store, repeats_angles)
            if _agree(fused, seen, arguments, output):
                seen, output = observe_layer(layer, large)
                return fused if _agree(fused, seen, large, output, _LARGE) else None
        return None

    replace_modules(model, twin)


@torch.inference_mode()
def store_as_they_project(model: torch.nn.Module) -> bool:
    """Whether layers that write the cache themselves put there, of a few tokens, what they else would hand over."""
    agree = []

    def compare(layer: FusedAttention, args: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> None:
        projected = layer.project(arguments["hidden_states"], arguments["position_embeddings"])
        agree.append(_stores_equally(layer, arguments, projected, 1.0))

    observe_calls(
        model, (each for each in model.modules() if isinstance(each, FusedAttention) and each.stores), compare
    )
    return all(agree)


def _is_candidate(module: torch.nn.Module, linear: type[torch.nn.Module]) -> bool:
    parts: dict[str, Any] = dict(module.named_children())
    if set(parts) not in _PARTS or not hasattr(module, "layer_idx"):
        return False
    projections = [part for name, part in parts.items() if name.endswith("_proj")]
    if any(type(part) is not linear for part in projections):
        return False
    return len({part.bias is None for part in projections if part is not parts["o_proj"]}) == 1


def _agree(
    fused: FusedAttention, seen: Observation, arguments: dict[str, Any], output: Any, scale: float = 1.0
) -> bool:
    """Whether the twin computes what the layer handed to its attention, and what it answered."""
    try:
        projected = fused.project(arguments["hidden_states"], arguments["position_embeddings"])
    except (KeyError, TypeError, RuntimeError):  # it is called with something else, or its parts do not fit together
        return False
    if not all(close(*pair, scale) for pair in zip(projected, (seen.query, seen.key, seen.value), strict=True)):
        return False
    if fused.stores and not _stores_equally(fused, arguments, projected, scale):
        return False
    answer = fused.o_proj(seen.output.flatten(1).unsqueeze(0))
    return isinstance(output, tuple) and len(output) == 2 and close(answer, output[0], scale)


def _stores_equally(
    fused: FusedAttention, arguments: dict[str, Any], projected: tuple[torch.Tensor, ...], scale: float
) -> bool:
    """Whether the queries that it returns, and what it puts into a cache, are what it projects."""
    query, key, value = projected
    cache = KVCache(KVLayout.uniform(1, key.shape[1], key.shape[2], key.dtype), 3, len(key), key.device)
    rows = cache.rows_of_slots(torch.arange(len(key), device=key.device) + len(key))  # the second block
    turned = fused.project_into(arguments["hidden_states"], arguments["position_embeddings"], rows, cache.layers[0])
    before, (keys, values), after = cache.layers[0]
    if before.any() or after.any():
        return False
    return close(turned, query, scale) and close(keys, key, scale) and close(values, value, scale)
