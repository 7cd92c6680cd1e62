"""What the cache of a row that is computed alone takes in memory, whatever the model keeps in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from vasuki.models.shape import TOKEN_ID_BYTES

_SHORT, _LONG = 16, 48  # tokens of the rows that are compared


class HeldBytes(NamedTuple):
    """Bytes of a row."""

    token: int  # for each of its tokens
    row: int  # in addition, however long the row is


ALL_IN_BLOCKS = HeldBytes(0, 0)


def held_bytes(cache_of: Callable[[int], Any]) -> HeldBytes:
    """Measure what a row takes, by comparing two.

    A window that is longer than they are counts as if it grew for ever.

    Args:
        cache_of: computes a row of this many tokens, and returns its cache.
    """
    short, long = (memory_of(cache_of(tokens)) for tokens in (_SHORT, _LONG))
    token = max(0, math.ceil((long - short) / (_LONG - _SHORT)))
    return HeldBytes(max(TOKEN_ID_BYTES, token), max(0, long - _LONG * token))


def memory_of(held: Any) -> int:
    """Bytes of all tensors that can be reached from there, of views in full."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    ahead = [held]
    while ahead:
        each = ahead.pop()
        if id(each) in seen or isinstance(each, (type, torch.nn.Module)):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, Mapping):
            ahead += each.values()
        elif isinstance(each, (list, tuple)):
            ahead += each
        else:
            ahead += getattr(each, "__dict__", {}).values()
    return sum(storages.values())
