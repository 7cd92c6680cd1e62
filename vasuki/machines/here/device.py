"""What a job computes on here, and how much memory it may hold: the same for a plan, which does not load torch, and for
a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from vasuki.base.config import EngineConfig, KVConfig
from vasuki.base.errors import JobFileError, ModelError
from vasuki.machines.here import cpu
from vasuki.machines.here.gpu import gpu, torch_pages
from vasuki.machines.memory_budget import room_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """A GPU, or the CPU, and how much of its memory is free."""

    gpu: str  # as its driver reports it; empty for the CPU
    total_bytes: int
    available_bytes: int
    generation: tuple[int, int] | None = None  # of a GPU, its compute capability

    @property
    def on_cpu(self) -> bool:
        """Whether that is the CPU."""
        return not self.gpu

    @property
    def names(self) -> tuple[str, ...]:
        """Those under which a measured profile of it may be listed."""
        processor = cpu.processor()
        return (self.gpu,) if self.gpu else (processor.name, processor.model)

    @property
    def paging(self) -> tuple[int, int] | None:
        """The generation of a GPU whose torch walks block tables."""
        return self.generation if torch_pages() else None

    def weights_wait(self, engine: EngineConfig, kv: KVConfig, weight_bytes: int) -> bool:
        """Whether weights wait in host memory for a plan: a GPU has no room for them, or the job keeps some there."""
        if self.on_cpu:
            return False
        if engine.weights_on_host != "auto":
            return engine.weights_on_host > 0
        return weight_bytes >= room_bytes(kv.device_memory, self.total_bytes, self.available_bytes)

    def beside_weights_bytes(self, kv: KVConfig, free_bytes: int) -> int | None:
        """Bytes that `kv.device_memory` leaves to activations and KV, of `free_bytes` that the weights leave; None
        where it is the size of the pool."""
        return None if kv.device_memory > 1 else max(0, room_bytes(kv.device_memory, self.total_bytes, free_bytes))

    def with_host_memory(self, kv: KVConfig, free_bytes: int) -> KVConfig:
        """Allow no more host memory than is free. On a CPU that is what the device leaves; half of it where nobody says
        more. Raises as `within_host_memory`."""
        if self.on_cpu:
            if not kv.asks_for_offload:
                return kv
            free_bytes = room_bytes(kv.device_memory, self.total_bytes, free_bytes)
            if "host_memory" not in kv.model_fields_set:
                free_bytes //= 2
        return within_host_memory(kv, free_bytes)


def local_device(wanted: str) -> LocalDevice:
    """The device that a run would take.

    Args:
        wanted: `auto`, `cpu` or `cuda`, as in a job.

    Raises:
        ModelError: CUDA is wanted, and there is none.
    """
    card = None if wanted == "cpu" else gpu()
    if card is not None:
        return LocalDevice(card.name, card.total_bytes, card.available_bytes, card.generation)
    if wanted == "cuda":
        raise ModelError("engine.device is cuda, but there is no CUDA device here; name a card with --gpu")
    return LocalDevice("", cpu.total_bytes(), cpu.available_bytes())


def within_host_memory(kv: KVConfig, free_bytes: int) -> KVConfig:
    """Lower `kv.host_memory` to what is free, with a warning if that is less than allowed.

    Raises JobFileError if the job names both the mode and the amount: then it is to run like that or not at all.
    """
    if kv.host_memory <= free_bytes:
        return kv
    asked, free = (f"{num_bytes / 2**30:.1f} GiB" for num_bytes in (kv.host_memory, free_bytes))
    short = f"kv.host_memory: {asked} are asked for, {free} are free"
    if kv.asks_for_offload and "host_memory" in kv.model_fields_set:
        raise JobFileError(f"{short}; lower it, or let kv.offload be auto to take what there is")
    log.warning("%s; taking those", short)
    return kv.model_copy(update={"host_memory": max(1, free_bytes)})
