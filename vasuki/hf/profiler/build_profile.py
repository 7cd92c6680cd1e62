"""A machine's profile: whole steps of a model, copies, power, and what its driver says.

Datasheet figures of a card stay as they are. A CPU's rates are those that the steps reach. Either way the cost model
meets the steps that were measured.
"""

from __future__ import annotations

import datetime
import logging
import re
import sys
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError, ProfileError, one_line
from vasuki.base.units import percent_text
from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
from vasuki.hf.device.device import Machine, board_of, describe
from vasuki.hf.loading.load_model import load_model, resolve_device, resolve_dtype
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.profiler import links
from vasuki.hf.profiler.first_measure import measure_first
from vasuki.hf.profiler.stand_in import stand_in, usual_shape
from vasuki.hf.profiler.timing import FULL, QUICK, Effort, clock_for
from vasuki.hf.profiler.whole_steps import MORE_SIZES, SIZES
from vasuki.machines.gpus import known_profile
from vasuki.machines.here.device import LocalDevice
from vasuki.machines.here.measured import datasheet, sizes_of
from vasuki.machines.here.stolen_time import NOISE, StolenTime
from vasuki.machines.profile import HardwareProfile, Overheads, Power
from vasuki.models.config_json import shape_from_config
from vasuki.models.shape import ModelShape

log = logging.getLogger(__name__)

_LOAD_SIZE = 8192  # of the matmul that shows the power under load
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


def profile_machine(
    device: str = "auto",
    model: ModelShape | None = None,
    name: str | None = None,
    quick: bool = False,
    progress: bool = False,
    folder: Path | None = None,
) -> HardwareProfile:
    """Measure this machine: a minute or two, or some ten seconds if `quick`, which is coarser.

    Args:
        device: `cpu`, `cuda`, or `auto` for CUDA where there is one.
        model: the sizes to measure with, by random weights; predictions are best for this model. Without one,
            Llama-3-8B's on a GPU and a small Llama's on a CPU.
        name: of the profile and its file; made from the device's name if not given.
        progress: show a bar on stderr.
        folder: of a model to load and to measure with instead.

    Raises:
        ModelError: CUDA is wanted and absent, the model cannot be read, or its steps don't run or find no memory.
        ProfileError: the name is none that `find_profile` would find.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise ProfileError(f"'{name}' cannot name a profile: use lower case letters, digits, dots and dashes")
    where = resolve_device(device)
    effort, stolen = QUICK if quick else FULL, StolenTime()
    with _Stages(progress) as stages:
        stages.begin("measuring power")
        idle_w, loaded_w, limit_w = _power(where, effort)
        stages.begin("making a model" if folder is None else "loading the model")
        configured = shape_from_config(folder) if folder else model or usual_shape(where)
        loaded = _model(where, configured, folder)
        shape = loaded.shape_in_use(configured.name, "auto")
        stages.begin("measuring whole steps")
        machine = describe(where)
        base = _known(machine, where)
        sizes = SIZES if quick else MORE_SIZES
        try:
            profile = measure_first(loaded, shape, base, lambda slower: effort.steps_s, sizes=sizes)
        except (RuntimeError, MemoryError) as error:  # what torch raises, also for memory that ran out
            raise ModelError(f"{configured.name}: its steps could not be measured: {one_line(error)}") from error
        del loaded
        stages.begin("measuring copies between host and device")
        assert profile.measured is not None
        source = f"measured by `vasuki profile`, {profile.measured.source}, {machine.driver}"
        link = links.measure_link(where, effort, base.link.kind, source)
        overheads = _overheads(profile.overheads, where, effort, source)
    return profile.model_copy(
        update={
            "name": name or base.name,
            "memory_mib": machine.memory_bytes // 2**20,
            "measured": profile.measured.model_copy(update={"source": source, "model": sizes_of(configured)}),
            "overheads": overheads,
            "link": link,
            "power": Power(idle_w=_digits(idle_w or base.power.idle_w), peak_w=_digits(limit_w or base.power.peak_w)),
            "sources": {**base.sources, **_sources(where, loaded_w, stolen)},
        }
    )


class _Stages:
    """A bar that names what is being done."""

    def __init__(self, shown: bool) -> None:
        self._bar = tqdm(
            total=0, disable=not shown or not sys.stderr.isatty(), bar_format="{desc}, {elapsed}", file=sys.stderr
        )
        self._shown = shown

    def __enter__(self) -> _Stages:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, what: str) -> None:
        self._bar.set_description_str(what)
        if self._shown and self._bar.disable:
            log.info("%s", what)


def _known(machine: Machine, device: torch.device) -> HardwareProfile:
    """What is known of the machine without measuring, under its own name: figures of a similar card serve a variant."""
    gpu = machine.name if device.type == "cuda" else ""
    base = datasheet(LocalDevice(gpu, machine.memory_bytes, machine.memory_bytes)).datasheet_only()
    known = known_profile(gpu) if gpu else None
    if known and gpu in known.device_names:
        return base
    title = known.title if known else machine.name
    names = (machine.name, *machine.other_names)
    return base.model_copy(update={"name": machine.slug, "title": title, "device_names": names})


def _model(device: torch.device, shape: ModelShape, folder: Path | None) -> LoadedModel:
    if folder is not None:
        return load_model(ModelConfig(path=str(folder)), device.type)
    kernels = load_cpu_kernels() if device.type == "cpu" else None
    dtype = resolve_dtype("auto", getattr(torch, shape.dtype, torch.bfloat16), device, kernels)
    return stand_in(shape, dtype, device)


def _overheads(found: Overheads, device: torch.device, effort: Effort, source: str) -> Overheads:
    """With what memory of the host costs that is used for the first time."""
    first = (
        {"pinning_s_per_gib": _digits(links.pinning_s_per_gib())}
        if device.type == "cuda"
        else {"first_touch_us_per_mib": _digits(1e6 * links.first_touch_s_per_mib(effort))}
    )
    return found.model_copy(update={**first, "source": f"{found.source}; memory: {source}"})


def _power(device: torch.device, effort: Effort) -> tuple[float | None, float | None, float | None]:
    """Watts at idle and under full load, and the limit; None where they cannot be read."""
    board = board_of(device)
    if board is None:
        return None, None, None
    left, right = (torch.randn(_LOAD_SIZE, _LOAD_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    idle_w = board.idle_w(effort.load_s)
    # The clock waits for the twenty products that it times.
    load = partial(clock_for(device).seconds, partial(torch.matmul, left, right), 20)
    return idle_w, board.loaded_w(load, effort.load_s), board.limit_w


def _sources(device: torch.device, loaded_w: float | None, stolen: StolenTime) -> dict[str, str]:
    """Sources of figures that have none of their own."""
    sources = {"memory_mib": "as the driver or the operating system reports it"}
    if device.type == "cpu":
        when = datetime.date.today().isoformat()
        sources["peak_tflops"] = f"of the longest step's type what it reached on {when}, of others typical of the cores"
        sources["memory_gb_per_s"] = f"what the shortest step reached on {when}"
        sources["power"] = "assumed"
    if loaded_w is not None:
        sources["power"] = f"idle_w and peak_w (the limit in force) by NVML; a large matmul drew {loaded_w:.0f} W"
    if (share := stolen.share) > NOISE:
        sources["disturbance"] = (
            f"the host gave {percent_text(share)} of the processors to others while this was measured"
        )
        log.warning("%s; plans will expect as much, so measure again when it is quieter", sources["disturbance"])
    return sources


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
