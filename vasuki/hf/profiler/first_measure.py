"""A machine measured in seconds, by real steps of the model that a job is about to run.

    decodes of 1, 8, 32, 96 rows, chunks of 64 to 512 tokens    ->  measured.in_step, by tokens of a step
    the same with long contexts                                 ->  measured.attention, of decodes and of chunks

`vasuki profile` does the same for longer, and over more sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from vasuki.base.errors import one_line
from vasuki.base.units import duration, percent_text
from vasuki.hf.device.device import describe
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.profiler import links
from vasuki.hf.profiler.fit import fitted
from vasuki.hf.profiler.timing import FIRST
from vasuki.hf.profiler.whole_steps import SIZES, StepSize, time_steps
from vasuki.machines.cost_model import CostModel
from vasuki.machines.here import control_group
from vasuki.machines.here.measured import DATASHEET, MachineProfile, budget_s, keep
from vasuki.machines.here.pressure import BUSY, cpu_pressure
from vasuki.machines.here.stolen_time import NOISE, StolenTime
from vasuki.machines.profile import HardwareProfile
from vasuki.models.shape import ModelShape

log = logging.getLogger(__name__)

_MOST_SPREAD = 0.25  # of the middle half of equal steps, on a machine that can be measured


def measured_now(
    loaded: LoadedModel,
    shape: ModelShape,
    base: HardwareProfile,
    rough_s: float,
    key: Mapping[str, str],
    block_tokens: int | Literal["auto"],
) -> MachineProfile:
    """`measure_first` for a job that takes about `rough_s`, kept under a key; the base profile if nothing runs."""
    started_s, stolen, pressure = time.perf_counter(), StolenTime(), cpu_pressure()
    try:
        profile = measure_first(loaded, shape, base, lambda slower: budget_s(slower * rough_s), block_tokens)
        if loaded.device.type == "cuda":
            link = links.measure_link(loaded.device, FIRST, base.link.kind, "measured before a run")
            profile = profile.model_copy(update={"link": link})
    except (RuntimeError, MemoryError) as error:  # what torch raises, also for memory that ran out
        log.warning("this machine could not be measured: %s", one_line(error))
        return MachineProfile(base, DATASHEET)
    seconds = time.perf_counter() - started_s
    keep(key, profile, seconds, pressure)
    machine = MachineProfile(profile, f"measured just now in {duration(seconds)}", key)
    if machine.spread:
        why = "its host gave processors to others" if stolen.share > NOISE else "other programs use its processors"
        off = percent_text(machine.spread)
        log.warning("this machine is too busy to be measured well (%s): times may be %s off", why, off)
    return machine


def measure_first(
    loaded: LoadedModel,
    shape: ModelShape,
    base: HardwareProfile,
    budget_of: Callable[[float], float],
    block_tokens: int | Literal["auto"] = "auto",
    sizes: Sequence[StepSize] = SIZES,
) -> HardwareProfile:
    """What the base profile says of this machine, corrected by steps of the model at hand.

    Args:
        loaded: the model, on its device.
        shape: its own, in the type that it runs in.
        base: datasheet figures of the device.
        budget_of: seconds to spend, by the ratio of measured steps to the base profile's prediction. A step that is
            under way is ended.
        block_tokens: as the job has it; `auto` is what the attention of the model prefers, as in a run.
        sizes: of steps.

    Raises:
        RuntimeError, MemoryError: as torch does where a step does not run.
    """
    waited = cpu_pressure() if loaded.device.type == "cpu" else 0.0
    timings = time_steps(loaded, CostModel(shape, base), budget_of, block_tokens, sizes)
    timings.stretch = max(1.0, 1 / (control_group.processor_quota() or 1.0))
    is_noisy = (waited > BUSY or timings.spread > _MOST_SPREAD) and timings.stretch == 1  # pauses of a quota are none
    timings.disturbed = loaded.device.type == "cpu" and is_noisy
    profile = fitted(timings, shape, base, max(_MOST_SPREAD, timings.spread) if timings.disturbed else 0.0)
    return profile.model_copy(update={"processors": describe(loaded.device).processors})
