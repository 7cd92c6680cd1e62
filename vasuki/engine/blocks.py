"""Who owns which block of KV memory. Integers only: the tensors live with the executor.

A block holds the keys and values of `block_tokens` consecutive positions of one sequence, for every layer. Each block
of a pool is in exactly one of three states:

    block id     0 ............................................ num_blocks - 1
                 | free | cached, nobody uses it | held by one or more tables |
                    ^            |        ^                |
                    +- evicted --+        +--- released ---+   (a full block whose content is known stays cached)

Cached blocks are evicted when free ones run out: first those whose content nobody wants, then those that a waiting row
will begin with; of each kind the coldest first.

Only full blocks are ever shared, and a sequence only writes behind its full blocks, so a shared block is never written:
sharing needs reference counts but no copies.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order of position. At most one of the two lists is in use at a time."""

    device: list[int] = field(default_factory=list)  # changed by Scheduler and Queues
    host: list[int] = field(default_factory=list)  # changed by Queues when the sequence is parked
    num_keyed: int = 0  # leading device blocks whose content is registered with the pool, set by Prefixes


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
        self.withheld = 0  # unused blocks that may not be handed out, since they have no room now; set by DepthControl
        self._free: list[int] = []  # given back, a stack: the block freed last is warm in the cache
        self._references: list[int] = []  # of the blocks that were ever handed out; the fresh ones follow them
        # Unused blocks with known content, coldest first: those that nobody wants, and those that somebody does.
        self._cached: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self._wants: dict[Hashable, int] = {}  # how many wait for the content
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can take: free ones, then cached ones."""
        return max(0, self._num_unused - self.withheld)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self._num_unused

    @property
    def capacity(self) -> int:
        """Blocks that may be held together now."""
        return self.num_blocks - self.withheld

    @property
    def _num_unused(self) -> int:
        unwanted, wanted = self._cached
        return self._num_fresh + len(self._free) + len(unwanted) + len(wanted)

    @property
    def _num_fresh(self) -> int:
        """Blocks that were never handed out. A pool can have millions of which a job needs a few: none is listed."""
        return self.num_blocks - len(self._references)

    def held(self) -> Iterator[int]:
        """Every block in use, in rising order."""
        return (block for block, references in enumerate(self._references) if references)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each. Raises OutOfBlocks if there are fewer."""
        available = self.num_available
        if count > available:
            raise OutOfBlocks(f"{count} blocks wanted, {available} available")
        free, references = self._free, self._references
        while len(free) + self._num_fresh < count:
            self._evict()
        first = max(0, len(free) - count)
        blocks = free[first:][::-1]  # rising, as they were freed: neighbours are copied together
        del free[first:]
        for block in blocks:
            references[block] = 1
        fresh = range(len(references), len(references) + count - len(blocks))
        blocks += fresh
        references += [1] * len(fresh)
        self.peak_held = max(self.peak_held, self.num_held)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a sequence."""
        references, free, key_of = self._references, self._free, self._key_of
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, f"block {block} released more often than held"
            references[block] = left
            if left == 0:
                if block in key_of:
                    self._cached[key_of[block] in self._wants][block] = None
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
                del self._cached[key in self._wants][block]
                self.peak_held = max(self.peak_held, self.num_held)
            self._references[block] += 1
        return block

    # A prefix is of use without what follows it, not the other way: its end is kept colder than its beginning.

    def want(self, prefix: Sequence[Hashable]) -> None:
        """Say that somebody will ask for blocks with this content, there already or not."""
        for key in reversed(prefix):
            count = self._wants.get(key, 0)
            self._wants[key] = count + 1
            if not count:
                self._move(key, to_wanted=True)

    def unwant(self, prefix: Sequence[Hashable]) -> None:
        """Take back one `want`."""
        for key in reversed(prefix):
            self._wants[key] -= 1
            if not self._wants[key]:
                del self._wants[key]
                self._move(key, to_wanted=False)

    def _move(self, key: Hashable, to_wanted: bool) -> None:
        block = self._block_of.get(key)
        if block is not None and not self._references[block]:
            del self._cached[not to_wanted][block]
            self._cached[to_wanted][block] = None

    def _evict(self) -> None:
        unwanted, wanted = self._cached
        block, _ = (unwanted or wanted).popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self._free.append(block)

    def check_integrity(
        self, held: Iterable[Iterable[int]] | None = None, wanted_keys: Iterable[Hashable] | None = None
    ) -> None:
        """Assert the invariant, and, given the tables that hold blocks and the keys that are wanted, that references
        and wants match them one by one."""
        unwanted, wanted = self._cached
        free, cached = set(self._free), {*unwanted, *wanted}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        for block, count in enumerate(self._references):
            unused = block in free or block in cached
            assert (count == 0) == unused, f"block {block} has {count} references and is {'un' * unused}used"
        assert cached <= self._key_of.keys(), "a cached block has no key"
        assert wanted.keys() == {block for block in cached if self._key_of[block] in self._wants}, "wants disagree"
        assert not free & self._key_of.keys(), "a free block has a key"
        assert {self._block_of[key]: key for key in self._block_of} == self._key_of, "keys and blocks disagree"
        if wanted_keys is not None:
            assert Counter(wanted_keys) == self._wants, "wants do not match the rows that wait"
        if held is not None:
            counts = Counter(block for blocks in held for block in blocks)
            assert counts == Counter(dict(enumerate(self._references))), "references do not match the tables"
