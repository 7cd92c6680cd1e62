"""The states of running rows in recurrent layers, slot by slot, and the groups that a step's chunks make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch

from vasuki.base.arrays import Ints
from vasuki.engine.batch import Batch
from vasuki.engine.sequence import Sequence as Row
from vasuki.engine.sequence import Status
from vasuki.hf.attention.inputs import Group, Passing
from vasuki.hf.kernels.transfer import to_device
from vasuki.hf.recurrent.recurrent_layer import RecurrentLayers

_SCAN_TOKENS = 256  # that torch's operators fill prompts up to, at most, and what they hold for a token of it is large
_GROUP_TOKENS = 4096  # of prompts that are computed side by side, so filled up


class StateCache:
    """The states that a model's recurrent layers keep of running rows.

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
    def within(self, groups: Sequence[Group]) -> Iterator[None]:
        """Let the model compute a step whose rows pass like this within a `with` statement."""
        try:
            for layer, tensors in zip(self._layers.layers, self.tensors, strict=True):
                layer.begin(tensors, groups)
            yield
        finally:
            for layer in self._layers.layers:
                layer.end()

    @contextmanager
    def unchanged(self, rows: int) -> Iterator[Callable[[], None]]:
        """A context whose end, and what it yields whenever it is called, brings back the states of the first slots."""
        kept = [[tensor[:rows].clone() for tensor in tensors] for tensors in self.tensors]

        def bring_back() -> None:
            for now, before in zip(chain.from_iterable(self.tensors), chain.from_iterable(kept), strict=True):
                now[:rows].copy_(before)

        try:
            yield bring_back
        finally:
            bring_back()

    def passing(self, batch: Batch) -> tuple[Passing, ...]:
        """How a batch's rows pass, whose states have their slots from now on."""
        slot_of = self._slots([chunk.sequence for chunk in batch.chunks])
        by_length: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)  # (slot, first token)
        first = 0
        for chunk in batch.chunks:
            by_length[chunk.num_tokens, chunk.start == 0].append((slot_of[chunk.sequence], first))
            first += chunk.num_tokens
        groups = []
        for (length, is_fresh), chunks in by_length.items():
            slots, firsts = np.array(sorted(chunks)).T
            filled_up = -(-length // _SCAN_TOKENS) * _SCAN_TOKENS
            is_prompt = is_fresh or length > 1
            for run in _runs(slots, max(1, _GROUP_TOKENS // filled_up) if is_prompt else len(slots)):
                tokens = (firsts[run][:, None] + np.arange(length)).reshape(-1)
                of_run = slice(int(slots[run[0]]), int(slots[run[-1]]) + 1)
                groups.append(Passing(tokens, of_run, is_fresh, of_run == slice(0, len(self._rows))))
        return tuple(groups)

    def _slots(self, rows: list[Row]) -> dict[Row, int]:
        """The slot of each row. Of those that no longer run, the last rows take the place."""
        coming = set(rows)
        origins = list(range(len(self._rows)))  # the slot that each slot's state is in
        for slot in range(len(self._rows) - 1, -1, -1):
            if self._rows[slot].status is not Status.RUNNING and self._rows[slot] not in coming:
                last, origin = self._rows.pop(), origins.pop()
                if slot < len(self._rows):
                    self._rows[slot], origins[slot] = last, origin
        self._move([(origin, slot) for slot, origin in enumerate(origins) if origin != slot])
        coming -= set(self._rows)
        self._rows += [row for row in rows if row in coming]
        return {row: slot for slot, row in enumerate(self._rows)}

    def _move(self, moves: list[tuple[int, int]]) -> None:
        """Move states `(from slot, to slot)`, in one copy for each tensor."""
        if moves:
            sources, targets = to_device(self._device, *np.array(moves).T)
            for tensor in chain.from_iterable(self.tensors):
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def _runs(slots: Ints, most: int) -> list[Ints]:
    """Places of rising slots that follow one another, at most `most` together."""
    runs = np.split(np.arange(len(slots)), np.flatnonzero(np.diff(slots) > 1) + 1)
    return [run[first : first + most] for run in runs for first in range(0, len(run), most)]
