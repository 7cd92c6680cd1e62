"""How many layers' KV live on the host, decided anew as each batch forms (Vasuki, section 5).

The device has room for N blocks of all L layers: N L *places*, each for one layer's part of a block. A layer on the
host passes through buffers in every step, which it shares with others, so that a block takes fewer places the deeper a
batch goes, and more blocks fit:

    none                 0 1 2 3 4 5 6 7    a block takes 8 places, each layer its own
    first-last, 2        0 1 2 3 4 5 0 1    6 places: the last two layers come into those of the first two
    ring, 3              0 1 2 0 1 2 0 1    3 places, which all layers take in turn

A row starts when all layers have room for its prompt; what it grows by takes only the places of the depth that there
is (5.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from vasuki.engine.batch import Batch
from vasuki.engine.blocks import BlockPool

Way = Literal["none", "first-last", "ring"]


@dataclass(frozen=True, slots=True)
class Depth:
    """Where the layers of a batch are.

    Args:
        num_layers: of the model.
        way: how those on the host pass through the device.
        buffers: that they pass through.
    """

    num_layers: int
    way: Way = "none"
    buffers: int = 0

    @classmethod
    def of_places(cls, num_layers: int, places: int) -> Depth:
        """The shallowest depth at which a block takes no more than that many places; two at least."""
        if places >= num_layers:
            return cls(num_layers)
        if num_layers - places <= num_layers // 2:
            return cls(num_layers, "first-last", num_layers - places)
        return cls(num_layers, "ring", max(2, places))

    @property
    def places(self) -> int:
        """That a block takes on the device."""
        if self.way == "ring":
            return self.buffers
        return self.num_layers - self.buffers

    @property
    def streamed(self) -> list[int]:
        """Layers that live on the host, in order."""
        return [layer for layer in range(self.num_layers) if self.is_streamed(layer)]

    def is_streamed(self, layer: int) -> bool:
        """Whether a layer lives on the host."""
        if self.way == "first-last":
            return not self.buffers <= layer < self.num_layers - self.buffers
        return self.way == "ring"

    def place_of(self, layer: int) -> int:
        """Which place of each block a layer has while it runs."""
        return layer % self.places


class DepthRule(Protocol):
    """Says how deep a batch may go."""

    @property
    def num_layers(self) -> int:
        """Of the model."""
        ...

    @property
    def is_lazy(self) -> bool:
        """Whether layers change place only where memory is wanted, or copies stop hiding; else whenever they may."""
        ...

    def __call__(self, batch: Batch) -> Depth:
        """The deepest depth whose copies the batch hides."""
        ...

    @property
    def deepest(self) -> Depth:
        """The deepest that there is room for on the host."""
        ...

    def most_blocks(self, num_blocks: int) -> int:
        """Blocks that there are at any depth, where the device holds `num_blocks` of all layers."""
        ...


@dataclass(frozen=True, slots=True)
class DepthStep:
    """The depth of a batch, and what changes for it."""

    depth: Depth
    before: Depth
    held: tuple[int, ...] = ()  # blocks in use, where the depth changes

    @property
    def leaving(self) -> list[int]:
        """Layers whose blocks leave for the host."""
        return [layer for layer in self.depth.streamed if not self.before.is_streamed(layer)]

    @property
    def returning(self) -> list[int]:
        """Layers whose blocks come back to stay."""
        return [layer for layer in self.before.streamed if not self.depth.is_streamed(layer)]


class DepthControl:
    """Keeps a pool to the blocks that the depth leaves room for.

    Args:
        rule: says how deep batches may go.
        num_blocks: of all layers that the device has room for.
        pool: of blocks, as many as the deepest depth has room for.
    """

    def __init__(self, rule: DepthRule, num_blocks: int, pool: BlockPool) -> None:
        self._rule = rule
        self._pool = pool
        self._places = num_blocks * rule.num_layers
        self.depth = Depth(rule.num_layers)
        self._go_to(self.depth)

    @property
    def spare_whole_blocks(self) -> int:
        """Blocks of all layers that fit beside those that are held."""
        return (self._places - self._pool.num_held * self.depth.places) // self.depth.num_layers

    def decide(self, batch: Batch, is_tight: bool) -> DepthStep:
        """The depth of a batch that was formed. Whatever is held has room in it, hidden or not.

        is_tight: some row waits for memory, or will.
        """
        before, wanted = self.depth, self._rule(batch)
        if self._rule.is_lazy and before.places >= wanted.places and not is_tight:
            wanted = before
        held = self._pool.num_held
        if held * wanted.places > self._places:
            wanted = Depth.of_places(wanted.num_layers, self._places // held)
        if wanted == before:
            return DepthStep(before, before)
        self._go_to(wanted)
        return DepthStep(wanted, before, tuple(self._pool.held()))

    def _go_to(self, depth: Depth) -> None:
        self.depth = depth
        self._pool.withheld = max(0, self._pool.num_blocks - self._places // depth.places)


def depths(num_layers: int) -> Iterator[Depth]:
    """Every depth, the shallowest first."""
    yield Depth(num_layers)
    yield from (Depth(num_layers, "first-last", buffers) for buffers in range(1, num_layers // 2 + 1))
    yield from (Depth(num_layers, "ring", buffers) for buffers in range(num_layers - 1, 1, -1))
