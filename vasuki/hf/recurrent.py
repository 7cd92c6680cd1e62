"""Layers that carry a state from token to token instead of attending to all that came before: gated delta nets, Mamba,
short convolutions.

What such a layer keeps of a row is of one size, however long the row is. Rows that run have the first slots, so that
those of a step lie side by side, but for a few, and are computed where they lie:

    tensors[layer][i]   [num_slots, ...]

The layer itself stays as its authors wrote it. It takes rows of equal length, `[rows, tokens, hidden_size]`, and a
cache with what they left behind. So a step's packed chunks pass it in groups: all decodes, prompts of equal length.

    packed    b7 c3 | a0 a1 a2 | d0 d1 d2 | e4 e5
    groups    [b7] with their     [a0 a1 a2] from     [e4 e5] with its
              [c3] states         [d0 d1 d2] nothing          state
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from vasuki.batch import Batch
from vasuki.errors import one_line
from vasuki.hf.attention import Unsupported
from vasuki.hf.probe import observe
from vasuki.hf.recurrent_functions import Function, by_torch
from vasuki.hf.transfer import to_device
from vasuki.lengths import Ints
from vasuki.sequence import Sequence as Row
from vasuki.sequence import Status

_SCAN_TOKENS = 256  # that torch's operators fill prompts up to, at most, and what they hold for a token of it is large
_GROUP_TOKENS = 4096  # of prompts that are computed side by side, so filled up
_CACHE_NAMES = ("cache_params", "past_key_values")  # what layers call the cache that they are given


class State(NamedTuple):
    """One tensor of what a layer keeps of a row."""

    is_conv: bool  # the last inputs of a convolution; otherwise what the recurrence has come to
    number: int  # layers may have several of a kind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Group(NamedTuple):
    """Chunks of a step that are equally long, of rows whose slots follow one another."""

    tokens: torch.Tensor  # int64 [rows * length], their places in the packed batch, row by row
    slots: slice  # of the rows
    is_fresh: bool  # they begin their rows: nothing came before

    @property
    def num_rows(self) -> int:
        return int(self.slots.stop - self.slots.start)


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
        names = inspect.signature(self._plain).parameters
        self._cache_name = next(name for name in _CACHE_NAMES if name in names)
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
        """`[rows, tokens, hidden_size]` -> the same, behind what is kept, which goes on."""
        pieces = (rows,) if is_fresh or self.continues else torch.split(rows, 1, dim=1)
        cache = _OneLayerCache(kept)
        with by_torch(self._module) if rows.device.type == "cpu" else nullcontext():
            return torch.cat([self._plain(piece, **{self._cache_name: cache}) for piece in pieces], dim=1)

    def _continues(self, tokens: torch.Tensor) -> bool:
        """Whether several tokens depend on the recurrence before them, of `[1, tokens, hidden_size]`."""
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
        """What the rows of a group left behind, as transformers keeps it, which writes in its place."""
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
        """What they keep of a row, together."""
        return sum(state.num_bytes for layer in self.layers for state in layer.states)


class StateCache:
    """What a model's recurrent layers keep of the rows that run.

    Args:
        layers: of the model.
        num_slots: rows that run at the same time, at most.
        device: where they compute.
    """

    def __init__(self, layers: RecurrentLayers, num_slots: int, device: torch.device) -> None:
        self._layers = layers
        self._device = device
        self._rows: list[Row] = []  # by slot: those that run have the first ones
        # Not zeroed: what a row finds in its slot, it wrote there.
        self.tensors = [
            [torch.empty(num_slots, *state.shape, dtype=state.dtype, device=device) for state in layer.states]
            for layer in layers.layers
        ]

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Within, the model computes this batch."""
        groups = self._groups(batch)
        try:
            for layer, tensors in zip(self._layers.layers, self.tensors, strict=True):
                layer.begin(tensors, groups)
            yield
        finally:
            for layer in self._layers.layers:
                layer.end()

    def _groups(self, batch: Batch) -> list[Group]:
        slot_of = self._slots([chunk.sequence for chunk in batch.chunks])
        alike: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)  # (slot, first token) of each chunk
        first = 0
        for chunk in batch.chunks:
            alike[chunk.num_tokens, chunk.start == 0].append((slot_of[chunk.sequence], first))
            first += chunk.num_tokens
        groups = []
        for (length, is_fresh), chunks in alike.items():
            slots, firsts = np.array(sorted(chunks)).T
            filled_up = -(-length // _SCAN_TOKENS) * _SCAN_TOKENS
            is_prompt = is_fresh or length > 1
            for run in _runs(slots, max(1, _GROUP_TOKENS // filled_up) if is_prompt else len(slots)):
                tokens = (firsts[run][:, None] + np.arange(length)).reshape(-1)
                (on_device,) = to_device(self._device, tokens)
                groups.append(Group(on_device, slice(int(slots[run[0]]), int(slots[run[-1]]) + 1), is_fresh))
        return groups

    def _slots(self, rows: list[Row]) -> dict[Row, int]:
        """The slot of each row. Of those that no longer run, the last rows take the place."""
        coming = set(rows)
        for slot in range(len(self._rows) - 1, -1, -1):
            if self._rows[slot].status is not Status.RUNNING and self._rows[slot] not in coming:
                last = self._rows.pop()
                if slot < len(self._rows):
                    self._rows[slot] = last
                    for tensor in chain.from_iterable(self.tensors):
                        tensor[slot].copy_(tensor[len(self._rows)])
        coming -= set(self._rows)
        self._rows += [row for row in rows if row in coming]
        return {row: slot for slot, row in enumerate(self._rows)}


def _runs(slots: Ints, most: int) -> list[Ints]:
    """Places of rising slots that follow one another, at most so many together."""
    runs = np.split(np.arange(len(slots)), np.flatnonzero(np.diff(slots) > 1) + 1)
    return [run[first : first + most] for run in runs for first in range(0, len(run), most)]


@torch.inference_mode()
def take_over(model: Any) -> RecurrentLayers:
    """Let a model's recurrent layers compute packed chunks from now on.

    Raises Unsupported if they cannot, as those that keep their state elsewhere than in transformers' cache.
    """
    try:
        return RecurrentLayers(tuple(RecurrentLayer(*each) for each in _observed(model)))
    except (AttributeError, TypeError, LookupError, StopIteration, ValueError) as error:
        raise Unsupported(f"its layers keep their state in a way of their own ({one_line(error)})") from error


def _observed(model: Any) -> list[tuple[torch.nn.Module, int, list[State], torch.Tensor]]:
    """The modules that keep a state, seen by running the model on a few tokens: which layer they are, what they keep
    and what they were given."""
    cache = _ObservedCache(model.config)
    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    hooks = [module.register_forward_pre_hook(cache.enter, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(cache.leave) for module in modules]
    names = inspect.signature(model.forward).parameters
    try:
        observe(model, **{next(name for name in reversed(_CACHE_NAMES) if name in names): cache})
    finally:
        for hook in hooks:
            hook.remove()
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
