"""What a file held when it was surveyed: whatever is read of it later is compared with that, piece by piece.

Digests of pieces cost no second reading, and tell what neither sizes nor times tell: another text of the same length,
put there within the same tick of a clock or with its time set back, also in an object store.
"""

from __future__ import annotations

import hashlib
import io
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import IO, Any

from vasuki.base.errors import InputError
from vasuki.io.location import Location
from vasuki.io.positions import Positioned

PIECE_BYTES = 2**20


class Content:
    """Digests of the pieces of a file, 8 bytes each.

    Args:
        location: of the file.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._digests: dict[int, bytes] = {}  # by the place where a piece begins

    def see(self, place: int, piece: bytes) -> None:
        """Note a piece at its first sight, and compare it with that at each later one.

        Raises:
            InputError: it is another.
        """
        digest = hashlib.blake2b(piece, digest_size=8).digest()
        if self._digests.setdefault(place, digest) != digest:
            raise InputError(f"input changed while it was read: {self._location}")


class SeenStream(io.RawIOBase):
    """A stream whose pieces `content` sees before anybody else. `observe` is shown them, too."""

    def __init__(self, stream: IO[bytes], content: Content, observe: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._content = content
        self._observe = observe
        self._next = 0  # where the next piece begins
        self._left = memoryview(b"")  # of the last piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            piece = whole_read(self._stream, PIECE_BYTES)
            self._content.see(self._next, piece)
            self._observe(piece)
            self._next += len(piece)
            self._left = memoryview(piece)
        taken = self._left[: len(buffer)]
        buffer[: len(taken)] = taken
        self._left = self._left[len(taken) :]
        return len(taken)


class SeenFile(Positioned):
    """A file to read from anywhere, in which `content` sees all that lies in some stretches.

    A stretch is read piece by piece from its start, as it was surveyed; the last piece of each is kept, since a
    reader of several reads them in turns, each from front to back.

    Args:
        file: a `pyarrow.NativeFile`.
        content: of the file.
        stretches: start and end of each; no two overlap.
    """

    def __init__(self, file: Any, content: Content, stretches: Iterable[tuple[int, int]]) -> None:
        super().__init__(file.size())
        self._file = file
        self._content = content
        self._stretches = sorted(stretches)
        self._starts = [start for start, _ in self._stretches]
        self._pieces: dict[int, tuple[int, bytes]] = {}  # by stretch: where its last piece begins, and that piece

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._position + size, self._size)
        found = []
        while self._position < stop:
            data = self._some(stop)
            if not data:
                break
            found.append(data)
            self._position += len(data)
        return b"".join(found)

    def _some(self, stop: int) -> bytes:
        """Some of the bytes from here on, none beyond `stop`."""
        here, index = self._position, bisect_right(self._starts, self._position)
        if index and here < self._stretches[index - 1][1]:
            begin, piece = self._piece(*self._stretches[index - 1])
            return piece[here - begin : stop - begin]
        if index < len(self._starts):
            stop = min(stop, self._starts[index])
        return bytes(self._file.read_at(stop - here, here))

    def _piece(self, start: int, stop: int) -> tuple[int, bytes]:
        """The piece of a stretch that the position lies in, and where it begins."""
        begin = self._position - (self._position - start) % PIECE_BYTES
        known = self._pieces.get(start)
        if known is None or known[0] != begin:
            piece = bytes(self._file.read_at(min(PIECE_BYTES, stop - begin), begin))
            self._content.see(begin, piece)
            known = self._pieces[start] = begin, piece
        return known


def pieces_of(start: int, stop: int) -> Iterable[range]:
    """The pieces of a stretch, as ranges of bytes."""
    return (range(begin, min(begin + PIECE_BYTES, stop)) for begin in range(start, stop, PIECE_BYTES))


def whole_read(stream: IO[bytes], num_bytes: int) -> bytes:
    """As many bytes as asked for, unless the stream ends."""
    found = []
    while num_bytes and (data := stream.read(num_bytes)):
        found.append(data)
        num_bytes -= len(data)
    return b"".join(found)
