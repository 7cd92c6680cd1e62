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
from typing import Literal

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


def depths(num_layers: int) -> Iterator[Depth]:
    """Every depth, the shallowest first."""
    yield Depth(num_layers)
    yield from (Depth(num_layers, "first-last", buffers) for buffers in range(1, num_layers // 2 + 1))
    yield from (Depth(num_layers, "ring", buffers) for buffers in range(num_layers - 1, 1, -1))
