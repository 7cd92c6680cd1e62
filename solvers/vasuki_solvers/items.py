"""Items and instances: what has to run, and what it has to fit into.

Time is counted in whole steps. An item brings a prompt, which takes its place at once, runs for `duration` steps, and
grows by one token in each of them. This is the one statement of the model; every other module follows it:

    An item that starts at step s, with w steps of prefill wait, holds at step t

        prompt + max(0, t - s - w)        for  s <= t < s + w + duration,        and nothing otherwise.

    At every step, the tokens held by all items together must not exceed the capacity.

The token that an item produces in its last step is never held (nothing reads it back), so that the most an item ever
holds, its *peak*, is prompt + duration - 1: no "+ 1" belongs in the formula.

Two limits are optional. `max_parallel` bounds the number of items that run in one step. `prefill_tokens_per_step`
bounds the prompt tokens that one step can take in, over all items together: a longer prompt is taken in over several
steps, in chunks. Its whole prompt is reserved from the start s, it produces its first token in step s + w, and its last
chunk runs in that same step; all its chunks lie in the steps s, ..., s + w. Without this limit w is 0.

The growing form corrects the static item sizes of the Vasuki paper (Appendix A, "System Capacity Constraint").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vasuki_solvers.exceptions import InfeasibleItem, InvalidItem

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt of `prompt` tokens that runs for `duration` steps."""

    prompt: int
    duration: int

    @property
    def peak(self) -> int:
        """The most tokens the item ever holds, in its last step."""
        return self.prompt + self.duration - 1

    @property
    def area(self) -> int:
        """Tokens held, summed over its steps (token-steps): prompt + (prompt + 1) + ... + peak."""
        return self.duration * self.prompt + self.duration * (self.duration - 1) // 2


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """Items, as two arrays of one length, and the limits that they share.

    prompts, durations: [num_items] positive integers. capacity: tokens. max_parallel: items at once, None for no limit.
    prefill_tokens_per_step: prompt tokens taken in per step over all items, None for no limit.

    Raises InvalidItem for anything that is not positive, and InfeasibleItem for the first item whose peak exceeds the
    capacity.
    """

    prompts: Ints
    durations: Ints
    capacity: int
    max_parallel: int | None = None
    prefill_tokens_per_step: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompts", "durations"):
            object.__setattr__(self, name, _positive(getattr(self, name), name))
        if self.prompts.shape != self.durations.shape:
            raise InvalidItem(f"{len(self.prompts)} prompts and {len(self.durations)} durations: one of each per item")
        for name in ("capacity", "max_parallel", "prefill_tokens_per_step"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise InvalidItem(f"{name} is {limit}, and must be positive")
        peaks = self.peaks
        if len(peaks) and int(peaks.max()) > self.capacity:
            index = int(np.argmax(peaks > self.capacity))
            raise InfeasibleItem(index, int(peaks[index]), self.capacity)

    @classmethod
    def of(
        cls,
        items: Iterable[Item | tuple[int, int]],
        capacity: int,
        *,
        max_parallel: int | None = None,
        prefill_tokens_per_step: int | None = None,
    ) -> Instance:
        """An instance of `Item`s or of (prompt, duration) pairs."""
        pairs = [(item.prompt, item.duration) if isinstance(item, Item) else item for item in items]
        prompts, durations = zip(*pairs, strict=True) if pairs else ((), ())
        return cls(np.asarray(prompts), np.asarray(durations), capacity, max_parallel, prefill_tokens_per_step)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def items(self) -> list[Item]:
        return [Item(p, d) for p, d in zip(self.prompts.tolist(), self.durations.tolist(), strict=True)]

    @property
    def peaks(self) -> Ints:
        """[num_items] the most each item ever holds."""
        return self.prompts + self.durations - 1

    @property
    def min_waits(self) -> Ints:
        """[num_items] prefill wait of each item when it has the prefill budget to itself."""
        if self.prefill_tokens_per_step is None:
            return np.zeros(len(self), np.int64)
        return -(-self.prompts // self.prefill_tokens_per_step) - 1

    @property
    def areas(self) -> Ints:
        """[num_items] the fewest token-steps each item takes: its growing part, and its prompt held while waiting."""
        growth = self.durations * (self.durations - 1) // 2
        areas: Ints = self.prompts * (self.min_waits + self.durations) + growth
        return areas


def _positive(values: Sequence[int] | NDArray[Any], name: str) -> Ints:
    """Return `values` as a read-only int64 vector. Raises InvalidItem unless all are whole and positive."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidItem(f"{name} must be one-dimensional, not of shape {array.shape}")
    if len(array) and array.dtype.kind not in "iu":
        raise InvalidItem(f"{name} must be whole numbers, not {array.dtype}")
    if len(array) and int(array.min()) < 1:
        index = int(np.argmax(array < 1))
        raise InvalidItem(f"item {index}: {name} holds {array[index]}, and must be positive")
    vector: Ints = array.astype(np.int64)
    vector.setflags(write=False)
    return vector
