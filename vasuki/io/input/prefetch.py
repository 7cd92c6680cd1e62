"""A generator that runs ahead in its own thread, a bounded number of items at most."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
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
    """

    def __init__(self, source: Generator[T, None, None], depth: int) -> None:
        self._source = source
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
        """The next item, or None if it does not come within so many seconds. Raises StopIteration at the end."""
        if self._finished:
            raise StopIteration
        try:
            return self._taken(self._items.get(timeout=timeout_s) if timeout_s > 0 else self._items.get_nowait())
        except queue.Empty:
            return None

    def _taken(self, item: T | _End) -> T:
        if not isinstance(item, _End):
            return item
        self._finished = True
        self._thread.join()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        self._finished = True
        self._stop.set()
        self._thread.join()

    def _produce(self) -> None:
        end = _End()
        try:
            for item in self._source:
                if not self._put(item):
                    break
        except BaseException as error:
            end = _End(error)
        finally:
            self._source.close()
        self._put(end)

    def _put(self, item: T | _End) -> bool:
        """Wait for room, unless the reader has gone."""
        while not self._stop.is_set():
            try:
                self._items.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
