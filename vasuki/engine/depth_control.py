"""Who decides how deep a batch goes, and what that leaves of the pool."""

from __future__ import annotations

from typing import Protocol

from vasuki.engine.batch import Batch
from vasuki.engine.blocks import BlockPool
from vasuki.engine.depth import Depth, DepthStep


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
