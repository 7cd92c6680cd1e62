"""The memory that a device has left."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch


def total_bytes(device: torch.device) -> int:
    """Memory of the device; for a CPU, of the machine or of the container, whichever is smaller."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, _control_group("memory.max") or machine)


def available_bytes(device: torch.device) -> int:
    """Memory that this process can still take without pushing anybody out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limit, available = _control_group("memory.max"), _meminfo("MemAvailable")
    return min(available, limit - _used_by_control_group()) if limit else available


def give_back() -> None:
    """Return memory that nobody uses any more, that of a run that has ended, to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def room_bytes(device: torch.device, device_memory: float | int) -> int:
    """Bytes that `kv.device_memory` still allows: up to a share of the device, or all but a KV pool of that size."""
    spared = (1 - device_memory) * total_bytes(device) if device_memory <= 1 else device_memory
    return int(available_bytes(device) - spared)


def _meminfo(key: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
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
