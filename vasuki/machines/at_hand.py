"""The machine at hand, as the operating system and drivers describe it: without torch, which takes seconds to load."""

from __future__ import annotations

import functools
import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

_TORCH_WORDS = {"fma": "fma3"} | {f"avx512{part}": f"avx512_{part}" for part in ("f", "bw", "dq", "vl", "cd", "ifma")}
_PAGING_TORCH = (2, 12)  # from which on its attention kernel walks block tables
_CONTEXT_BYTES = 2**29  # that CUDA takes for itself in a process, about


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
        """Whether torch's products of bfloat16 are no slower than those of float32, as with AVX-512."""
        return {"avx512vl", "avx512bw", "avx512dq"} <= self.flags or bool({"avx_ne_convert", "bf16"} & self.flags)


@dataclass(frozen=True, slots=True)
class Card:
    """The first GPU that CUDA would see."""

    name: str
    total_bytes: int
    available_bytes: int
    generation: tuple[int, int]  # compute capability


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


def gpu() -> Card | None:
    """The GPU that torch would take; None where NVML shows none. A run says so if its torch cannot use it."""
    try:
        import pynvml

        if (handle := gpu_handle()) is None:
            return None
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        name = pynvml.nvmlDeviceGetName(handle)
        capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    except Exception:  # no library, no driver, no permission: each has an exception of its own
        return None
    return Card(
        name=name.decode() if isinstance(name, bytes) else str(name),
        total_bytes=int(memory.total - memory.reserved),
        available_bytes=max(0, int(memory.free) - _CONTEXT_BYTES),
        generation=(capability[0], capability[1]),
    )


def torch_pages() -> bool:
    """Whether the attention kernel of the torch that is installed walks block tables."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= _PAGING_TORCH


def gpu_handle() -> Any:
    """NVML's handle of the GPU that torch would take; None if torch is to see none.

    Raises what the library raises where there is no driver or no permission, or ImportError without the library.
    """
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible in ("", "-1"):
        return None
    pynvml.nvmlInit()
    handle_of = pynvml.nvmlDeviceGetHandleByIndex if visible.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
    return handle_of(int(visible) if visible.isdigit() else visible)


def visible_gpus() -> list[str]:
    """The GPUs that torch would see, each as CUDA_VISIBLE_DEVICES names it; none where NVML shows none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        there = [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no library, no driver, no permission: each has an exception of its own
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    named = [name.strip() for name in visible.split(",")]
    return [name for name in named if name not in ("", "-1")] if there else []


def total_bytes() -> int:
    """Memory of the machine or of the container, whichever is smaller."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, _control_group("memory.max") or machine)


def available_bytes() -> int:
    """Memory that this process can still take without pushing anybody out."""
    limit, available = _control_group("memory.max"), _mem_available()
    return min(available, limit - _used_by_control_group()) if limit else available


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
    """Threads that torch takes: as the environment says, else one for each core that this process may use."""
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if said.isdigit() and int(said):
        return int(said)
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


def _used_by_control_group() -> int:
    """Memory that the container uses, without files that the kernel caches for it and drops when memory is short: those
    of a model's weights would make it look full."""
    used = _control_group("memory.current") or 0
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return used
    return used - next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _control_group(name: str) -> int | None:
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):
        return None
