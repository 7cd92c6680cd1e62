"""What can be known of this machine's processor without measuring, and without torch.

limits    what nothing computes faster than: cores x clock x multiply-adds of a cycle, by instruction level
typical   what kernels usually reach, for a plan before anything was measured
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vasuki.machines.profile import HardwareProfile, Limits
from vasuki.machines.profile_files import find_profile

LEVEL_VARIABLE = "VASUKI_CPU_LEVEL"

_CPUINFO = Path("/proc/cpuinfo")
_MAX_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# No processor that is sold runs faster; servers, which virtual machines run on, keep below.
_FASTEST_HZ, _FASTEST_SERVER_HZ = 6.2e9, 5.0e9
# No core draws more: some 30 GB/s on servers, 60 on desktops, 120 on Apple's.
_CORE_BYTES_PER_S = {"x86": 64e9, "arm": 128e9}
_TYPICAL_HZ = 3e9


@dataclass(frozen=True, slots=True)
class _Level:
    """Multiply-adds of a core and cycle, as floating-point operations: two ports of vectors."""

    name: str
    needs: frozenset[str]
    float32: int
    bfloat16: int


# With the flags of /proc/cpuinfo. A plain build may use any of what a level has, so the lowest are as wide as SSE.
_LEVELS = (
    _Level("generic", frozenset(), 16, 16),
    _Level("avx2", frozenset({"avx2", "fma"}), 32, 32),
    _Level("avx512", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}), 64, 64),
    _Level("avx512_bf16", frozenset({"avx512f", "avx512_bf16"}), 64, 128),
    _Level("amx", frozenset({"avx512f", "amx_tile", "amx_bf16"}), 64, 2048),
)
_ARM = _Level("neon", frozenset(), 32, 128)  # four ports, and bfloat16 products where there are any


@dataclass(frozen=True, slots=True)
class Processor:
    """This machine's processor as the system describes it."""

    model: str
    cores: int  # that this process may use
    level: str  # of instructions: what it has, whatever kernels use of it
    float32_flops: float  # of all cores at their fastest, a second
    bfloat16_flops: float
    bytes_per_s: float  # of memory, at most
    cache_bytes: int  # all that keeps data from one step to the next

    @classmethod
    def of_this_machine(cls) -> Processor:
        """Read what the system tells; what it does not tell is taken to be the best there is."""
        fields = _cpuinfo()
        flags = frozenset(fields.get("flags", fields.get("Features", "")).split())
        is_arm = platform.machine().lower() in ("aarch64", "arm64")
        level = _ARM if is_arm else [each for each in _LEVELS if each.needs <= flags][-1]
        cores = usable_cores()
        hz = _max_clock_hz(in_virtual_machine="hypervisor" in flags)
        return cls(
            model=fields.get("model name") or platform.processor() or platform.machine(),
            cores=cores,
            level=level.name,
            float32_flops=cores * hz * level.float32,
            bfloat16_flops=cores * hz * level.bfloat16,
            bytes_per_s=cores * _CORE_BYTES_PER_S["arm" if is_arm else "x86"],
            cache_bytes=_cache_bytes(),
        )

    @property
    def name(self) -> str:
        """As `vasuki profile` lists it in `device_names`."""
        short = re.sub(r"\((?:r|tm)\)|\bcpu\b|\bprocessor\b|\d+-core|@.*", " ", self.model, flags=re.IGNORECASE)
        return f"CPU {' '.join(short.split()) or self.model} {self.cores} core{'s' * (self.cores > 1)}"

    @property
    def limits(self) -> Limits:
        """Rates for bounds."""
        half = max(self.float32_flops, self.bfloat16_flops) / 1e12
        return Limits(
            peak_tflops={"float32": self.float32_flops / 1e12, "bfloat16": half, "float16": half},
            memory_gb_per_s=self.bytes_per_s / 1e9,
            cache_mib=self.cache_bytes // 2**20,
            stored_bytes=2,
            source=f"{self.cores} cores of {self.model} ({self.level}) at their fastest clock",
        )

    @property
    def typical(self) -> HardwareProfile:
        """The generic profile, for this processor's cores and instructions."""
        generic = find_profile("cpu")
        more = self.cores / generic.processors
        hz = self.float32_flops / _flops_per_hz(self)
        slower = _TYPICAL_HZ / hz
        price, power = generic.price, generic.power
        return generic.model_copy(
            update={
                "processors": self.cores,
                "peak_tflops": {
                    "float32": self.float32_flops * slower / 1e12,
                    "bfloat16": self.bfloat16_flops * slower / 1e12,
                    "float16": self.float32_flops * slower / 1e12,
                },
                "memory_gb_per_s": generic.memory_gb_per_s * more,
                "limits": self.limits,
                "price": price.model_copy(update={"per_hour": price.per_hour * more}),
                "power": power.model_copy(update={"idle_w": power.idle_w * more, "peak_w": power.peak_w * more}),
            }
        )


def _flops_per_hz(processor: Processor) -> float:
    level = next(each for each in (*_LEVELS, _ARM) if each.name == processor.level)
    return processor.cores * level.float32


def usable_cores() -> int:
    """Cores that this process may run on, as far as it has not been told to use fewer."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(affinity, int(told))) if told.isdecimal() else affinity


def _cpuinfo() -> dict[str, str]:
    """Fields of the first processor."""
    try:
        first = _CPUINFO.read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _max_clock_hz(in_virtual_machine: bool) -> float:
    try:
        return int(_MAX_CLOCK.read_text()) * 1e3
    except (OSError, ValueError):
        return _FASTEST_SERVER_HZ if in_virtual_machine else _FASTEST_HZ


def _cache_bytes() -> int:
    """Of the last level, for each group of cores that share one; and of the level before, for each core."""
    sizes = dict(_cache_sizes())
    return sum(sizes.values()) if sizes else 2**29  # unknown: as much as the largest have


def _cache_sizes() -> Iterator[tuple[str, int]]:
    folders = sorted(_CACHES.parent.parent.glob("cpu[0-9]*/cache/index[0-9]*"))
    for folder in folders:
        try:
            if (folder / "type").read_text().strip() == "Instruction":
                continue
            level, sharing = (folder / "level").read_text().strip(), (folder / "shared_cpu_list").read_text().strip()
            size = (folder / "size").read_text().strip()
            unit = {"K": 2**10, "M": 2**20}.get(size[-1:], 1)
            yield f"{level} {sharing}", int(size.rstrip("KM")) * unit
        except (OSError, ValueError):
            continue
