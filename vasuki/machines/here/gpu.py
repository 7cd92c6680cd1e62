"""The GPUs of this machine, as their driver shows them. This is the one file that talks to NVML, NVIDIA's management
interface; where the library, the driver or the permission is missing, nothing is known.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from vasuki.machines.gpus import Reported

_PAGING_TORCH = (2, 12)  # from which on its attention kernel walks block tables
_CONTEXT_BYTES = 2**29  # that CUDA takes for itself in a process, about
_POWER_EVERY_S = 0.02
_DRIVER, _DEVICES = Path("/proc/driver/nvidia"), Path("/dev")
_DRIVER_VERSION = re.compile(r"Kernel Module.*?\s(\d+\.[\d.]+)")
_CARD = re.compile(r"Model:\s*(\S.*)")
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that a job may compute on."""

    name: str
    total_bytes: int
    available_bytes: int
    generation: tuple[int, int]  # compute capability


class Board:
    """A GPU's board. What it does not say is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def of(cls, uuid: str = "") -> Board | None:
        """The board of that identity, else of the first GPU that torch would see; None where there is none."""
        if uuid and not uuid.startswith("GPU-"):
            uuid = f"GPU-{uuid}"
        name = uuid or os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if name in ("", "-1"):
            return None
        try:
            nvml = _nvml()
            by_name = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
            return cls(nvml, by_name(int(name) if name.isdigit() else name))
        except Exception:  # no library, no driver, no permission: each has an exception of its own
            return None

    @property
    def card(self) -> Card | None:
        """The GPU, and how much of its memory is free."""

        def read(handle: Any) -> Card:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
            available = max(0, int(memory.free) - _CONTEXT_BYTES)
            return Card(self._name(), int(memory.total - memory.reserved), available, self._generation())

        return self._read(read)

    @property
    def reported(self) -> Reported | None:
        """What rates can be told from."""
        nvml = self._nvml

        def read(handle: Any) -> Reported:
            generation = self._generation()
            return Reported(
                name=self._name(),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                multiprocessors=nvml.nvmlDeviceGetNumGpuCores(handle) // (64 if generation <= (8, 0) else 128),
                clock_hz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
                memory_clock_hz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6,
                bus_bits=nvml.nvmlDeviceGetMemoryBusWidth(handle),
                capability=generation,
            )

        return self._read(read)

    @property
    def driver(self) -> str | None:
        """The driver's version."""
        return self._read(lambda _: _text(self._nvml.nvmlSystemGetDriverVersion()))

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the whole board; not said for a slice of one (MIG)."""
        return self._read(lambda handle: int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total))

    @property
    def limit_w(self) -> float | None:
        """The power limit in force."""
        return self._read(lambda handle: self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)

    @property
    def power_w(self) -> float | None:
        """Return the watts that the board draws now."""
        return self._read(lambda handle: self._nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)

    @property
    def counter_j(self) -> float | None:
        """Energy since the driver was loaded; None for boards before Volta, which do not count it."""
        return self._read(lambda handle: self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)

    def idle_w(self, seconds: float) -> float | None:
        """Lowest power over a while in which nothing runs."""
        readings = []
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            readings.append(self.power_w)
            time.sleep(_POWER_EVERY_S)
        return min((power for power in readings if power is not None), default=None)

    def loaded_w(self, load: Callable[[], object], seconds: float) -> float | None:
        """Highest power while `load`, which waits for its kernels, is called again and again."""
        readings: list[float] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_POWER_EVERY_S):
                if (power := self.power_w) is not None:
                    readings.append(power)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            load()
        done.set()
        watcher.join()
        return max(readings, default=None)

    def _name(self) -> str:
        return _text(self._nvml.nvmlDeviceGetName(self._handle))

    def _generation(self) -> tuple[int, int]:
        major, minor = self._nvml.nvmlDeviceGetCudaComputeCapability(self._handle)
        return major, minor

    def _read(self, read: Callable[[Any], _Read]) -> _Read | None:
        try:
            return read(self._handle)
        except Exception:  # not supported, not permitted, or unknown to an older library
            return None


def gpu() -> Card | None:
    """The GPU that torch would take; None where there is none. A run says so if its torch cannot use it."""
    board = Board.of()
    return board.card if board else None


def visible_gpus() -> list[str]:
    """The GPUs that torch would see, each as CUDA_VISIBLE_DEVICES names it."""
    try:
        there = [str(index) for index in range(_nvml().nvmlDeviceGetCount())]
    except Exception:  # as above
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    named = [name.strip() for name in visible.split(",")]
    return [name for name in named if name not in ("", "-1")] if there else []


def hidden_gpu() -> str:
    """The first GPU and its driver, for people, where torch sees none; empty where the driver shows none, or where
    CUDA_VISIBLE_DEVICES hides all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    try:
        nvml = _nvml()
        if not nvml.nvmlDeviceGetCount():
            return ""
        name = _text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)))
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        supports = int(nvml.nvmlSystemGetCudaDriverVersion())
    except Exception:  # as above
        return _gpu_by_files()
    return f"{name}, driver {driver}, for CUDA up to {supports // 1000}.{supports % 1000 // 10}"


def torch_pages() -> bool:
    """Whether the attention kernel of the torch that is installed walks block tables."""
    return torch_version() >= _PAGING_TORCH


def torch_version() -> tuple[int, ...]:
    """The first two numbers of the torch that is installed; none where there is none."""
    try:
        return tuple(map(int, metadata.version("torch").split(".")[:2]))
    except metadata.PackageNotFoundError:
        return ()


def _gpu_by_files() -> str:
    """The same by what the driver writes of itself, for a container that has a GPU without the driver's libraries. That
    is to be read in every container of a machine; the GPU's own file is in those alone that were given it."""
    if not any(_DEVICES.glob("nvidia[0-9]*")):
        return ""
    try:
        driver = _DRIVER_VERSION.search((_DRIVER / "version").read_text())
        cards = [_CARD.search(file.read_text()) for file in sorted(_DRIVER.glob("gpus/*/information"))]
    except OSError:
        return ""
    name = next((card[1] for card in cards if card), "by NVIDIA")
    return f"{name}, driver {driver[1]}" if driver else ""


def _nvml() -> Any:
    """The library, begun. Raises what it raises, or ImportError."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
