"""Files that are read from anywhere, in Python: what pyarrow asks of one."""

from __future__ import annotations

import io


class Positioned(io.RawIOBase):
    """A file with a position, from which a subclass reads on.

    Args:
        size: of the file, in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position
