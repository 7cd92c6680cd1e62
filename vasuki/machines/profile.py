"""A hardware profile: what one accelerator can do, as data that says where each figure comes from.

A profile is a YAML file in `profiles/`, checked against the schema below when it is read. Files carry the units that
datasheets use (GB/s, TFLOP/s, microseconds), each in the key's name; properties convert to bytes, seconds and FLOP/s.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vasuki.base.errors import ProfileError
from vasuki.machines.link import Link
from vasuki.machines.measured_points import Measured, Rates
from vasuki.machines.price import Price
from vasuki.machines.profile_values import Count, Fraction, NonNegative, Positive, ProfileSection

AttentionChoice = Literal["auto", "packed", "paged"]


class Efficiency(ProfileSection):
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


class Overheads(ProfileSection):
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


class Interconnect(ProfileSection):
    """The path between devices of one machine."""

    kind: str
    """NVLink generation, or PCIe through the host."""
    gb_per_s: Positive
    """GB/s in each direction, achieved."""
    latency_us: NonNegative
    """Of one hop."""
    source: str
    """Where the figures come from."""


class Power(ProfileSection):
    """What the device draws."""

    idle_w: NonNegative
    """With a model loaded and nothing running."""
    peak_w: Positive
    """The board's limit."""


class ProcessorLimits(ProfileSection):
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


class HardwareProfile(ProfileSection):
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
