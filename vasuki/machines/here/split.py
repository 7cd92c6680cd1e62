"""A machine split among replicas: a GPU for each, or on a CPU a group of cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from vasuki.base.errors import JobFileError
from vasuki.base.units import plural
from vasuki.machines.here import cpu, gpu
from vasuki.machines.here.system_files import number_in, text_of

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica computes on."""

    gpu: str = ""  # as CUDA_VISIBLE_DEVICES names it; empty on a CPU
    processors: tuple[int, ...] = ()  # as the operating system numbers them; none on a GPU
    threads: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """What a process on this share has to find in its environment."""
        return {"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {"OMP_NUM_THREADS": str(self.threads)}

    def enter(self) -> None:
        """Keep this process to its share of the processors."""
        if self.processors:
            os.sched_setaffinity(0, self.processors)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This process on the share, as a replica's is, and then as it was."""
        environment, processors = dict(os.environ), os.sched_getaffinity(0) if self.processors else set()
        os.environ.update(self.environment)
        self.enter()
        cpu.processor.cache_clear()
        try:
            yield
        finally:
            for name in self.environment:
                os.environ.pop(name)
            os.environ.update(environment)
            if processors:
                os.sched_setaffinity(0, processors)
            cpu.processor.cache_clear()


def split(device: str, replicas: int | Literal["auto"]) -> list[Share]:
    """A share of the machine at hand for each replica.

    Args:
        device: `auto`, `cpu` or `cuda`, as in a job.
        replicas: how many; `auto` is one for each GPU, or for each node of a CPU's memory (a socket, mostly).

    Raises:
        JobFileError: there are fewer devices.
    """
    gpus = [] if device == "cpu" else gpu.visible_gpus()
    if gpus:
        wanted = len(gpus) if replicas == "auto" else replicas
        _refuse_more(wanted, len(gpus), "GPU")
        return [Share(gpu=gpu) for gpu in gpus[:wanted]]
    if not hasattr(os, "sched_setaffinity"):
        wanted = 1 if replicas == "auto" else replicas
        _refuse_more(wanted, 1, "device")
        return [Share(threads=cpu.processor().cores)]
    cores = _cores()
    there = min(len(cores), cpu.most_threads() or len(cores))
    wanted = min(there, len({core.node for core in cores})) if replicas == "auto" else replicas
    _refuse_more(wanted, there, "core", "here" if there == len(cores) else "within the quota here")
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    asked = int(said) if said.isdigit() and int(said) else there
    most_threads = len(cores) if asked >= len(cores) else max(1, asked // wanted)
    bounds = [len(cores) * index // wanted for index in range(wanted + 1)]
    groups = [cores[first:end] for first, end in pairwise(bounds)]
    return [
        Share(
            processors=tuple(sorted(number for core in group for number in core.processors)),
            threads=min(len(group), most_threads),
        )
        for group in groups
    ]


def _refuse_more(wanted: int, there: int, what: str, where: str = "here") -> None:
    if wanted > there:
        raise JobFileError(f"engine.replicas: {wanted} are asked for, and there {_are(there, what)} {where}")


def _are(count: int, what: str) -> str:
    return f"{'is' if count == 1 else 'are'} {plural(count, what)}"


@dataclass(frozen=True, slots=True, order=True)
class _Core:
    """A core that this process may use, with the processors that are threads of it. Ordered by what cores share."""

    node: int
    package: int
    number: int
    processors: tuple[int, ...]


def _cores() -> list[_Core]:
    usable = os.sched_getaffinity(0)
    node_of = {
        number: node
        for node, folder in enumerate(sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])))
        for number in _listed(folder / "cpulist")
    }
    threads: dict[tuple[int, int, int], list[int]] = {}
    for number in sorted(usable):
        topology = _CPUS / f"cpu{number}" / "topology"
        core = number_in(topology / "core_id")
        key = node_of.get(number, 0), number_in(topology / "physical_package_id") or 0, number if core is None else core
        threads.setdefault(key, []).append(number)
    return sorted(_Core(*key, tuple(numbers)) for key, numbers in threads.items())


def _listed(file: Path) -> list[int]:
    """`0-3,8` -> 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for piece in text_of(file).split(","):
        first, _, last = piece.strip().partition("-")
        if first.isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return numbers
