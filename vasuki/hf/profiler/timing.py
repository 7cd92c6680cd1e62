"""Seconds of calls that a busy machine disturbs.

Other processes only ever make a call slower, so of many timings a low quantile is the one to believe. Calls that are to
be compared take turns: a slow spell then hits all of them, and none alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    max_call_s: float  # calls that would take longer are left out
    tokens: tuple[int, ...]  # rows of matrix products, rising
    elementwise_tokens: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]  # (sequences, context)
    chunks: tuple[tuple[int, int, int], ...]  # (sequences, tokens, context)
    recurrent: tuple[tuple[int, int], ...]  # (sequences, tokens of each): decodes and beginnings of prompts
    copy_bytes: tuple[int, ...]
    stream_bytes: int  # read and copied to find the memory bandwidth
    load_s: float  # of full load, to read the power
    decode_rows: tuple[int, ...]  # sequences in the steps that show overheads
    steps: tuple[tuple[int, int], ...]  # (decodes, tokens of a chunk) of whole steps, with more and more tokens
    max_step_s: float  # whole steps that would take longer are left out


FULL = Effort(
    group_s=4.0,
    min_rounds=5,
    max_call_s=0.6,
    tokens=(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096),
    elementwise_tokens=(1, 8, 64, 256, 1024, 4096),
    decodes=((1, 64), (1, 512), (4, 256), (16, 128), (4, 1024), (16, 512), (64, 256), (16, 2048), (64, 1024)),
    chunks=(
        *((1, n, n) for n in (8, 16, 32, 64, 128, 256, 512)),
        *((1, 512, end) for end in (1024, 2048, 4096, 8192)),
    ),
    recurrent=(*((n, 1) for n in (1, 4, 16, 64)), *((1, n) for n in (16, 64, 128, 256, 512, 1024))),
    copy_bytes=tuple(4096 * 4**i for i in range(9)),
    stream_bytes=2**28,
    load_s=2.0,
    decode_rows=(2, 8, 32),
    steps=((1, 0), (4, 0), (16, 0), (40, 0), (16, 112), (16, 240), (16, 496)),
    max_step_s=3.0,
)
QUICK = Effort(
    group_s=0.25,
    min_rounds=2,
    max_call_s=0.05,
    tokens=(1, 8, 64, 256, 1024),
    elementwise_tokens=(1, 64, 1024),
    decodes=((1, 64), (8, 128), (16, 512)),
    chunks=((1, 16, 16), (1, 64, 64), (1, 256, 256), (1, 256, 512)),
    recurrent=((1, 1), (16, 1), (1, 16), (1, 256)),
    copy_bytes=tuple(4096 * 4**i for i in range(6)),
    stream_bytes=2**25,
    load_s=0.3,
    decode_rows=(2, 8),
    steps=((2, 0), (16, 0), (8, 120)),
    max_step_s=0.3,
)


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


class ColdClock:
    """A clock for calls that come between others, as the operators of a step do.

    A layer's weights pass through the core between two calls of the same operator and push its code and data out of the
    small caches. An operator on 32 rows takes twice as long then as in a loop of its own.
    """

    most_repeats = 4
    _PASS_BYTES = 2**22
    _MEMORY_BYTES = 2**26

    def __init__(self) -> None:
        memory: Sequence[torch.Tensor] = torch.zeros(
            self._MEMORY_BYTES // self._PASS_BYTES, self._PASS_BYTES // 4
        ).unbind()
        self._passing = itertools.cycle(memory)

    def seconds(self, call: Call, repeats: int) -> float:
        total_s = 0.0
        if repeats > 1:
            call()  # memory that another call gave back is taken again outside the timing
        for _ in range(repeats):
            next(self._passing).sum()
            started_s = time.perf_counter()
            call()
            total_s += time.perf_counter() - started_s
        return total_s / repeats


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
    """The clock for operators on a device."""
    return CudaClock() if device.type == "cuda" else ColdClock()


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


def affordable(calls: Sequence[Call], clock: Clock, effort: Effort) -> list[Call]:
    """The leading ones of calls that take longer and longer, up to the first that takes longer than one may."""
    for index, call in enumerate(calls):
        call()  # the first call of a kind also loads kernels and takes memory
        if clock.seconds(call, 1) > effort.max_call_s:
            return list(calls[: max(1, index)])
    return list(calls)


def _repeats(call: Call, clock: Clock) -> int:
    call()
    return max(1, min(clock.most_repeats, round(_SPAN_S / max(clock.seconds(call, 1), 1e-9))))
