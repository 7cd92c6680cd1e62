"""The rows that a run works on: its shard of the input, less the rows that are already in the output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vasuki.base.errors import JobFileError


@dataclass(frozen=True, slots=True)
class Shard:
    """A share of `count` equal shares of the input: the rows whose number leaves `index` when divided by `count`."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`"0/4"` -> the first of four. Raises JobFileError."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or int(match[1]) >= int(match[2]):
            raise JobFileError(f"--shard {text!r}: write it as I/N with I from 0 to N-1, such as 0/4")
        return cls(int(match[1]), int(match[2]))

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    @property
    def label(self) -> str:
        """Goes into file names: empty for the whole input, else `-0-of-4`."""
        return "" if self.is_whole else f"-{self.index}-of-{self.count}"

    def num_rows(self, total_rows: int) -> int:
        """Rows of an input of `total_rows` that belong to this shard."""
        return len(range(self.index, total_rows, self.count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Shard()


class DoneRows:
    """The input rows that are in the output: one flag a row."""

    def __init__(self, num_rows: int) -> None:
        self._flags: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        self.count = 0

    def add(self, rows: Sequence[int] | NDArray[np.int64]) -> None:
        """Mark rows, none of which may be marked already.

        Raises:
            ValueError: a row lies outside the input, or is there twice.
        """
        numbers = np.asarray(rows, dtype=np.int64)
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(self._flags)):
            raise ValueError(f"row {numbers.max()} lies outside the input of {len(self._flags)} rows")
        twice = numbers[self._flags[numbers]]
        if twice.size or len(np.unique(numbers)) != len(numbers):
            raise ValueError(f"row {twice[0]} is there twice" if twice.size else "a row is there twice")
        self._flags[numbers] = True
        self.count += len(numbers)

    def grow(self, num_rows: int) -> None:
        """Note that the input has `num_rows` by now."""
        self._flags = np.append(self._flags, np.zeros(max(0, num_rows - len(self._flags)), dtype=np.bool_))

    def __contains__(self, row: int) -> bool:
        return row < len(self._flags) and bool(self._flags[row])

    def within(self, first_row: int, num_rows: int) -> NDArray[np.bool_]:
        """Flags of an interval of rows."""
        return self._flags[first_row : first_row + num_rows]

    @property
    def num_rows(self) -> int:
        """Rows of the whole input."""
        return len(self._flags)

    @property
    def is_complete(self) -> bool:
        return self.count == len(self._flags)

    def count_in(self, shard: Shard) -> int:
        """Finished rows of a shard."""
        return int(np.count_nonzero(self._flags[shard.index :: shard.count]))


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows to read. Every row, unless told otherwise."""

    shard: Shard = WHOLE
    done: DoneRows | None = None
    left_out: NDArray[np.bool_] | None = None  # `[num_rows]`, others that are not wanted

    def wants(self, row: int) -> bool:
        if row % self.shard.count != self.shard.index or (self.done is not None and row in self.done):
            return False
        return self.left_out is None or not self.left_out[row]

    def positions(self, first_row: int, num_rows: int) -> NDArray[Any]:
        """Positions, from 0, of the wanted rows within an interval."""
        wanted = np.arange(first_row, first_row + num_rows) % self.shard.count == self.shard.index
        if self.done is not None:
            wanted &= ~self.done.within(first_row, num_rows)
        if self.left_out is not None:
            wanted &= ~self.left_out[first_row : first_row + num_rows]
        return np.flatnonzero(wanted)


EVERY_ROW = Selection()
