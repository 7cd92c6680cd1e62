"""The profile of the machine at hand: the user's own, what an earlier run measured, measured now, or a datasheet.

    `vasuki profile` has measured this machine      that one
    a run has measured it with this model           from the cache
    there is time, and VASUKI_MEASURE is not off    measured now by steps of the model, and kept
    else                                            what is known of such machines

A run looks back when it is over: a profile that its steps contradict is not used again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from vasuki.base.config import JobConfig
from vasuki.base.errors import one_line
from vasuki.base.units import duration, percent_text, time_range
from vasuki.machines.gpus import known_profile, profile_of_gpu
from vasuki.machines.here import cpu
from vasuki.machines.here.cpu import typical_of
from vasuki.machines.here.gpu import Board
from vasuki.machines.here.measured import cache_key, forget, keep, read_cached
from vasuki.machines.here.stolen_time import NOISE, StolenTime
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import profile_measured_here
from vasuki.models.config_json import shape_from_config
from vasuki.models.shape import ModelShape
from vasuki.planner.lengths import Lengths
from vasuki.planner.plan import Plan
from vasuki.runs.workload import shape_of

if TYPE_CHECKING:
    from vasuki.hf.loading.load_model import LoadedModel

log = logging.getLogger(__name__)

DATASHEET = "datasheet"
MEASURE_VARIABLE = "VASUKI_MEASURE"  # off: nothing is measured
MOST_OFF = 0.25  # by which steps may differ from a profile before it is measured again

# What measuring may take.
_BUDGET_S, _LEAST_BUDGET_S = 5.0, 0.5
_LONG_SHARE, _SHORT_SHARE = 0.03, 0.2
_TOO_SHORT_S = 0.5
_STEP_S, _STEP_SEQS = 2e-3, 64  # of a small model, roughly
_MOST_LOADED_BYTES = 2**31  # of weights that are loaded for a plan alone


class Tokens(NamedTuple):
    """Tokens of all rows together."""

    prompt: float
    output: float

    @property
    def total(self) -> float:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """A profile, and where it comes from."""

    profile: HardwareProfile
    source: str
    key: Mapping[str, str] | None = None  # in the cache

    @classmethod
    def of(cls, profile: HardwareProfile) -> MachineProfile:
        """One from a file."""
        return cls(profile, profile.basis)

    @property
    def spread(self) -> float:
        """The share by which predictions may be off because the machine was busy when it was measured; else 0."""
        measured = self.profile.measured
        return measured.spread if measured and self.key else 0.0


def profile_for_run(config: JobConfig, loaded: LoadedModel, shape: ModelShape, tokens: Tokens) -> MachineProfile:
    """The profile of the machine at hand for a run of a job that names none.

    Args:
        config: the job.
        loaded: its model.
        shape: of the model as it runs, see `shape_in_use`.
        tokens: about so many of prompts and of outputs.

    Raises:
        ProfileError: a profile file is malformed.
    """
    from vasuki.hf.device.device import device_name

    gpu = loaded.device_name if loaded.device.type == "cuda" else ""
    if kept := _kept(key := _key(config, gpu), (device_name(loaded.device), loaded.device_name)):
        return kept
    base = _unmeasured(gpu)
    rough_s = _rough_s(shape, base, tokens)
    if why_not := _why_not(rough_s, waits=not loaded.is_on_device):
        return MachineProfile(base, f"{DATASHEET}; {why_not}")
    return _measured(loaded, shape, base, rough_s, key, config.kv.block_tokens)


def profile_for_plan(
    config: JobConfig, shape: ModelShape, tokens: Tokens, gpu: str = "", waits: bool = False
) -> MachineProfile:
    """Return the same for a plan. Loads torch and the model only if there is something to measure.

    Args:
        config: the job.
        shape: its model.
        tokens: about so many of prompts and of outputs.
        gpu: the name of the GPU that computes; empty for the CPU.
        waits: the weights are more than the device has room for.

    Raises:
        VasukiError: as `load_model`.
    """
    base = _unmeasured(gpu)
    if not config.model.path:
        return MachineProfile(base, f"{DATASHEET}; there is no model to measure with")
    processor = cpu.processor()
    if kept := _kept(key := _key(config, gpu), (gpu,) if gpu else (processor.name, processor.model)):
        return kept
    rough_s = _rough_s(shape, base, tokens)
    if why_not := _why_not(rough_s, waits):
        return MachineProfile(base, f"{DATASHEET}; {why_not}")
    if shape.weight_bytes > _MOST_LOADED_BYTES:
        return MachineProfile(base, f"{DATASHEET}; the first run measures this machine, or `vasuki profile`")
    from vasuki.hf.loading.load_model import load_model

    log.info("loading the model to measure this machine with it, once")
    compiles = config.engine.compile != "off"
    loaded = load_model(
        config.model,
        config.engine.device,
        compiles=compiles,
        kv_dtype=config.kv.dtype,
        attention=config.engine.attention,
    )
    return _measured(loaded, shape_in_use(loaded, config), base, rough_s, key, config.kv.block_tokens)


def shape_in_use(loaded: LoadedModel, config: JobConfig) -> ModelShape:
    """The model's shape, in the type that it really runs in."""
    shape = shape_from_config(loaded.config.to_dict(), config.model.path, loaded.way)
    packed, compiles = loaded.longest_packed_tokens, loaded.compiles
    shape = replace(shape, longest_packed_tokens=packed, compiles=compiles, eager=loaded.is_eager)
    shape = shape.with_dtype(str(loaded.dtype).removeprefix("torch."), config.kv.dtype)
    shape = replace(shape, kept_bytes=loaded.state_bytes)
    stored = loaded.token_bytes  # which a configuration does not always tell
    return shape if stored == shape.kv_bytes_per_token else replace(shape, stored_bytes=stored)


def tokens_of(lengths: Lengths) -> Tokens:
    """Count the tokens of all requests."""
    return Tokens(float(lengths.prompt_tokens.sum()), float(lengths.output_tokens.sum()))


def expected(plan: Plan) -> str:
    """The makespan for a log line; with its range where the machine was too busy to tell."""
    range_s = plan.range_s if plan.spread else None
    if max((plan.makespan_s, *(range_s or ()))) < 1:
        return "less than a second"
    text = duration(plan.makespan_s)
    return f"{text} ({time_range(*range_s)})" if range_s else text


def look_back(machine: MachineProfile, pace: float | None, stolen_share: float) -> None:
    """After a run, do not use a profile again that its steps contradict.

    Args:
        machine: what the run was planned with.
        pace: what its steps took over what the profile says of them; None if there were too few.
        stolen_share: of the processors, that a virtual machine's host gave to others meanwhile.
    """
    if pace is None or 1 / (1 + MOST_OFF) <= pace <= 1 + MOST_OFF or stolen_share > NOISE:
        return
    if machine.key is not None:
        forget(machine.key)
        log.info("steps took %.2f times what was measured for them; the next run measures again", pace)
    elif machine.source.startswith("measured"):
        log.warning("steps took %.2f times what the profile says; `vasuki profile` measures it again", pace)


def _unmeasured(gpu: str) -> HardwareProfile:
    if not gpu:
        return typical_of(cpu.processor())
    board = None if known_profile(gpu) else Board.of()
    return profile_of_gpu(gpu, board.reported if board else None)


def _why_not(rough_s: float, waits: bool) -> str:
    """Why nothing is measured; empty if it is."""
    if os.environ.get(MEASURE_VARIABLE, "").lower() == "off":
        return f"{MEASURE_VARIABLE} is off"
    if waits:
        return "weights that wait on the host are not measured"
    return "the job is too short to measure for" if rough_s < _TOO_SHORT_S else ""


def _key(config: JobConfig, gpu: str) -> dict[str, str]:
    return cache_key(shape_of(config).served_by(config.engine.attention), gpu, config.engine.compile != "off")


def _kept(key: Mapping[str, str], device_names: Iterable[str]) -> MachineProfile | None:
    """What `vasuki profile` or an earlier run has measured on this machine."""
    for name in device_names:
        if found := profile_measured_here(name):
            return MachineProfile(found[0], f"measured {_ago(found[1])}")
    if cached := read_cached(key):
        return MachineProfile(cached.profile, f"measured {_ago(cached.age_s)}", key)
    return None


def _measured(
    loaded: LoadedModel,
    shape: ModelShape,
    base: HardwareProfile,
    rough_s: float,
    key: Mapping[str, str],
    block_tokens: int | Literal["auto"],
) -> MachineProfile:
    from vasuki.hf.profiler.first_measure import measure_first

    started_s, stolen = time.perf_counter(), StolenTime()
    try:
        profile = measure_first(loaded, shape, base, lambda slower: _budget_s(slower * rough_s), block_tokens)
    except (RuntimeError, MemoryError) as error:  # what torch raises, also for memory that ran out
        log.warning("this machine could not be measured: %s", one_line(error))
        return MachineProfile(base, DATASHEET)
    seconds = time.perf_counter() - started_s
    keep(key, profile, seconds)
    machine = MachineProfile(profile, f"measured just now in {duration(seconds)}", key)
    if machine.spread:
        why = "its host gave processors to others" if stolen.share > NOISE else "other programs use its processors"
        off = percent_text(machine.spread)
        log.warning("this machine is too busy to be measured well (%s): times may be %s off", why, off)
    return machine


def _rough_s(shape: ModelShape, base: HardwareProfile, tokens: Tokens) -> float:
    """What the job takes, roughly."""
    flops_per_s = base.peak_flops(_rated(shape, base)) * base.efficiency.matmul
    return tokens.total * shape.linear_flops_per_token / flops_per_s + tokens.output / _STEP_SEQS * _STEP_S


def _budget_s(rough_s: float) -> float:
    """What measuring may take: of a long job a share, of a short one as much as is hardly felt."""
    return max(_LONG_SHARE * rough_s, min(_BUDGET_S, max(_LEAST_BUDGET_S, _SHORT_SHARE * rough_s)))


def _rated(shape: ModelShape, base: HardwareProfile) -> str:
    return shape.dtype if shape.dtype in base.peak_tflops else "float32"


def _ago(age_s: float) -> str:
    """`3 days ago`."""
    for seconds, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if age_s >= seconds:
            count = round(age_s / seconds)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "less than a minute ago"
