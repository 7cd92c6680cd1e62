"""Prompts with a common prefix share the blocks of that prefix.

A full block of a prompt is known by a digest of all tokens up to its end. While a row waits, the pool knows what it
wants to begin with, and keeps that longer than what nobody wants.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from vasuki.engine.blocks import BlockPool
from vasuki.engine.sequence import Request, Sequence


class Prefixes:
    """Keys of prompts, and the blocks of one pool behind them.

    Args:
        pool: the device's.
        are_shared: whether the policy shares prefixes at all.
    """

    def __init__(self, pool: BlockPool, are_shared: bool) -> None:
        self._pool = pool
        self._are_shared = are_shared
        self._last: tuple[Any, list[bytes]] = (None, [])  # the prompt seen last, and its keys

    def wanted(self, sequence: Sequence) -> list[bytes]:
        """Keys of the blocks that a waiting row could take over. At least one token is left to compute, and all that
        are read."""
        if not self._are_shared:
            return []
        left = max(1, sequence.request.num_read)
        if not sequence.prefix_keys:
            sequence.prefix_keys = self._keys(sequence.request)
        return sequence.prefix_keys[: (sequence.num_tokens - left) // self._pool.block_tokens]

    def want(self, sequence: Sequence) -> None:
        """The row begins to wait."""
        self._pool.want(self.wanted(sequence))

    def unwant(self, sequence: Sequence) -> None:
        """The row waits no more."""
        self._pool.unwant(self.wanted(sequence))

    def take_over(self, sequence: Sequence) -> None:
        """Start a row, which waits no more, with the blocks that already hold the beginning of its prompt.

        A block counts as soon as the chunk that fills it is scheduled: within a step every layer writes the keys and
        values of all chunks before any chunk attends.
        """
        table, wanted = sequence.block_table, self.wanted(sequence)
        for key in wanted:
            block = self._pool.acquire(key)
            if block is None:
                break
            table.device.append(block)
        self._pool.unwant(wanted)
        table.num_keyed = len(table.device)
        sequence.num_computed_tokens = len(table.device) * self._pool.block_tokens
        sequence.num_shared_tokens = max(sequence.num_shared_tokens, sequence.num_computed_tokens)

    def register(self, sequence: Sequence, computed: int) -> None:
        """Let others share the blocks that the first `computed` tokens fill."""
        table = sequence.block_table
        full = min(computed // self._pool.block_tokens, len(sequence.prefix_keys))
        while table.num_keyed < full:
            self._pool.register(table.device[table.num_keyed], sequence.prefix_keys[table.num_keyed])
            table.num_keyed += 1

    def _keys(self, request: Request) -> list[bytes]:
        """Keys of a prompt, the same list for rows in a row that have the same one: samples, or rows of a plan."""
        if request.prompt_token_ids is not self._last[0]:
            self._last = request.prompt_token_ids, prefix_keys(request, self._pool.block_tokens)
        return self._last[1]


def prefix_keys(request: Request, block_tokens: int) -> list[bytes]:
    """A digest for each full block of the prompt that covers all tokens up to its end."""
    token_ids = request.prompt_token_ids
    keys: list[bytes] = []
    previous = b""
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        block = np.asarray(token_ids[end - block_tokens : end], dtype=np.int32).tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=16).digest()
        keys.append(previous)
    return keys
