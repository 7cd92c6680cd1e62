"""What a model asks of its attention, seen by running it on a few tokens.

Nothing is attended to meanwhile: each layer's call is noted, and answered with its queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from vasuki.hf import attention
from vasuki.hf.attention import Unsupported
from vasuki.hf.kv_cache import KVLayout
from vasuki.hf.plain_attention import Variant


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


def observe(model: Any) -> dict[torch.nn.Module, Observation]:
    """Run the model on a few tokens to see what its layers ask of their attention. Raises Unsupported by name."""
    observed: dict[torch.nn.Module, Observation] = {}

    def note(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: Variant
    ) -> torch.Tensor:
        if value.shape[-1] != query.shape[-1]:
            raise Unsupported(f"its value heads have {value.shape[-1]} dimensions and its keys {query.shape[-1]}")
        observed[module] = Observation(query, key, value, variant)
        return observed[module].output

    attention.observer = note
    try:
        tokens = torch.arange(4, device=model.device).unsqueeze(0)
        with torch.inference_mode():
            model(input_ids=tokens, position_ids=tokens, use_cache=False)
    finally:
        attention.observer = None
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
