"""Seconds of calls that a busy machine disturbs.

Other processes only ever make a call slower, so of many timings a low quantile is the one to believe. Calls that are to
be compared take turns: a slow spell then hits all of them, and none alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

Call = Callable[[], object]

_QUANTILE = 0.25  # of a call's timings; lower ones are luck, such as data left in a cache
_SPAN_S = 1e-3  # short calls are repeated until a timing is this long, so that the clock itself costs nothing
_MAX_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measuring, and how long it may take."""

    group_s: float  # for a group of calls that take turns
    min_rounds: int  # of a group, whatever it takes
    copy_bytes: tuple[int, ...]
    stream_bytes: int  # of each end of a copy
    load_s: float  # of full load, to read the power
    steps_s: float  # for whole steps


FULL = Effort(4.0, 5, tuple(4096 * 4**i for i in range(9)), 2**28, 2.0, 60.0)
QUICK = Effort(0.25, 2, tuple(4096 * 4**i for i in range(6)), 2**25, 0.3, 5.0)
FIRST = replace(QUICK, group_s=0.05)


class Clock(Protocol):
    """Times calls where they run."""

    most_repeats: int  # of one call in one timing

    def seconds(self, call: Call, repeats: int) -> float:
        """Mean seconds of one of `repeats` calls that follow one another."""
        ...


class HostClock:
    """Calls are over when they return."""

    most_repeats = 200

    def seconds(self, call: Call, repeats: int) -> float:
        started_s = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - started_s) / repeats


class CudaClock:
    """Time on the device, between two events. Only the second event is waited for, never the whole device.

    The stream sleeps while the host queues the calls, so that a kernel shorter than its launch shows its own time.
    """

    most_repeats = 200
    _CYCLES_PER_S = 2e9  # no device of today runs much faster, so the sleep is at least as long as asked for
    _LONGEST_SLEEP_S = 0.1

    def __init__(self) -> None:
        self._enqueue_s = 20e-6  # host time of a call, as the last timing found it

    def seconds(self, call: Call, repeats: int) -> float:
        begin, end = cuda_event(), cuda_event()
        while True:
            asleep_s = min(self._LONGEST_SLEEP_S, 1.5 * self._enqueue_s * repeats)
            torch.cuda._sleep(int(asleep_s * self._CYCLES_PER_S))  # type: ignore[no-untyped-call]
            begin.record()
            started_s = time.perf_counter()
            for _ in range(repeats):
                call()
            queued_s = time.perf_counter() - started_s
            self._enqueue_s = queued_s / repeats
            end.record()
            end.synchronize()
            if queued_s <= asleep_s or asleep_s == self._LONGEST_SLEEP_S:
                return float(begin.elapsed_time(end)) / 1e3 / repeats


def cuda_event() -> Any:
    """An event that remembers when it was reached."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_for(device: torch.device) -> Clock:
    """The clock for calls on a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


def low_quantile(timings: Sequence[float]) -> float:
    """Return what a call takes when nobody is in its way."""
    return sorted(timings)[int(_QUANTILE * (len(timings) - 1))]


def measure(calls: Sequence[Call], clock: Clock, effort: Effort) -> list[float]:
    """Seconds of each call. They take turns until the effort's time for a group is spent."""
    repeats = [_repeats(call, clock) for call in calls]
    return measure_timed(
        [partial(clock.seconds, call, count) for call, count in zip(calls, repeats, strict=True)], effort
    )


def measure_timed(
    timed: Sequence[Callable[[], float]],
    effort: Effort,
    typical: Callable[[Sequence[float]], float] = low_quantile,
) -> list[float]:
    """Measure functions that say themselves how many seconds they took."""
    timings: list[list[float]] = [[] for _ in timed]
    started_s = time.perf_counter()
    for done in range(_MAX_ROUNDS):
        if done >= effort.min_rounds and time.perf_counter() - started_s > effort.group_s:
            break
        for function, seconds in zip(timed, timings, strict=True):
            seconds.append(function())
    return list(map(typical, timings))


def _repeats(call: Call, clock: Clock) -> int:
    call()
    return max(1, min(clock.most_repeats, round(_SPAN_S / max(clock.seconds(call, 1), 1e-9))))
