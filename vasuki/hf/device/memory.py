"""The memory that a device has left."""

from __future__ import annotations

import gc

import torch

from vasuki.machines import at_hand


def total_bytes(device: torch.device) -> int:
    """Memory of the device; for a CPU, of the machine or of the container, whichever is smaller."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else at_hand.total_bytes()


def available_bytes(device: torch.device) -> int:
    """Memory that this process can still take without pushing anybody out."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else at_hand.available_bytes()


def give_back() -> None:
    """Return memory that nobody uses any more, that of a run that has ended, to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
