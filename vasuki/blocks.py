"""Who owns which block of KV memory. Integers only: the tensors live with the executor.

A block holds the keys and values of `block_tokens` consecutive positions of one sequence, for every layer. Each block
of a pool is in exactly one of three states:

    block id     0 ............................................ num_blocks - 1
                 | free | cached, nobody uses it | held by one or more tables |
                    ^            |        ^                |
                    +- evicted --+        +--- released ---+   (a full block whose content is known stays cached)

Only full blocks are ever shared, and a sequence only writes behind its full blocks, so a shared block is never written:
sharing needs reference counts but no copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order of position. At most one of the two lists is in use at a time."""

    device: list[int] = field(default_factory=list)  # changed by Scheduler
    host: list[int] = field(default_factory=list)  # changed by Scheduler when it parks the sequence
    num_keyed: int = 0  # leading device blocks whose content is registered with the pool, set by Scheduler


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. The scheduler asks first, so this is a bug of ours."""


class BlockPool:
    """Blocks of one tier of memory.

    Invariant: every block is free, cached or held, and `num_free + num_cached + num_held == num_blocks`.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool needs blocks and tokens, got {num_blocks} blocks of {block_tokens} tokens")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.peak_held = 0  # most blocks that were in use at any time
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the cache
        self._references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused blocks with known content, coldest first
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can take: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each. Raises OutOfBlocks if there are fewer."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_available} available")
        free, references = self._free, self._references
        while len(free) < count:
            self._evict()
        first = len(free) - count
        blocks = free[first:]
        del free[first:]
        for block in blocks:
            references[block] = 1
        self.peak_held = max(self.peak_held, self.num_blocks - len(free) - len(self._cached))
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block."""
        references, free, key_of = self._references, self._free, self._key_of
        for block in blocks:
            left = references[block] - 1
            assert left >= 0, f"block {block} released more often than held"
            references[block] = left
            if left == 0:
                if block in key_of:
                    self._cached[block] = None
                else:
                    free.append(block)

    def register(self, block: int, key: Hashable) -> None:
        """Say that a held block is full and that `key` identifies its content and all before it."""
        assert self._references[block] > 0, f"block {block} is not held"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def acquire(self, key: Hashable) -> int | None:
        """One more reference to the block with this content, or None if there is none."""
        block = self._block_of.get(key)
        if block is not None:
            if self._references[block] == 0:
                del self._cached[block]
                self.peak_held = max(self.peak_held, self.num_held)
            self._references[block] += 1
        return block

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self._free.append(block)

    def check_integrity(self, held: Iterable[Iterable[int]] | None = None) -> None:
        """Assert the invariant, and, given the tables that hold blocks, that references match them one by one."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        for block, count in enumerate(self._references):
            unused = block in free or block in cached
            assert (count == 0) == unused, f"block {block} has {count} references and is {'un' * unused}used"
        assert cached <= self._key_of.keys(), "a cached block has no key"
        assert not free & self._key_of.keys(), "a free block has a key"
        assert {self._block_of[key]: key for key in self._block_of} == self._key_of, "keys and blocks disagree"
        if held is not None:
            counts = [0] * self.num_blocks
            for blocks in held:
                for block in blocks:
                    counts[block] += 1
            assert counts == self._references, "references do not match the tables"
