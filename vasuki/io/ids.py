"""Is the id column unique? One pass, eight bytes a row.

Ids are hashed to 64 bits and the hashes sorted. Equal hashes are only a suspicion, so a second pass, run only then,
compares the suspected ids themselves and stops at the first that came before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vasuki.base.errors import JobFileError
from vasuki.io.values import as_text


class IdHashes:
    """The hashes of all ids, in input order, and the suspects among them.

    Python's own hash of a text serves: 64 bits, and keyed afresh in each process, so no input can be made to collide.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self._hashes = array("q")
        self._first_missing: int | None = None
        self._num_rows = 0

    def add(self, value: Any, line: int = 0) -> None:
        """Note the id of the next row; one that is malformed may have none, and is known by its `line` then. Raises
        JobFileError for a value that cannot be an id."""
        self._num_rows += 1
        if value is None or value == "":
            if line:
                return
            if self._first_missing is None:
                self._first_missing = self._num_rows - 1
        try:
            self._hashes.append(_hash(value))
        except ValueError as error:
            raise JobFileError(f"input.id '{self.column}' cannot be used: {error}") from None

    def suspects(self) -> NDArray[np.int64]:
        """Sorted hashes that occur more than once. Ends the noting: the hashes are sorted in place.

        Raises:
            JobFileError: a row has no id.
        """
        if self._first_missing is not None:
            raise JobFileError(f"row {self._first_missing} has no id: its '{self.column}' is null or empty")
        hashes = np.frombuffer(self._hashes, dtype=np.int64)
        hashes.sort()
        return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])


def refuse_duplicates(column: str, suspects: NDArray[np.int64], ids: Iterable[tuple[int, Any]]) -> None:
    """Compare the suspected ids themselves.

    Args:
        column: the id column, for the message.
        suspects: from `IdHashes.suspects`.
        ids: (row number, id) of every row, in order.

    Raises:
        JobFileError: two rows have the same id.
    """
    seen: dict[str, int] = {}
    for row, value in ids:
        hashed = _hash(value)
        place = int(np.searchsorted(suspects, hashed))
        if place == len(suspects) or suspects[place] != hashed:
            continue
        text = as_text(value)
        if text in seen:
            raise JobFileError(f"input.id '{column}' is not unique: rows {seen[text]} and {row} are both {text!r}")
        seen[text] = row


def _hash(value: Any) -> int:
    return hash(as_text(value))
