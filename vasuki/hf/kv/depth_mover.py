"""KV of layers that change place from batch to batch, see `engine.depth`: which slot of the device holds which layer's
part of a block, and the copies that bring layers there and away.

    slots   [places, blocks]   slot of each place of each block; a layer has the place that its depth gives it
    arena   [N L slots, 2, block_tokens, num_kv_heads, head_dim]

A block keeps its slots until the depth changes, also while nobody holds it: whoever gets it next finds them, so that a
copy under way never meets another block's keys. When the depth changes, only blocks that are held keep theirs, and what
is computed next waits for every copy that reads a slot.

Layers on the host pass as those of `KVMover` do, but that the first of each buffer comes back behind the last layers of
the step before: with first-last and ring no layer stays on the device for copies to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vasuki.base.arrays import Bools
from vasuki.engine.batch import Batch, ScheduledChunk
from vasuki.engine.depth import Depth, DepthStep
from vasuki.engine.depth_control import DepthRule
from vasuki.hf.kernels.transfer import to_device
from vasuki.hf.kv.block_copies import copy_of, runs_of
from vasuki.hf.kv.kv_cache import KVCache, KVLayout, pinned_zeros
from vasuki.hf.kv.kv_mover import CopyEngine, Done


class Arena(KVCache):
    """Places for one layer's part of a block, in which all layers lie as `slots` says.

    Raises as `KVCache` does.

    Args:
        layout: of layers that are alike.
        num_blocks: of all layers that there is room for.
        rule: by which layers move.
        block_tokens: of each.
        device: where.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, rule: DepthRule, block_tokens: int, device: torch.device
    ) -> None:
        most_blocks = rule.most_blocks(num_blocks)
        assert len(set(layout.heads)) == 1, "layers that take each other's place are alike"
        one = KVLayout(layout.heads[:1], layout.dtype)
        super().__init__(one, num_blocks * layout.num_layers, block_tokens, device)
        self.layout = layout
        self.layers *= layout.num_layers
        self.slots = np.zeros((layout.num_layers, most_blocks), np.int64)
        self.slots_here = torch.zeros(self.slots.shape, dtype=torch.int64, device=device)  # the same on the device
        self.rule = rule

    @property
    def moves(self) -> bool:
        return True


@dataclass(slots=True)
class _Ahead:
    """A layer that was fetched for a step that is still to come."""

    done: Done
    blocks: frozenset[int]


class DepthMover:
    """Moves layers for one executor, as `KVMover` does for a fixed depth.

    Attributes:
        copied_bytes: so far, in either direction.
    """

    host = None  # no row is parked: who makes room is computed again

    def __init__(self, arena: Arena, engine: CopyEngine) -> None:
        self.device = arena
        self.engine = engine
        engine.keep(arena.layers)
        self.copied_bytes = 0
        layers, kind = arena.layout.num_layers, arena.layers[0]
        zeros = pinned_zeros if kind.is_cuda else torch.zeros
        home = (arena.slots.shape[1], *kind.shape[1:])
        self._homes = {layer: zeros(home, dtype=kind.dtype) for layer in arena.rule.deepest.streamed}
        self._depth = Depth(layers)
        self._free = np.arange(arena.num_blocks)[::-1].copy()  # slots, a stack
        self._num_free = arena.num_blocks
        self._has_slots: Bools = np.zeros(arena.slots.shape[1], np.bool_)
        self._due: list[list[Done]] = [[] for _ in range(layers)]  # what each layer of this step waits for
        self._stored: dict[int, Done] = {}  # last store of each streamed layer
        self._fetched: dict[int, Done] = {}  # this call's fetch of each streamed layer
        self._ahead: dict[int, _Ahead] = {}  # by layer
        self._unfetched: list[int] = []
        self._read: list[int] = []  # blocks with earlier tokens of this call's sequences
        self._written: list[int] = []  # blocks that get new tokens in this call

    is_quiet = False  # each layer has a place of its own

    @property
    def depth(self) -> Depth:
        """Of the last step that was begun."""
        return self._depth

    @property
    def under_way(self) -> list[Done]:
        """Copies that may still read or write a slot, but for those that a layer of this step waits for."""
        return [*self._stored.values(), *(each.done for each in self._ahead.values())]

    def begin_step(self, batch: Batch) -> None:
        """Let layers change place, and give every block that is written to for the first time its slots."""
        assert batch.depth is not None
        if batch.depth.depth != self._depth:
            self._rearrange(batch.depth)
        self._give_slots(batch)

    def begin_call(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Start fetching layers for a call of the model that computes some of the step's chunks."""
        size = self.device.block_tokens
        tables = [(chunk, chunk.sequence.block_table.device) for chunk in chunks]
        self._read = sorted({block for chunk, table in tables for block in table[: -(-chunk.start // size)]})
        self._written = sorted(
            {block for chunk, table in tables for block in table[chunk.start // size : -(-chunk.end // size)]}
        )
        self._unfetched = self._depth.streamed
        after = [self.engine.computed()]
        for place in range(self._depth.places):
            self._fetch_next(place, after)

    def before_layer(self, layer: int) -> None:
        """Called before a layer's new keys and values are written: afterwards, all that the layer needs is in place."""
        for done in self._due[layer]:
            self.engine.require(done)
        self._due[layer].clear()
        if self._depth.is_streamed(layer):
            self.engine.require(self._fetched.pop(layer))

    def before_all_layers(self) -> None:
        raise AssertionError("layers that move run one by one")

    def after_layer(self, layer: int) -> None:
        """Called after a layer's attention: its new tokens go home, then its buffer goes to the next layer."""
        if self._depth.is_streamed(layer):
            self._stored[layer] = self._store(layer, self._written, [self.engine.computed()])
            place = self._depth.place_of(layer)
            if not self._fetch_next(place, [self._stored[layer]]):
                self._fetch_ahead(place, [self._stored[layer]])

    # --- slots -------------------------------------------------------------------------------------------------------

    def _give_slots(self, batch: Batch) -> None:
        size, has_slots = self.device.block_tokens, self._has_slots
        new = [
            block
            for chunk in batch.chunks
            for block in chunk.sequence.block_table.device[chunk.start // size : -(-chunk.end // size)]
            if not has_slots[block]
        ]
        if new:
            blocks = np.unique(new)
            has_slots[blocks] = True
            self._take(range(self._depth.places), blocks)

    def _take(self, places: range, blocks: np.ndarray) -> None:
        """Give blocks a slot for each of the places."""
        count = len(places) * len(blocks)
        assert count <= self._num_free, "more blocks are held than the depth has room for"
        taken = self._free[self._num_free - count : self._num_free][::-1]
        self._num_free -= count
        arena, rows = self.device, slice(places.start, places.stop)
        arena.slots[rows, blocks] = taken.reshape(len(places), len(blocks))
        columns, values = to_device(arena.device, blocks, arena.slots[rows, blocks].reshape(-1))
        arena.slots_here[rows, columns] = values.view(len(places), len(blocks))

    def _give_back(self, places: range, blocks: np.ndarray) -> None:
        slots = self.device.slots[places.start : places.stop, blocks].reshape(-1)
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)

    # --- change of depth ---------------------------------------------------------------------------------------------

    def _rearrange(self, step: DepthStep) -> None:
        """Bring layers to the places of another depth, with the blocks that are held."""
        before, after, leaving = step.before, step.depth, step.leaving
        has_slots = self._has_slots
        held = np.array([block for block in step.held if has_slots[block]], np.int64)
        blocks = held.tolist()
        computed = self.engine.computed()
        stores = [self._store(layer, blocks, [computed]) for layer in leaving]
        reading = [*stores, *self.under_way]
        self._ahead.clear()
        kept = np.zeros_like(has_slots)
        kept[held] = True
        every, common = range(before.places), range(min(before.places, after.places))
        self._give_back(every, np.flatnonzero(has_slots & ~kept))
        self._give_back(range(common.stop, before.places), held)
        self._has_slots = kept
        self._depth = after
        self._take(range(common.stop, after.places), held)
        for layer, done in zip(leaving, stores, strict=True):
            self._stored[layer] = done
        for layer in step.returning:
            homes = [self._stored.pop(layer)] if layer in self._stored else []
            self._due[layer].append(self._fetch(layer, blocks, [computed, *reading, *homes]))
        self._due[0] += reading  # whatever runs next may write to a slot that they read

    # --- copies ------------------------------------------------------------------------------------------------------

    def _fetch_next(self, place: int, after: list[Done]) -> bool:
        """Fetch the next streamed layer of a place that is free after the given work. Returns whether there is one."""
        layer = next((layer for layer in self._unfetched if self._depth.place_of(layer) == place), None)
        if layer is None:
            return False
        self._unfetched.remove(layer)
        if (ahead := self._ahead.pop(layer, None)) is None:
            self._fetched[layer] = self._fetch(layer, self._read, [*after, *self._home(layer)])
        elif missing := [block for block in self._read if block not in ahead.blocks]:
            self._fetched[layer] = self._fetch(layer, missing, [ahead.done, *after, *self._home(layer)])
        else:
            self._fetched[layer] = ahead.done
        return True

    def _fetch_ahead(self, place: int, after: list[Done]) -> None:
        """Bring the first layer of a place back for the next step, with the blocks of this one."""
        first = next(layer for layer in self._depth.streamed if self._depth.place_of(layer) == place)
        blocks = sorted({*self._read, *self._written})
        done = self._fetch(first, blocks, [*after, *self._home(first)])
        self._ahead[first] = _Ahead(done, frozenset(blocks))

    def _home(self, layer: int) -> list[Done]:
        return [self._stored[layer]] if layer in self._stored else []

    def _fetch(self, layer: int, blocks: list[int], after: list[Done]) -> Done:
        slots = self.device.slots[self._depth.place_of(layer), blocks].tolist()
        return self._copy(False, self._homes[layer], self.device.layers[layer], blocks, slots, after)

    def _store(self, layer: int, blocks: list[int], after: list[Done]) -> Done:
        slots = self.device.slots[self._depth.place_of(layer), blocks].tolist()
        return self._copy(True, self.device.layers[layer], self._homes[layer], slots, blocks, after)

    def _copy(
        self,
        to_host: bool,
        source: torch.Tensor,
        target: torch.Tensor,
        sources: list[int],
        targets: list[int],
        after: list[Done],
    ) -> Done:
        num_bytes, copy = copy_of(source, target, runs_of(sources, targets))
        self.copied_bytes += num_bytes
        return self.engine.submit(to_host, copy, after)
