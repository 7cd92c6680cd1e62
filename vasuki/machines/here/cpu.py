"""The processor and the memory of this machine, as the operating system describes them, and what can be known of their
rates without measuring.

limits_of    what nothing computes faster than: cores x clock x multiply-adds of a cycle, by instruction level
typical_of   what kernels usually reach, for a plan before anything was measured
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vasuki.machines.here import control_group
from vasuki.machines.profile import HardwareProfile, ProcessorLimits
from vasuki.machines.profile_files import find_profile

LEVEL_VARIABLE = "VASUKI_CPU_LEVEL"

_MAX_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# No processor that is sold runs faster; servers, which virtual machines run on, keep below.
_FASTEST_HZ, _FASTEST_SERVER_HZ = 6.2e9, 5.0e9
# No core draws more: some 30 GB/s on servers, 60 on desktops, 120 on Apple's.
_CORE_BYTES_PER_S = {"x86": 64e9, "arm": 128e9}
_TYPICAL_HZ = 3e9
_TORCH_WORDS = {"fma": "fma3"} | {f"avx512{part}": f"avx512_{part}" for part in ("f", "bw", "dq", "vl", "cd", "ifma")}


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
    """A CPU, and as many of its cores as torch computes on."""

    model: str
    cores: int
    flags: frozenset[str]  # instructions that it has, in the words of /proc/cpuinfo

    @property
    def name(self) -> str:
        """The name under which its measured profile is found."""
        return f"CPU {without_noise(self.model)} {self.cores} core{'s' * (self.cores > 1)}"

    @property
    def capabilities(self) -> set[str]:
        """The flags in the words of `torch.cpu.get_capabilities`."""
        return {_TORCH_WORDS.get(flag, flag) for flag in self.flags}

    @property
    def torch_multiplies_bfloat16(self) -> bool:
        """Whether torch multiplies bfloat16 no slower than float32, as with AVX-512."""
        return {"avx512vl", "avx512bw", "avx512dq"} <= self.flags or bool({"avx_ne_convert", "bf16"} & self.flags)


@functools.cache
def processor() -> Processor:
    """The processor of this machine."""
    fields = _cpu_info()
    model = next((each["model name"] for each in fields if "model name" in each), "")
    flags = next((each.get("flags") or each.get("Features") for each in fields), "") or ""
    return Processor(model or platform.processor() or platform.machine(), _cores(fields), frozenset(flags.split()))


def without_noise(model: str) -> str:
    """`Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz` -> `Intel Xeon Platinum 8375C`."""
    short = re.sub(r"\((?:r|tm)\)|\bcpu\b|\bprocessor\b|\d+-core|@.*", " ", model, flags=re.IGNORECASE)
    return " ".join(short.split()) or model


def total_bytes() -> int:
    """Memory of the machine or of the container, whichever is smaller."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, control_group.memory_limit() or machine)


def available_bytes() -> int:
    """Memory that this process can still take without pushing anybody out."""
    room, available = control_group.memory_room(), _mem_available()
    return available if room is None else min(available, max(0, room))


def most_threads() -> int | None:
    """Threads that a quota of processor time keeps busy, at least one; None without a quota. More of them would wait
    for each other while the kernel holds some back."""
    quota = control_group.processor_quota()
    return None if quota is None else max(1, int(quota))


def level_of(processor: Processor) -> str:
    """The widest instructions that it has, whatever kernels use of them."""
    return _level(processor).name


def limits_of(processor: Processor) -> ProcessorLimits:
    """Rates for bounds. What the system does not tell is taken to be the best there is."""
    level = _level(processor)
    float32 = processor.cores * _max_clock_hz("hypervisor" in processor.flags) * level.float32 / 1e12
    half = float32 * level.bfloat16 / level.float32
    return ProcessorLimits(
        peak_tflops={"float32": float32, "bfloat16": half, "float16": half},
        memory_gb_per_s=processor.cores * _CORE_BYTES_PER_S["arm" if level is _ARM else "x86"] / 1e9,
        cache_mib=_cache_bytes() // 2**20,
        stored_bytes=2,
        source=f"{processor.cores} cores of {processor.model} ({level.name}) at their fastest clock",
    )


def typical_of(processor: Processor) -> HardwareProfile:
    """The generic profile, for this processor's cores and instructions."""
    generic, level = find_profile("cpu"), _level(processor)
    more = processor.cores / generic.processors
    float32 = processor.cores * _TYPICAL_HZ * level.float32 / 1e12
    price, power = generic.price, generic.power
    return generic.model_copy(
        update={
            "processors": processor.cores,
            "peak_tflops": {
                "float32": float32,
                "bfloat16": float32 * level.bfloat16 / level.float32,
                "float16": float32,
            },
            "memory_gb_per_s": generic.memory_gb_per_s * more,
            "limits": limits_of(processor),
            "price": price.model_copy(update={"per_hour": price.per_hour * more}),
            "power": power.model_copy(update={"idle_w": power.idle_w * more, "peak_w": power.peak_w * more}),
        }
    )


def _cpu_info() -> list[dict[str, str]]:
    """What /proc/cpuinfo says of each processor; nothing where there is no such file."""
    try:
        texts = Path("/proc/cpuinfo").read_text().strip().split("\n\n")
    except OSError:
        return []
    return [
        {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
        for text in texts
    ]


def _cores(fields: list[dict[str, str]]) -> int:
    """Threads to compute on: as the environment says, else one for each core that this process may use, and no more
    than its quota keeps busy."""
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if said.isdigit() and int(said):
        return int(said)
    there = _usable_cores(fields)
    return min(there, most_threads() or there)


def _usable_cores(fields: list[dict[str, str]]) -> int:
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    cores = {
        (each["physical id"], each["core id"])
        for each in fields
        if {"processor", "physical id", "core id"} <= set(each) and int(each["processor"]) in usable
    }
    return len(cores) or len(usable)


def _mem_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _level(processor: Processor) -> _Level:
    if platform.machine().lower() in ("aarch64", "arm64"):
        return _ARM
    return [each for each in _LEVELS if each.needs <= processor.flags][-1]


def _max_clock_hz(in_virtual_machine: bool) -> float:
    try:
        return int(_MAX_CLOCK.read_text()) * 1e3
    except (OSError, ValueError):
        return _FASTEST_SERVER_HZ if in_virtual_machine else _FASTEST_HZ


def _cache_bytes() -> int:
    """Count the last level, for each group of cores that share one, and the level before, for each core."""
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
