"""The path between host and device memory, by which copies are priced."""

from __future__ import annotations

import functools
import itertools
import typing
from bisect import bisect_right
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vasuki.machines.profile_values import Count, Positive, ProfileSection

Direction = Literal["h2d", "d2h", "both"]


class LinkPoint(ProfileSection):
    """Rates of copies of one size."""

    bytes: Count
    """Size of one contiguous copy."""
    h2d: Positive
    """GB/s from host to device, alone."""
    d2h: Positive
    """GB/s from device to host, alone."""
    both: Positive
    """GB/s in each direction while both directions run."""

    def copy_s(self, direction: Direction) -> float:
        """Seconds of one copy of this size."""
        rate: float = getattr(self, direction)
        return self.bytes / (rate * 1e9)


class Link(ProfileSection):
    """The path between host and device memory: bandwidth by direction and copy size.

    A copy takes a fixed time plus its bytes at the saturated rate, so the time between two points is interpolated
    linearly in bytes. That keeps time monotone in size, which the searches of `planner.offload.algorithms` rely on.
    """

    kind: str
    """For example "PCIe 4.0 x16"."""
    copy_engines: Annotated[int, Field(ge=1, le=8)] = 2
    """With two, the directions overlap; with one, they take turns."""
    curve: Annotated[tuple[LinkPoint, ...], Field(min_length=1)]
    """Points by rising size. Below the first a copy takes as long as the first; beyond the last the rate stays."""
    source: str
    """Measured (date, driver, script) or derived from what."""

    @model_validator(mode="after")
    def _monotone(self) -> Link:
        for before, after in itertools.pairwise(self.curve):
            if after.bytes <= before.bytes:
                raise ValueError(f"curve must rise in bytes, but {after.bytes} follows {before.bytes}")
            for direction in typing.get_args(Direction):
                if after.copy_s(direction) < before.copy_s(direction):
                    raise ValueError(f"a {direction} copy of {after.bytes} bytes is faster than one of {before.bytes}")
        return self

    # A simulation asks for millions of copies, so the curve is also kept as plain lists.

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Bytes of a copy at each point."""
        return [point.bytes for point in self.curve]

    @functools.cached_property
    def seconds(self) -> dict[Direction, list[float]]:
        """Seconds of a copy at each point."""
        return {way: [point.copy_s(way) for point in self.curve] for way in typing.get_args(Direction)}

    def copy_s(self, copy_bytes: float, direction: Direction) -> float:
        """Seconds of one contiguous copy of pinned memory. `both`: of one direction while the other is busy too."""
        if copy_bytes <= 0:
            return 0.0
        sizes, seconds = self.sizes, self.seconds[direction]
        index = bisect_right(sizes, copy_bytes)
        if index == 0:
            return seconds[0]
        low, low_s = sizes[index - 1], seconds[index - 1]
        if index == len(sizes):
            return low_s * copy_bytes / low
        return low_s + (seconds[index] - low_s) * (copy_bytes - low) / (sizes[index] - low)

    def bandwidth_bytes_per_s(self, copy_bytes: float, direction: Direction) -> float:
        """Rate of copies of this size."""
        return copy_bytes / self.copy_s(copy_bytes, direction)

    def transfer_s(self, h2d_bytes: float, d2h_bytes: float, copy_bytes: float = 0) -> float:
        """Seconds to move both amounts in copies of `copy_bytes` each (0: one copy for each direction).

        With two copy engines the directions run together at the `both` rate until the shorter is done, and the rest of
        the longer goes on alone; with one engine they take turns.
        """
        return self.transfers(d2h_bytes, copy_bytes)(h2d_bytes)

    def transfers(self, d2h_bytes: float, copy_bytes: float) -> Callable[[float], float]:
        """`transfer_s` as a function of `h2d_bytes` alone, for those who ask a million times."""
        h2d_copy_s, both_copy_s = self.copy_s(copy_bytes, "h2d"), self.copy_s(copy_bytes, "both")
        d2h_alone_s = self._one_way_s(d2h_bytes, copy_bytes, "d2h")
        d2h_both_s = self._one_way_s(d2h_bytes, copy_bytes, "both")
        takes_turns = not d2h_bytes or self.copy_engines == 1

        def seconds(h2d_bytes: float) -> float:
            if not copy_bytes or h2d_bytes <= copy_bytes:
                h2d_alone_s, h2d_both_s = self.copy_s(h2d_bytes, "h2d"), self.copy_s(h2d_bytes, "both")
            else:
                copies = h2d_bytes / copy_bytes
                h2d_alone_s, h2d_both_s = copies * h2d_copy_s, copies * both_copy_s
            if takes_turns or not h2d_bytes:
                return h2d_alone_s + d2h_alone_s
            if h2d_both_s < d2h_both_s:
                return h2d_both_s + d2h_alone_s * (1 - h2d_both_s / d2h_both_s)
            return d2h_both_s + h2d_alone_s * (1 - d2h_both_s / h2d_both_s)

        return seconds

    def _one_way_s(self, num_bytes: float, copy_bytes: float, direction: Direction) -> float:
        if not copy_bytes or num_bytes <= copy_bytes:
            return self.copy_s(num_bytes, direction)
        return num_bytes / copy_bytes * self.copy_s(copy_bytes, direction)
