"""Recurrent layers that compute by kernels of ours, which have the place of transformers' functions meanwhile."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from vasuki.hf.cpu.recurrences import Recurrences
from vasuki.hf.kernels.recurrent_functions import Function, called_by, in_place

_FORGETS = "mamba_selective_scan"  # is not told what came before


class FusedRecurrence:
    """A layer's forward, within which kernels have the place of some functions.

    Args:
        module: the layer.
        forward: its own.
        functions: by their names.
    """

    def __init__(self, module: Any, forward: Function, functions: Mapping[str, Function]) -> None:
        self.__wrapped__ = forward  # whose signature this has
        self._module = module
        self._functions = functions

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        with in_place(type(self._module), self._told_of_before(arguments.get("cache_params"))):
            return self.__wrapped__(*args, **arguments)

    def _told_of_before(self, cache: Any) -> Mapping[str, Function]:
        """The functions, where one that needs it knows the state that a cache holds of the rows."""
        if cache is None or _FORGETS not in self._functions:
            return self._functions
        layer = cache.layers[self._module.layer_idx]
        before = layer.recurrent_states[0] if layer.has_previous_state[0] else None
        return {**self._functions, _FORGETS: functools.partial(self._functions[_FORGETS], initial_state=before)}


def fuse_recurrences(model: torch.nn.Module, kernels: Recurrences) -> None:
    """Let a model's layers compute by the kernels, where they do it by functions that these know."""
    known: dict[str, Function] = {
        "torch_recurrent_gated_delta_rule": kernels.delta_rule,
        "torch_chunk_gated_delta_rule": kernels.delta_rule,
        "recurrent_kimi_delta_attention": kernels.delta_rule,
        "chunk_kimi_delta_attention": kernels.delta_rule,
        "mamba2_selective_state_update": kernels.mamba_2,
        "mamba2_chunk_scan": kernels.mamba_2_prompts,
        "mamba_selective_state_update": kernels.mamba,
        _FORGETS: kernels.mamba_prompts,
        "causal_conv1d_fn": kernels.convolution,
        "causal_conv1d_update": kernels.convolution_step,
    }
    for module in model.modules():
        kind = type(module)
        if names := called_by(kind, known):
            own = inspect.unwrap(kind.forward).__globals__
            functions = {name: functools.partial(known[name], inspect.unwrap(own[name])) for name in names}
            module.forward = FusedRecurrence(module, module.forward, functions)
