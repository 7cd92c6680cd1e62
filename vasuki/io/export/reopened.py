"""Many files that are read side by side, of which few are open at a time: systems give a process 1,024 handles."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from vasuki.io.location import Location
from vasuki.io.positions import Positioned

MOST_OPEN = 64


class OpenFiles:
    """The files that were read last, open. Any other one is opened again when it is read."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Any] = OrderedDict()

    def read_at(self, location: Location, num_bytes: int, position: int) -> bytes:
        """`num_bytes` of a file from `position` on. Raises OSError."""
        return bytes(self._file(location).read_at(num_bytes, position))

    def size(self, location: Location) -> int:
        """Bytes of a file. Raises OSError."""
        return int(self._file(location).size())

    def close(self) -> None:
        """Close all."""
        while self._open:
            self._open.popitem()[1].close()

    def _file(self, location: Location) -> Any:
        if location.path not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[location.path] = location.open()
        self._open.move_to_end(location.path)
        return self._open[location.path]


class Reopened(Positioned):
    """A file that holds no handle of its own."""

    def __init__(self, location: Location, files: OpenFiles) -> None:
        super().__init__(files.size(location))
        self._location = location
        self._files = files

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        data = self._files.read_at(self._location, left if size < 0 else min(size, left), self._position)
        self._position += len(data)
        return data
