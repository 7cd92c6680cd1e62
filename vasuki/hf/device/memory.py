"""The memory that a device has left, and whether its driver gives it in the way that is asked for."""

from __future__ import annotations

import gc
import logging

import torch

from vasuki.machines import at_hand

log = logging.getLogger(__name__)


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


def take_some(device: torch.device) -> None:
    """Take the first memory of a GPU, in segments that can grow, as `host.set_up_allocator` asks for, or else in plain
    ones: some drivers refuse the calls that such segments need, those of slices of cards that clouds rent out."""
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch.empty(1, device=device)  # raises what was wrong, if that was something else
        reason = str(error).splitlines()[0]
        log.warning("memory of %s is taken in plain segments, of which pieces may be lost: %s", device, reason)
