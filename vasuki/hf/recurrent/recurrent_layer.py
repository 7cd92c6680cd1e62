"""A recurrent layer's forward over a step's packed chunks, group by group."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from vasuki.hf.attention.inputs import Group
from vasuki.hf.attention.ragged_attention import Unsupported
from vasuki.hf.kernels.recurrent_functions import Function, by_torch

CACHE_NAMES = ("cache_params", "past_key_values")  # what layers and models call the cache that they are given


def cache_name(function: Function, names: Sequence[str] = CACHE_NAMES) -> str:
    """The first of the names by which a function takes a cache. Raises StopIteration if there is none."""
    taken = inspect.signature(function).parameters
    return next(name for name in names if name in taken)


class State(NamedTuple):
    """A tensor among those that a layer keeps of a row."""

    is_conv: bool  # the last inputs of a convolution; otherwise what the recurrence has come to
    number: int  # layers may have several of a kind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class RecurrentLayer:
    """Stands in for the forward of a model's recurrent layer.

    Args:
        module: the layer.
        index: its number in the model.
        states: what it keeps of a row.
        tokens: `[1, tokens, hidden_size]` to try it with.

    Attributes:
        continues: whether it can go on from a state with several tokens; some implementations of Mamba go token by
            token from there.
    """

    def __init__(self, module: Any, index: int, states: Sequence[State], tokens: torch.Tensor) -> None:
        self.index = index
        self.states = tuple(states)
        self._num_states = 1 + max(state.number for state in self.states)
        self._module = module
        before = getattr(module.forward, "__self__", None)  # of a model that is prepared again
        self._plain: Function = before._plain if isinstance(before, RecurrentLayer) else module.forward
        self._cache_name = cache_name(self._plain)
        self._tensors: list[torch.Tensor] = []  # of the step under way, each `[num_slots, ...]`
        self._groups: Sequence[Group] = ()
        self.continues = self._continues(tokens)
        module.forward = self.forward

    def begin(self, tensors: list[torch.Tensor], groups: Sequence[Group]) -> None:
        """Compute the packed chunks of a step from now on."""
        assert self._module.forward.__self__ is self, "the model was prepared again, or copied"
        self._tensors, self._groups = tensors, groups

    def end(self) -> None:
        """Hold on to nothing of the step."""
        self._tensors, self._groups = [], ()

    def forward(self, hidden_states: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        """`[1, num_tokens, hidden_size]` -> the same; outside of steps, as the layer always does."""
        if not self._groups:
            return self._plain(hidden_states, *args, **arguments)
        packed, output = hidden_states[0], torch.empty_like(hidden_states)
        for group in self._groups:
            rows = packed.index_select(0, group.tokens).view(group.num_rows, -1, packed.shape[-1])
            computed = self._compute(rows, self._kept(group), group.is_fresh)
            output[0].index_copy_(0, group.tokens, computed.flatten(0, 1))
        return output

    def _compute(self, rows: torch.Tensor, kept: LinearAttentionLayer, is_fresh: bool) -> torch.Tensor:
        """Run the layer from each row's state, and update that state: `[rows, tokens, hidden_size]` -> the same."""
        pieces = (rows,) if is_fresh or self.continues else torch.split(rows, 1, dim=1)
        cache = _OneLayerCache(kept)
        with by_torch(self._module) if rows.device.type == "cpu" else nullcontext():
            return torch.cat([self._plain(piece, **{self._cache_name: cache}) for piece in pieces], dim=1)

    def _continues(self, tokens: torch.Tensor) -> bool:
        """Return whether several tokens depend on the recurrence before them, of `[1, tokens, hidden_size]`."""
        first, second = torch.tensor_split(tokens, 2, dim=1)
        answers = []
        for change in (0.0, 1e3):
            kept = LinearAttentionLayer(number_of_states=self._num_states)
            self._compute(first, kept, is_fresh=True)
            recurrent = [state for state in kept.recurrent_states.values() if state is not None]
            for state in recurrent:
                state += change
            answers.append(self._compute(second, kept, is_fresh=True))
        return not recurrent or not torch.equal(*answers)

    def _kept(self, group: Group) -> LinearAttentionLayer:
        """Return what the rows of a group left behind, in transformers' form, which is written in place."""
        kept = LinearAttentionLayer(number_of_states=self._num_states)
        for state, tensor in zip(self.states, self._tensors, strict=True):
            held = tensor[group.slots]
            kept.device, kept.dtype = held.device, held.dtype
            kept.has_previous_state[state.number] = not group.is_fresh
            if state.is_conv:
                kept.conv_states[state.number], kept.is_conv_states_initialized[state.number] = held, True
                kept.conv_kernel_size[state.number] = state.shape[-1]
            else:
                kept.recurrent_states[state.number], kept.is_recurrent_states_initialized[state.number] = held, True
        return kept


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """All of a model."""

    layers: tuple[RecurrentLayer, ...]

    @property
    def indices(self) -> set[int]:
        """Their numbers in the model."""
        return {layer.index for layer in self.layers}

    @property
    def bytes_per_row(self) -> int:
        """Bytes that all recurrent layers keep of a row."""
        return sum(state.num_bytes for layer in self.layers for state in layer.states)


class _OneLayerCache(Cache):  # type: ignore[misc]
    """A cache of the layer at hand alone, whatever its number."""

    def __init__(self, layer: LinearAttentionLayer) -> None:
        super().__init__(layers=_Everywhere(layer))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise Unsupported("its recurrent layers ask for the length of a row")


class _Everywhere(list[Any]):
    """Has one thing at every place."""

    def __init__(self, thing: Any) -> None:
        super().__init__([thing])

    def __getitem__(self, _: Any) -> Any:
        return super().__getitem__(0)

    def __len__(self) -> int:
        return sys.maxsize
