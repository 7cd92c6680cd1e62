"""Blocks of a pool: which one is handed out next."""

import pytest

from vasuki.engine.blocks import BlockPool, OutOfBlocks


def test_a_pool_lists_only_blocks_that_were_handed_out() -> None:
    """A model that keeps a few bytes of each token has room for more blocks than there is memory to list them."""
    pool = BlockPool(10**15, 16)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.num_available == 10**15 - 3
    pool.release([0, 1, 2])
    assert pool.num_held == 0
    pool.check_integrity([])


def test_blocks_that_were_given_back_go_first_and_fresh_ones_follow() -> None:
    pool = BlockPool(6, 16)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(first)
    assert pool.allocate(3) == [0, 1, 4]
    pool.check_integrity([second, [0, 1, 4]])
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 available"):
        pool.allocate(2)
