"""What the device is: names, memory, processors, power."""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vasuki.hf.memory import total_bytes

_POWER_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Machine:
    """A device as drivers and the operating system describe it."""

    name: str  # as the driver reports it; for a CPU its model and the cores that torch uses
    other_names: tuple[str, ...]  # for lookups that do not know about cores
    driver: str
    memory_bytes: int
    processors: int  # streaming multiprocessors, or cores that torch uses

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def describe(device: torch.device) -> Machine:
    """Read what can be known without measuring."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        board = Board.of(device)
        return Machine(
            name=properties.name,
            other_names=(),
            driver=f"driver {board.driver if board else 'unknown'}, CUDA {torch.version.cuda}",
            memory_bytes=board.memory_bytes if board else int(properties.total_memory),
            processors=properties.multi_processor_count,
        )
    model, cores = _cpu_model(), torch.get_num_threads()
    return Machine(
        name=f"CPU {_without_noise(model)} {cores} core{'s' * (cores > 1)}",
        other_names=(model,),
        driver=f"{platform.system()} {platform.release()}",
        memory_bytes=total_bytes(device),
        processors=cores,
    )


def device_name(device: torch.device) -> str:
    """The name under which a profile of this device lists it in `device_names`."""
    return describe(device).name


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _without_noise(model: str) -> str:
    """`Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz` -> `Intel Xeon Platinum 8375C`."""
    short = re.sub(r"\((?:r|tm)\)|\bcpu\b|\bprocessor\b|\d+-core|@.*", " ", model, flags=re.IGNORECASE)
    return " ".join(short.split()) or model


class Board:
    """A GPU's management interface (NVML)."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def of(cls, device: torch.device) -> Board | None:
        """The board behind a CUDA device; None where NVML cannot be reached, as in some containers."""
        try:
            import pynvml

            pynvml.nvmlInit()
            # By identity: CUDA numbers devices by CUDA_VISIBLE_DEVICES, NVML does not.
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            return cls(pynvml, handle)
        except Exception:  # no library, no driver, no permission: each has an exception of its own
            return None

    @property
    def driver(self) -> str:
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)

    @property
    def memory_bytes(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    @property
    def limit_w(self) -> float | None:
        """The power limit in force."""
        return self._read(self._nvml.nvmlDeviceGetEnforcedPowerLimit)

    @property
    def power_w(self) -> float | None:
        """What the board draws now."""
        return self._read(self._nvml.nvmlDeviceGetPowerUsage)

    @property
    def counter_j(self) -> float | None:
        """Energy since the driver was loaded; None for boards before Volta, which do not count it."""
        return self._read(self._nvml.nvmlDeviceGetTotalEnergyConsumption)

    def _read(self, read: Callable[[Any], int]) -> float | None:
        try:
            return read(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None

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


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory: data that is to be cold must be several times as large."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 2**26
    try:
        return max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 2**20)
    except (OSError, ValueError):
        return 2**25
