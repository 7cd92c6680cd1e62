"""A GPU's board as its management interface (NVML) shows it: driver, memory, power."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_POWER_EVERY_S = 0.02
_DRIVER, _DEVICES = Path("/proc/driver/nvidia"), Path("/dev")
_DRIVER_VERSION = re.compile(r"Kernel Module.*?\s(\d+\.[\d.]+)")
_CARD = re.compile(r"Model:\s*(\S.*)")


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
    def driver(self) -> str | None:
        """The driver's version."""
        version = self._read(lambda _: self._nvml.nvmlSystemGetDriverVersion())
        return None if version is None else _text(version)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the whole board; not said for a slice of one (MIG)."""
        memory = self._read(self._nvml.nvmlDeviceGetMemoryInfo)
        return None if memory is None else int(memory.total)

    @property
    def limit_w(self) -> float | None:
        """The power limit in force."""
        return self._thousandths(self._nvml.nvmlDeviceGetEnforcedPowerLimit)

    @property
    def power_w(self) -> float | None:
        """Return the watts that the board draws now."""
        return self._thousandths(self._nvml.nvmlDeviceGetPowerUsage)

    @property
    def counter_j(self) -> float | None:
        """Energy since the driver was loaded; None for boards before Volta, which do not count it."""
        return self._thousandths(self._nvml.nvmlDeviceGetTotalEnergyConsumption)

    def _thousandths(self, read: Callable[[Any], int]) -> float | None:
        value = self._read(read)
        return None if value is None else value / 1e3

    def _read(self, read: Callable[[Any], Any]) -> Any:
        """What NVML says; None where it does not support the question."""
        try:
            return read(self._handle)
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


def why_no_cuda() -> str:
    """Why torch cannot use a GPU that the driver shows; empty where the driver shows none.

    Devices that CUDA_VISIBLE_DEVICES hides are the user's own choice.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    gpu = _gpu_by_nvml()
    if gpu is None:
        gpu = _gpu_by_files()
    if not gpu:
        return ""
    found = f"there is a GPU ({gpu})"
    if torch.version.cuda is None:
        return f"{found}, but this torch is built for CPUs; install its CUDA build, or set engine.device: cpu"
    return (
        f"{found}, but torch {torch.__version__} is built for CUDA {torch.version.cuda} and cannot use it; "
        "update the driver, install a torch built for an older CUDA (pip install -c constraints-cuda12.txt), or set "
        "engine.device: cpu"
    )


def _gpu_by_nvml() -> str | None:
    """The first GPU and its driver; empty where the driver shows none, None where it cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        if not pynvml.nvmlDeviceGetCount():
            return ""
        name = _text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        supports = int(pynvml.nvmlSystemGetCudaDriverVersion())
    except Exception:  # no library, no driver, no permission: each has an exception of its own
        return None
    return f"{name}, driver {driver}, for CUDA up to {supports // 1000}.{supports % 1000 // 10}"


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


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
