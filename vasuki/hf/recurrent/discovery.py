"""Finds the modules of a model that keep a state, and what they keep, by running it on a few tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from transformers.cache_utils import DynamicCache

from vasuki.base.errors import one_line
from vasuki.hf.attention.probe import observe
from vasuki.hf.attention.ragged_attention import Unsupported
from vasuki.hf.recurrent.recurrent_layer import CACHE_NAMES, RecurrentLayer, RecurrentLayers, State, cache_name

# A module, which layer it is, what it keeps of a row, and what it was given.
_Seen: TypeAlias = tuple[torch.nn.Module, int, list[State], torch.Tensor]


@torch.inference_mode()
def wrap_layers(model: Any) -> RecurrentLayers:
    """Let a model's recurrent layers compute packed chunks from now on.

    Raises Unsupported if they cannot, as those that keep their state elsewhere than in transformers' cache.
    """
    try:
        return RecurrentLayers(tuple([RecurrentLayer(*each) for each in _observed(model)]))
    except (AttributeError, TypeError, LookupError, StopIteration, ValueError) as error:
        raise Unsupported(f"its layers keep their state in a way of their own ({one_line(error)})") from error


def _observed(model: Any) -> list[_Seen]:
    """The modules that keep a state, seen by running the model on a few tokens."""
    cache = _ObservedCache(model.config)
    with _noting(cache, [module for module in model.modules() if hasattr(module, "layer_idx")]):
        observe(model, **{cache_name(model.forward, CACHE_NAMES[::-1]): cache})
    return _seen(cache)


@contextmanager
def _noting(cache: _ObservedCache, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let a cache know which of the modules runs, within a `with` statement."""
    hooks = []
    for module in modules:
        hooks += [module.register_forward_pre_hook(cache.enter, with_kwargs=True)]
        hooks += [module.register_forward_hook(cache.leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _seen(cache: _ObservedCache) -> list[_Seen]:
    return [
        (module, layer, [_state(cache.layers[layer], *each) for each in kept], given)
        for (module, layer), (kept, given) in cache.seen.items()
    ]


def _state(layer: Any, is_conv: bool, index: int) -> State:
    tensor = (layer.conv_states if is_conv else layer.recurrent_states)[index]
    return State(is_conv, index, tuple(tensor.shape[1:]), tensor.dtype)


class _ObservedCache(DynamicCache):  # type: ignore[misc]
    """Notes which module updates which layer's state, and what that module was given."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        # By module and layer: (is_conv, index) of the states that it updates, and what it was given.
        self.seen: dict[tuple[torch.nn.Module, int], tuple[list[tuple[bool, int]], torch.Tensor]] = {}
        self._inside: list[tuple[torch.nn.Module, torch.Tensor]] = []  # the module that runs is the last

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        self._inside.append((module, args[0] if args else arguments["hidden_states"]))

    def leave(self, *_: Any) -> None:
        self._inside.pop()

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **arguments: Any) -> Any:
        self._note(layer_idx, True, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **arguments)

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, state_idx: int = 0, **arguments: Any) -> Any:
        self._note(layer_idx, False, state_idx)
        return super().update_recurrent_state(states, layer_idx, state_idx, **arguments)

    def _note(self, layer: int, is_conv: bool, index: int) -> None:
        module, given = self._inside[-1]
        self.seen.setdefault((module, layer), ([], given))[0].append((is_conv, index))
