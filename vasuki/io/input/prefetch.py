"""A generator that runs ahead in its own thread, a bounded number of items at most."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_POLL_S = 0.1


class _End:
    """Follows the last item; carries the exception that ended the generator, if one did."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Prefetch(Generic[T]):
    """Iterates over `source` while a thread computes up to `depth` items more.

    Items keep their order. An exception of the source is raised where its next item would have come. `close` stops the
    thread and the source, whether or not everything was taken.

    Args:
        source: of the items.
        depth: how many wait at most.
        bytes_of: what an item takes in memory.
        most_bytes: of items that wait; a larger one waits alone.
    """

    def __init__(
        self,
        source: Generator[T, None, None],
        depth: int,
        bytes_of: Callable[[T], int] = lambda item: 0,
        most_bytes: int = 0,
    ) -> None:
        self._source = source
        self._bytes_of, self._most_bytes = bytes_of, most_bytes
        self._num_bytes = 0  # of items that wait
        self._room = threading.Condition()
        self._items: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._produce, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._finished:
            raise StopIteration
        return self._taken(self._items.get())

    def within(self, timeout_s: float) -> T | None:
        """The next item, or None if it does not come within `timeout_s`. Raises StopIteration at the end."""
        if self._finished:
            raise StopIteration
        try:
            return self._taken(self._items.get(timeout=timeout_s) if timeout_s > 0 else self._items.get_nowait())
        except queue.Empty:
            return None

    def _taken(self, item: T | _End) -> T:
        if not isinstance(item, _End):
            with self._room:
                self._num_bytes -= self._bytes_of(item)
                self._room.notify()
            return item
        self._finished = True
        self._thread.join()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        self._finished = True
        self._stop.set()
        with self._room:
            self._room.notify()
        self._thread.join()

    def _produce(self) -> None:
        end = _End()
        try:
            for item in self._source:
                self._make_room(self._bytes_of(item))
                if not self._put(item):
                    break
        except BaseException as error:
            end = _End(error)
        finally:
            self._source.close()
        self._put(end)

    def _make_room(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more may wait, unless the reader has gone."""

        def has_room() -> bool:
            waiting = self._num_bytes
            return self._stop.is_set() or not waiting or waiting + num_bytes <= self._most_bytes

        with self._room:
            self._room.wait_for(has_room)
            self._num_bytes += num_bytes

    def _put(self, item: T | _End) -> bool:
        """Wait for room, unless the reader has gone."""
        while not self._stop.is_set():
            try:
                self._items.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
