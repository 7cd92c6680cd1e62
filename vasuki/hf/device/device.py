"""The device that torch computes on: its name, driver, memory and processors, and why it is no GPU."""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
from dataclasses import dataclass, replace

import torch

from vasuki.base.units import plural
from vasuki.machines.here import control_group, cpu
from vasuki.machines.here.device import LocalDevice, local_device
from vasuki.machines.here.gpu import Board, hidden_gpu

log = logging.getLogger(__name__)


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
        board = board_of(device)
        return Machine(
            name=properties.name,
            other_names=(),
            driver=f"driver {(board and board.driver) or 'unknown'}, CUDA {torch.version.cuda}",
            memory_bytes=(board and board.memory_bytes) or int(properties.total_memory),
            processors=properties.multi_processor_count,
            compute_capability=(properties.major, properties.minor),
        )
    processor = replace(cpu.processor(), cores=torch.get_num_threads())
    return Machine(
        name=processor.name,
        other_names=(processor.model,),
        driver=f"{platform.system()} {platform.release()}",
        memory_bytes=total_bytes(device),
        processors=processor.cores,
    )


def device_of(device: torch.device) -> LocalDevice:
    """The device as a job sees it."""
    if device.type == "cpu":
        return local_device("cpu")
    properties = torch.cuda.get_device_properties(device)
    generation = properties.major, properties.minor
    return LocalDevice(properties.name, total_bytes(device), available_bytes(device), generation)


def board_of(device: torch.device) -> Board | None:
    """The board of a CUDA device, by its identity: CUDA numbers devices by CUDA_VISIBLE_DEVICES, NVML does not. None
    of a CPU, and where NVML cannot be reached, as in some containers."""
    return Board.of(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """The name under which a profile of this device lists it in `device_names`."""
    return describe(device).name


def total_bytes(device: torch.device) -> int:
    """Memory of the device; for a CPU, of the machine or of the container, whichever is smaller."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else cpu.total_bytes()


def available_bytes(device: torch.device) -> int:
    """Memory that this process can still take without taking it from others."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else cpu.available_bytes()


def give_back() -> None:
    """Return unused memory, such as an ended run's, to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def the_cpu() -> torch.device:
    """The CPU, computing on no more threads than this process's quota of processor time keeps busy."""
    allowed, before = cpu.most_threads(), torch.get_num_threads()
    if allowed is not None and allowed < before and not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(allowed)  # for libraries that are loaded later
        torch.set_num_threads(allowed)
        quota = control_group.processor_quota()
        log.info("%s of %d used: the container's quota is %.3g processors", plural(allowed, "thread"), before, quota)
    return torch.device("cpu")


def take_some(device: torch.device) -> None:
    """Take the first memory of a GPU, in segments that can grow, as `host.set_up_allocator` asks for, or else in plain
    ones: some drivers of card slices in clouds refuse the calls that such segments need."""
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch.empty(1, device=device)  # raises what was wrong, if that was something else
        reason = str(error).splitlines()[0]
        log.warning("memory of %s is taken in plain segments, of which pieces may be lost: %s", device, reason)


def why_no_cuda() -> str:
    """Why torch cannot use a GPU that the driver shows; empty where the driver shows none, or the user hides it."""
    if not (gpu := hidden_gpu()):
        return ""
    found = f"there is a GPU ({gpu})"
    if torch.version.cuda is None:
        return f"{found}, but this torch is built for CPUs; install its CUDA build, or set engine.device: cpu"
    return (
        f"{found}, but torch {torch.__version__} is built for CUDA {torch.version.cuda} and cannot use it; "
        "update the driver, install a torch built for an older CUDA (pip install -c constraints-cuda12.txt), or set "
        "engine.device: cpu"
    )
