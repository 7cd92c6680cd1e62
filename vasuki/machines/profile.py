"""A hardware profile: what one accelerator can do, as data that says where each figure comes from.

A profile is a YAML file in `profiles/`, checked against the schema below when it is read. Files carry the units that
datasheets use (GB/s, TFLOP/s, microseconds), each in the key's name; properties convert to bytes, seconds and FLOP/s.
"""

from __future__ import annotations

import functools
import itertools
import typing
from bisect import bisect_right
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vasuki.base.errors import ProfileError
from vasuki.machines.price import Price

Direction = Literal["h2d", "d2h", "both"]
AttentionChoice = Literal["auto", "packed", "paged"]
ElementwiseOperator = Literal["norm", "rope", "activation", "residual", "embedding"]  # "rope" with the KV write

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class _ProfileSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Efficiency(_ProfileSection):
    """Achievable shares of the datasheet's rates. They multiply the peak rates in the cost model's rooflines."""

    matmul: Fraction = 0.75
    """Share of the dense matmul peak that full tiles reach under sustained load."""
    bandwidth: Fraction = 0.85
    """Share of the memory bandwidth at which weights are read."""
    attention: Fraction = 0.50
    """Share of the dense matmul peak that attention over prompt chunks reaches."""
    kv_read: Fraction = 0.70
    """Share of the memory bandwidth at which decodes read paged keys and values."""
    source: str
    """Where the shares come from: fitted to which measurements, or assumed by what argument."""


class Overheads(_ProfileSection):
    """Fixed costs that no roofline shows."""

    step_us: NonNegative
    """Once a step, outside kernels: forming inputs, fetching sampled tokens."""
    launch_us: NonNegative
    """Host time of one operator that is launched, with the Python around it. On an accelerator launches run ahead and
    only show when kernels are shorter."""
    kernel_us: NonNegative
    """Shortest time of a kernel on the device."""
    first_touch_us_per_mib: NonNegative = 0
    """Once for each MiB of KV that a job uses at its peak, where memory comes page by page as it is written: a CPU."""
    pinning_s_per_gib: NonNegative = 0
    """Once for each GiB of host memory that KV is offloaded to, before the first step: the system locks its pages."""
    source: str
    """Where the figures come from."""


class LinkPoint(_ProfileSection):
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


class Link(_ProfileSection):
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


class Interconnect(_ProfileSection):
    """The path between devices of one machine."""

    kind: str
    """NVLink generation, or PCIe through the host."""
    gb_per_s: Positive
    """GB/s in each direction, achieved."""
    latency_us: NonNegative
    """Of one hop."""
    source: str
    """Where the figures come from."""


class Power(_ProfileSection):
    """What the device draws."""

    idle_w: NonNegative
    """With a model loaded and nothing running."""
    peak_w: Positive
    """The board's limit."""


def _check_pairs(tokens: tuple[int, ...], values: tuple[float, ...], name: str) -> None:
    if len(tokens) != len(values) or not tokens:
        raise ValueError(f"tokens has {len(tokens)} entries and {name} has {len(values)}; they come in pairs")
    if any(after <= before for before, after in itertools.pairwise(tokens)):
        raise ValueError("tokens must rise")


class _TokenSeries(_ProfileSection):
    """Times by the number of tokens."""

    tokens: tuple[Count, ...]
    """Rows, rising."""
    us: tuple[Positive, ...]
    """Microseconds, one for each entry of `tokens`."""

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        _check_pairs(self.tokens, self.us, "us")
        return self


class MatmulPoints(_TokenSeries):
    """Measured times of `[tokens, k] x [k, n]`."""

    k: Count
    """Inner size."""
    n: Count
    """Output columns."""
    dtype: str
    """Of inputs and weights."""


class ElementwisePoints(_TokenSeries):
    """Measured times of one memory-bound operator."""

    operator: ElementwiseOperator
    """Which one."""
    bytes_per_token: Count
    """What it reads and writes for a token."""


class AttentionPoint(_ProfileSection):
    """One measured attention call of one layer."""

    sequences: Count
    """In the call, all of the same lengths."""
    tokens: Count
    """Query tokens of each; 1 is a decode."""
    context: Count
    """Context of each after the call."""
    us: Positive
    """Microseconds."""


class AttentionPoints(_ProfileSection):
    """Measured attention of one head layout."""

    heads: Count
    """Query heads."""
    kv_heads: Count
    """Key and value heads."""
    head_dim: Count
    """Size of a head."""
    dtype: str
    """Of queries, and of keys and values unless they are kept in another."""
    kv_dtype: str = ""
    """Of keys and values, where they are."""
    points: Annotated[tuple[AttentionPoint, ...], Field(min_length=1)]
    """In any order."""


class RecurrentPoint(_ProfileSection):
    """One measured call of a recurrent layer."""

    sequences: Count
    """In the call, all of the same lengths."""
    tokens: Count
    """Of each; 1 is a decode."""
    us: Positive
    """Microseconds."""


class RecurrentPoints(_ProfileSection):
    """A measured layer that carries a state from token to token, its matrices included."""

    matrices: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=2)]
    """Sizes `[k, n]`: into the layer, out of it, others."""
    state_size: Annotated[int, Field(ge=0)]
    """Numbers of a row that the recurrence keeps."""
    row_bytes: Count
    """What the layer keeps of a row, its convolution included."""
    dtype: str
    """Of inputs and weights."""
    points: Annotated[tuple[RecurrentPoint, ...], Field(min_length=1)]
    """In any order."""


class InStep(_ProfileSection):
    """What the operators of a step take there, over what they take alone: a step's other operators use the same caches
    and the same memory."""

    tokens: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Tokens of a step, rising."""
    ratio: tuple[Positive, ...]
    """One for each entry of `tokens`."""

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        _check_pairs(self.tokens, self.ratio, "ratio")
        return self


class Rates(_ProfileSection):
    """Rates by which rooflines are drawn, in one place."""

    memory_gb_per_s: Positive
    """Of memory."""
    peak_tflops: Annotated[dict[str, Positive], Field(min_length=1)]
    """By dtype."""
    processors: Count
    """How many output tiles are computed at once."""
    tile_rows: Count
    """Rows of the matmul tile."""
    matmul: Fraction
    """Share of the peak."""
    bandwidth: Fraction
    """Share of the memory bandwidth."""
    attention: Fraction
    """Share of the peak."""
    kv_read: Fraction
    """Share of the memory bandwidth."""
    launch_us: NonNegative
    """Host time of an operator."""
    kernel_us: NonNegative
    """Shortest time of a kernel."""


class Measured(_ProfileSection):
    """Operator times that take precedence over the analytical rooflines, which then only fill in between."""

    source: str
    """Date, device, driver, script; or whose public measurements."""
    rates: Rates | None = None
    """Of the profile that the times were measured for. One with other rates keeps the shares of them that operators
    reached, not the times. Not given: the profile's own, whatever they are."""
    matmul: tuple[MatmulPoints, ...] = ()
    """Matrix products, by size."""
    elementwise: tuple[ElementwisePoints, ...] = ()
    """Memory-bound operators."""
    attention: tuple[AttentionPoints, ...] = ()
    """Attention calls."""
    recurrent: RecurrentPoints | None = None
    """A recurrent layer."""
    in_step: InStep | None = None
    """Whole steps against the sum of their operators."""
    spread: NonNegative = 0
    """By what share the middle half of repeated whole steps lay apart: how far the machine's pace can be told."""


class ProcessorLimits(_ProfileSection):
    """Rates for lower bounds, where they are not a datasheet's."""

    peak_tflops: dict[str, Positive]
    """By dtype."""
    memory_gb_per_s: Positive
    """Of memory."""
    cache_mib: Annotated[int, Field(ge=0)] = 0
    """That may hold weights from one step to the next."""
    stored_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of a weight, where an engine may keep it in fewer than it multiplies; 0 for as many."""
    source: str
    """Where the figures come from."""


class HardwareProfile(_ProfileSection):
    """One accelerator, or a CPU."""

    name: str
    """As the file is called."""
    title: str
    """As the maker calls it."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """A GPU runs behind the host; a CPU is the host."""
    device_names: tuple[str, ...] = ()
    """Names under which drivers report it."""
    memory_mib: Count
    """Memory that the driver reports as total."""
    memory_gb_per_s: Positive
    """Peak memory bandwidth."""
    peak_tflops: Annotated[dict[str, Positive], Field(min_length=1)]
    """Peak dense matmul rate by dtype, accumulating in float32. Never the sparse figure."""
    processors: Count
    """Streaming multiprocessors, or cores: how many output tiles are computed at once."""
    compute_capability: tuple[Count, Annotated[int, Field(ge=0)]] | None = None
    """Generation of an NVIDIA card, which decides by what kernels it attends and multiplies experts. Not given: an
    A100's."""
    tile_rows: Count = 128
    """Rows of the matmul tile. Tokens in a step are padded to it."""
    attention: AttentionChoice = "auto"
    """Which kernel attends on a GPU: torch's packed one wherever it can, the paged one of this package, or for each
    step the one that is expected to be faster."""
    efficiency: Efficiency
    overheads: Overheads
    rates_measured_on: str = ""
    """Day on which `efficiency` and `overheads` were measured on such a card; empty where they are assumed, or others'
    figures."""
    link: Link
    interconnect: Interconnect | None = None
    power: Power
    price: Price
    dollars_per_fp32_gflop_per_watt: Positive | None = None
    """The paper's hardware cost figure (Vasuki, table 1), where it gives one."""
    sources: dict[str, str] = {}
    """Where the remaining figures come from, by key."""
    measured: Measured | None = None
    limits: ProcessorLimits | None = None

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * 2**20

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_gb_per_s * 1e9

    @property
    def generation(self) -> tuple[int, int]:
        """Compute capability of a card."""
        return self.compute_capability or (8, 0)

    @property
    def rates(self) -> Rates:
        """Those by which rooflines are drawn."""
        efficiency = self.efficiency.model_dump(exclude={"source"})
        overheads = self.overheads.model_dump(include={"launch_us", "kernel_us"})
        own = self.model_dump(include={"memory_gb_per_s", "peak_tflops", "processors", "tile_rows"})
        return Rates(**own, **efficiency, **overheads)

    @property
    def is_as_measured(self) -> bool:
        """Whether operators were measured at the rates that it has."""
        return self.measured is not None and self.measured.rates in (None, self.rates)

    def as_measured(self) -> HardwareProfile:
        """The profile with the rates at which operators were measured."""
        if self.measured is None or self.measured.rates is None:
            return self
        rates = self.measured.rates.model_dump()
        sections = {
            name: section.model_copy(update={key: rates.pop(key) for key in type(section).model_fields if key in rates})
            for name, section in (("efficiency", self.efficiency), ("overheads", self.overheads))
        }
        return self.model_copy(update={**rates, **sections})

    @property
    def basis(self) -> str:
        """What its rates come from: measurements, whose and when, or a datasheet."""
        if self.measured is None:
            return (
                f"measured on {self.rates_measured_on}, but no operator by itself"
                if self.rates_measured_on
                else "datasheet"
            )
        scaled = "" if self.is_as_measured else "; scaled to the profile's rates, which are others"
        return f"measured: {self.measured.source}{scaled}"

    def peak_flops(self, dtype: str) -> float:
        """Peak dense matmul rate in FLOP/s. Raises ProfileError for a dtype that the profile does not list."""
        try:
            return self.peak_tflops[dtype] * 1e12
        except KeyError:
            known = ", ".join(self.peak_tflops)
            raise ProfileError(f"profile {self.name} has no peak_tflops for {dtype}; it lists {known}") from None

    # --- for bounds: the larger of what is known and what was measured ------------------------------------------------

    def most_flops(self, dtype: str) -> float:
        """FLOP/s that nothing beats. Raises ProfileError as `peak_flops` does."""
        known = self.limits.peak_tflops.get(dtype, 0.0) * 1e12 if self.limits else 0.0
        return max(known, self.peak_flops(dtype))

    @property
    def most_bytes_per_s(self) -> float:
        """Memory traffic that nothing beats."""
        return max(self.limits.memory_gb_per_s * 1e9 if self.limits else 0.0, self.memory_bytes_per_s)

    def datasheet_only(self) -> HardwareProfile:
        """Return the profile without its measured points."""
        return self.model_copy(update={"measured": None})
