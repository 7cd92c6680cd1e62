"""Finds memory that two CUDA streams touch in no order, without a card.

Every stream, and the host, counts what it does. What it knows of the others' counts is its clock: an event carries the
clock of the stream that records it to every stream that waits for it.

    compute   write block 3 (compute 7) . record event {compute 7}
    to host                               wait for event . read block 3      it knows compute 7: in order
    to host                               read block 3                       it knows compute 5: a race

Torch's streams and events give way to such ones, so the code that is looked at is the code that runs on a card. Its
tensors lie in host memory, and everything is computed at once; only the order that is promised is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_GRAIN = 32  # bytes that are looked at together
_BY_ROWS = {"aten::index_copy_", "aten::index_select"}  # touch the rows of their first tensor that the third names


class Stream:
    """One queue of a device, or the host."""

    def __init__(self, *_: Any) -> None:
        self.clock: dict[Stream, int] = {}

    def learn(self, clock: dict[Stream, int]) -> None:
        """Go on after what the clock says."""
        for stream, count in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)


class Event:
    """Where a stream was."""

    streams: Streams  # of the test that runs

    def __init__(self, **_: Any) -> None:
        self.clock: dict[Stream, int] = {}

    def record(self) -> None:
        self.streams.issue(self.streams.current)
        self.clock = dict(self.streams.current.clock)

    def synchronize(self) -> None:
        self.streams.host.learn(self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Streams(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches what operators do to some tensors, in the streams that they are issued to.

    Attributes:
        races: what touched the same memory in no order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.host, self.current = Stream(), Stream()
        self.races: set[str] = set()
        self._on_host: dict[int, bool] = {}  # by storage
        self._last: dict[int, tuple[dict[Stream, int], dict[Stream, int]]] = {}  # grain -> (reads, writes), by stream
        monkeypatch.setattr(Event, "streams", self, raising=False)
        stand_ins: dict[str, Any] = dict(Stream=Stream, Event=Event, stream=self.use)
        for name, stand_in in (stand_ins | {"current_stream": lambda *_: self.current}).items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def watch(self, tensors: Iterable[torch.Tensor], on_host: bool = False) -> None:
        """Look at the memory of these, which would be on the host or on the device."""
        for tensor in tensors:
            self._on_host[tensor.untyped_storage().data_ptr()] = on_host

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Issue to this stream within a `with` statement."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def issue(self, stream: Stream) -> int:
        """Count something that the host gives to a stream; it starts after what the host knows."""
        stream.learn(self.host.clock)
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        return stream.clock[stream]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = zip(func._schema.arguments, args, strict=False)
            tensors = [(arg.alias_info is not None and arg.alias_info.is_write, value) for arg, value in given]
            tensors += [(False, each) for _, value in tensors if isinstance(value, list | tuple) for each in value]
            seen = [(writes, tensor) for writes, tensor in tensors if self._is_watched(tensor)]
            if seen:
                # From host to host torch copies at once, whatever the stream waits for.
                at_once = all(self._on_host[tensor.untyped_storage().data_ptr()] for _, tensor in seen)
                stream = self.host if at_once else self.current
                count = self.issue(stream)
                for writes, tensor in seen:
                    rows = args[2] if func.name() in _BY_ROWS and tensor is args[0] else None
                    for grain in _grains(tensor, rows):
                        self._touch(grain, stream, count, writes, func.name())
        return output

    def _is_watched(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._on_host

    def _touch(self, grain: int, stream: Stream, count: int, writes: bool, name: str) -> None:
        last = self._last.setdefault(grain, ({}, {}))
        for others in last if writes else last[1:]:
            for other, at in others.items():
                if stream.clock.get(other, 0) < at:
                    self.races.add(f"{name} {'writes' if writes else 'reads'} what another stream still uses")
        last[writes][stream] = count


def _grains(tensor: torch.Tensor, rows: torch.Tensor | None) -> Iterator[int]:
    """The grains of memory that a tensor lies in, or some of its rows."""
    parts = [tensor] if rows is None else [tensor[row] for row in rows.tolist()]
    for part in parts:
        if part.numel():
            reach = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) + 1
            begin = part.data_ptr()
            yield from range(begin // _GRAIN, -(-(begin + reach * part.element_size()) // _GRAIN))
