"""The device: its name, driver, memory and processors."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, replace

import torch

from vasuki.hf.device.board import Board
from vasuki.hf.device.memory import total_bytes
from vasuki.machines import at_hand


@dataclass(frozen=True, slots=True)
class Machine:
    """A device as drivers and the operating system describe it."""

    name: str  # as the driver reports it; for a CPU its model and the cores that torch uses
    other_names: tuple[str, ...]  # for lookups that do not know about cores
    driver: str
    memory_bytes: int
    processors: int  # streaming multiprocessors, or cores that torch uses
    compute_capability: tuple[int, int] | None = None

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
            driver=f"driver {(board and board.driver) or 'unknown'}, CUDA {torch.version.cuda}",
            memory_bytes=(board and board.memory_bytes) or int(properties.total_memory),
            processors=properties.multi_processor_count,
            compute_capability=(properties.major, properties.minor),
        )
    processor = replace(at_hand.processor(), cores=torch.get_num_threads())
    return Machine(
        name=processor.name,
        other_names=(processor.model,),
        driver=f"{platform.system()} {platform.release()}",
        memory_bytes=total_bytes(device),
        processors=processor.cores,
    )


def device_name(device: torch.device) -> str:
    """The name under which a profile of this device lists it in `device_names`."""
    return describe(device).name


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory: data that is to be cold must be several times as large."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 2**26
    try:
        return max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 2**20)
    except (OSError, ValueError):
        return 2**25
