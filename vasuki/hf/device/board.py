"""A GPU's board as its management interface (NVML) shows it: driver, memory, power."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

_POWER_EVERY_S = 0.02


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
