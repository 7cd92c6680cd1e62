"""Copies between host and device by size, and what memory of the host costs that is used for the first time.

Copies are issued as the engine issues them: of blocks that lie scattered, in one call where the driver has one, from
and to pinned memory, one stream a direction on a GPU, one thread a direction on a CPU, where "host" and "device" are
two places of the same memory.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from vasuki.hf.kv.block_copies import copy_of, runs_of
from vasuki.hf.kv.kv_cache import pinned_zeros
from vasuki.hf.kv.kv_mover import CopyEngine, ThreadCopyEngine
from vasuki.hf.profiler.timing import Effort, cuda_event, measure_timed
from vasuki.machines.link import Link, LinkPoint

_RUN_BYTES = 2**23  # copied in a row for one timing
_MOST_COPIES = 256
_POOL_BYTES = 2**26  # of a layer, to see what first touches of its memory cost
_TOUCHED_BYTES = 2**22
_SATURATED_CHANGE = 0.05
_OVERLAP = 1.2  # two directions at once must move this much more than one, to count as two copy engines


class Path(Protocol):
    """Ways between two memories."""

    def seconds(self, h2d: bool, d2h: bool, num_bytes: int) -> float:
        """Mean seconds of a copy of `num_bytes`, in one direction or in both at once."""
        ...


def measure_link(device: torch.device, effort: Effort, kind: str, source: str) -> Link:
    """Bandwidth by size of copy, in each direction alone and with the other one busy too."""
    with torch.inference_mode(False):  # the mode belongs to a thread, and copy threads may not change its tensors
        path: Path = _CudaPath(device, effort) if device.type == "cuda" else _HostPath(effort)
    sizes = effort.copy_bytes
    ways = ((True, False), (False, True), (True, True))

    def timed(way: tuple[bool, bool], size: int) -> Callable[[], float]:
        return lambda: path.seconds(*way, size)

    calls = [timed(way, size) for size in sizes for way in ways]
    for call in calls:
        call()  # first touches and first launches
    seconds = measure_timed(calls, effort)
    return link_of(sizes, seconds[0::3], seconds[1::3], seconds[2::3], kind, source)


def link_of(
    sizes: Sequence[int],
    h2d_s: Sequence[float],
    d2h_s: Sequence[float],
    both_s: Sequence[float],
    kind: str,
    source: str,
) -> Link:
    """A link's section from seconds of copies by size.

    A larger copy cannot be faster than a smaller one, nor one of two faster than one alone: where noise says so, the
    longer time stands.
    """
    h2d_s, d2h_s = _rising(h2d_s), _rising(d2h_s)
    both_s = [max(times) for times in zip(_rising(both_s), h2d_s, d2h_s, strict=True)]
    alone, together = min(sizes[-1] / h2d_s[-1], sizes[-1] / d2h_s[-1]), 2 * sizes[-1] / both_s[-1]
    points = tuple(
        LinkPoint(bytes=size, h2d=_rate(size, to_device), d2h=_rate(size, to_host), both=_rate(size, both))
        for size, to_device, to_host, both in zip(sizes, h2d_s, d2h_s, both_s, strict=True)
    )
    saturated = max(saturation_bytes(sizes, [getattr(point, way) for point in points]) for way in ("h2d", "d2h"))
    return Link(
        kind=kind,
        copy_engines=2 if together > _OVERLAP * alone else 1,
        curve=points,
        source=f"{source}; saturated from copies of {saturated} bytes",
    )


def saturation_bytes(sizes: Sequence[int], rates: Sequence[float]) -> int:
    """The size from which bandwidth no longer changes much from one size to the next (Vasuki, 5.1)."""
    for index in range(len(sizes) - 1, 0, -1):
        if abs(rates[index] / rates[index - 1] - 1) > _SATURATED_CHANGE:
            return sizes[index]
    return sizes[0]


def pinning_s_per_gib(num_bytes: int = 2**28) -> float:
    """Pinning host memory, as the engine does once for each layer of a pool."""
    started_s = time.perf_counter()
    memory = pinned_zeros((num_bytes,), torch.uint8)
    elapsed_s = time.perf_counter() - started_s
    del memory  # giving it back is not part of it
    return elapsed_s * 2**30 / num_bytes


def first_touch_s_per_mib(effort: Effort) -> float:
    """What a MiB of a CPU's KV pool costs at its first write beyond later ones: page faults."""

    def fill_s(memory: torch.Tensor) -> float:
        started_s = time.perf_counter()
        memory.fill_(1)
        return time.perf_counter() - started_s

    def seconds() -> float:
        # As large as pools are, which malloc takes from the system each time; a part of it is touched.
        memory = torch.empty(_POOL_BYTES, dtype=torch.uint8)[:_TOUCHED_BYTES]
        first_s, again_s = (fill_s(memory) for _ in range(2))
        return max(0.0, first_s - again_s) / _TOUCHED_BYTES * 2**20

    return measure_timed([seconds], effort, statistics.median)[0]


def _rising(seconds: Sequence[float]) -> list[float]:
    rising: list[float] = []
    for value in seconds:
        rising.append(max(value, rising[-1] * 1.001) if rising else value)
    return rising


def _rate(num_bytes: int, seconds: float) -> float:
    """GB/s. Six digits, so that rounding does not make a larger copy faster than a smaller one."""
    return float(f"{num_bytes / seconds / 1e9:.6g}")


class _Buffers:
    """Source and target of one direction, walked through so that a copy does not find its data in a cache."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source = source
        self._target = target
        self._at = 0

    def copies(self, num_bytes: int, count: int) -> Callable[[], int]:
        """So many copies of that size, no two of which are neighbours on both sides."""
        blocks = len(self._source) // num_bytes
        source, target = (each[: blocks * num_bytes].view(blocks, num_bytes) for each in (self._source, self._target))
        chosen = [(self._at + index) % blocks for index in range(count)]
        self._at = (self._at + count) % blocks
        return copy_of(source, target, runs_of(chosen, chosen[::-1]))[1]


def _copies(num_bytes: int) -> int:
    return max(1, min(_MOST_COPIES, _RUN_BYTES // num_bytes))


def _memory(num_bytes: int, device: torch.device | str = "cpu", pinned: bool = False) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)


class _HostPath:
    """Two threads, one a direction, as the engine has them on a CPU."""

    def __init__(self, effort: Effort) -> None:
        size = max(effort.stream_bytes, effort.copy_bytes[-1])
        self._engine: CopyEngine = ThreadCopyEngine()
        self._ways = [_Buffers(_memory(size), _memory(size)) for _ in range(2)]

    def seconds(self, h2d: bool, d2h: bool, num_bytes: int) -> float:
        took_s: list[float] = []
        start = threading.Barrier(h2d + d2h)
        done = [
            self._engine.submit(to_host, self._run(buffers, num_bytes, start, took_s), [])
            for to_host, buffers, wanted in ((False, self._ways[0], h2d), (True, self._ways[1], d2h))
            if wanted
        ]
        for flag in done:
            flag.wait()
        return max(took_s)

    @staticmethod
    def _run(buffers: _Buffers, num_bytes: int, start: threading.Barrier, took_s: list[float]) -> Callable[[], int]:
        def run() -> int:
            count = _copies(num_bytes)
            copies = buffers.copies(num_bytes, count)
            start.wait()
            started_s = time.perf_counter()
            copies()
            took_s.append((time.perf_counter() - started_s) / count)
            return count * num_bytes

        return run


class _CudaPath:
    """Two streams, one a direction, timed by events of their own."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        size = max(effort.stream_bytes, effort.copy_bytes[-1])
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._ways = [
            _Buffers(_memory(size, pinned=True), _memory(size, device)),
            _Buffers(_memory(size, device), _memory(size, pinned=True)),
        ]

    def seconds(self, h2d: bool, d2h: bool, num_bytes: int) -> float:
        count = _copies(num_bytes)
        ways = [(self._streams[i], self._ways[i]) for i, wanted in enumerate((h2d, d2h)) if wanted]
        timed = [(cuda_event(), cuda_event()) for _ in ways]
        copies = [buffers.copies(num_bytes, count) for _, buffers in ways]
        for (stream, _), (begin, end), copy in zip(ways, timed, copies, strict=True):
            with torch.cuda.stream(stream):
                begin.record(stream)
                copy()
                end.record(stream)
        for _, end in timed:
            end.synchronize()
        return max(float(begin.elapsed_time(end)) for begin, end in timed) / 1e3 / count
