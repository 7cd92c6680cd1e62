"""How much memory a device has left."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from vasuki.hf.loading.load_model import LoadedModel

# Rows that a step may sample and tokens that it may hold, for the activations to leave room for.
_STEP_SEQS, _STEP_TOKENS = 1024, 4096


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
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    available = _meminfo("MemAvailable")
    return min(available, limit - (used or 0)) if limit else available


def give_back() -> None:
    """Return memory that nobody uses any more, that of a run that has ended, to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def kv_budget_bytes(loaded: LoadedModel, device_memory: float | int) -> int:
    """Bytes for the KV pool, once the weights are loaded: what `kv.device_memory` asks for, if it is free.

    No more than the longest sequences side by side could use.
    """
    layout, device = loaded.kv_layout, loaded.device
    state_bytes = loaded.recurrent.bytes_per_row if loaded.recurrent else 0
    most = 2 * _STEP_SEQS * (loaded.max_context * layout.bytes_per_token + state_bytes)
    if device_memory > 1:
        return int(min(device_memory, most))
    activations = _STEP_SEQS * loaded.vocab_size * 8 + _STEP_TOKENS * loaded.config.hidden_size * 64
    return int(max(0, min(room_bytes(device, device_memory) - activations, most)))


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


def _control_group(name: str) -> int | None:
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):
        return None
