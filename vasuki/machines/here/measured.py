"""How fast this machine is: the user's own profile, what an earlier run measured, or a datasheet.

    `vasuki profile` has measured it with this model      that one
    a run has measured it with this model                 from the cache
    there is time, and VASUKI_MEASURE is not off          measured now by steps of the model, and kept
    else                                                  what is known of such machines

A run looks back when it is over: a profile that its steps contradict is not used again. What runs measure is kept in
the user's cache, a file for each machine, set-up and model:

    $XDG_CACHE_HOME/vasuki/profiles/KEY.json      {"key": {...}, "seconds": 4.1, "pressure": 0.0, "profile": {...}}

Nothing depends on these files: one that is broken, or another machine's, costs a line of warning and a few seconds of
measuring.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pydantic

from vasuki.base.errors import one_line
from vasuki.base.version import VERSION
from vasuki.machines.gpus import known_profile, profile_of_gpu
from vasuki.machines.here import control_group, cpu
from vasuki.machines.here.cpu import LEVEL_VARIABLE, level_of, typical_of
from vasuki.machines.here.device import LocalDevice
from vasuki.machines.here.gpu import Board
from vasuki.machines.here.pressure import BUSY, cpu_pressure
from vasuki.machines.here.stolen_time import NOISE
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import profile_measured_here
from vasuki.models.shape import ModelShape

log = logging.getLogger(__name__)

DATASHEET = "datasheet"
MEASURE_VARIABLE = "VASUKI_MEASURE"  # off: nothing is measured
MOST_OFF = 0.25  # by which steps may differ from a profile before it is measured again

# What measuring may take.
_BUDGET_S, _LEAST_BUDGET_S = 5.0, 0.5
_LONG_SHARE, _SHORT_SHARE = 0.03, 0.2
_TOO_SHORT_S = 0.5
_STEP_S, _STEP_SEQS = 2e-3, 64  # of a small model, roughly

_MOST_DISTURBED_S = 3600.0  # for which a machine is taken to stay as disturbed as it was


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


def datasheet(device: LocalDevice) -> HardwareProfile:
    """What is known of such a device."""
    if device.on_cpu:
        return typical_of(cpu.processor())
    board = None if known_profile(device.gpu) else Board.of()
    return profile_of_gpu(device.gpu, board.reported if board else None)


def measured_before(device_names: Iterable[str], key: Mapping[str, str]) -> MachineProfile | None:
    """What `vasuki profile` or an earlier run has measured on this machine, of this model or of any."""
    for name in device_names:
        if found := profile_measured_here(name, key["model"]):
            return MachineProfile(found[0], f"measured {_ago(found[1])}")
    return read_cached(key)


def why_not_measured(rough_s: float, waits: bool) -> str:
    """Why nothing is measured; empty if it is."""
    if os.environ.get(MEASURE_VARIABLE, "").lower() == "off":
        return f"{MEASURE_VARIABLE} is off"
    if waits:
        return "weights that wait on the host are not measured"
    return "the job is too short to measure for" if rough_s < _TOO_SHORT_S else ""


def roughly_s(shape: ModelShape, base: HardwareProfile, tokens: Tokens) -> float:
    """What the job takes, roughly."""
    flops_per_s = base.peak_flops(_rated(shape, base)) * base.efficiency.matmul
    return tokens.total * shape.linear_flops_per_token / flops_per_s + tokens.output / _STEP_SEQS * _STEP_S


def budget_s(rough_s: float) -> float:
    """What measuring may take: of a long job a share, of a short one as much as is hardly felt."""
    return max(_LONG_SHARE * rough_s, min(_BUDGET_S, max(_LEAST_BUDGET_S, _SHORT_SHARE * rough_s)))


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


def cache_key(shape: ModelShape, device: str = "", compiles: bool = True) -> dict[str, str]:
    """Everything that a measurement depends on, without torch.

    Args:
        shape: the model, as its configuration has it, and the way in which its rows are computed.
        device: the name of a GPU, or empty for the CPU.
        compiles: whether the kernels of this package may be compiled, or steps recorded.
    """
    processor, quota = cpu.processor(), control_group.processor_quota()
    return {
        "device": device or processor.model,
        "instructions": (os.environ.get(LEVEL_VARIABLE) or level_of(processor)) + " compiled" * compiles,
        "threads": str(processor.cores) + (f" in {quota:g} processors" if quota and quota < processor.cores else ""),
        "rows": shape.backend,
        "torch": importlib.metadata.version("torch"),
        "vasuki": VERSION,
        "model": sizes_of(shape),
    }


def sizes_of(shape: ModelShape) -> str:
    """What a measurement depends on of a model, as its configuration has it."""
    recurrent = shape.recurrent.matrices if shape.recurrent else ()
    matrices = (*shape.dense_matrices, *shape.expert_matrices, *recurrent)
    return " ".join(
        [
            *(f"{matrix.k}x{matrix.n}x{matrix.copies}" for matrix in matrices),
            f"{shape.num_layers} layers, vocabulary {shape.vocab_size}, {shape.dtype}, "
            f"KV {shape.kv_dtype or shape.dtype}",
            *([f"products {shape.product_dtype}"] if shape.product_dtype else []),
        ]
    )


def read_cached(key: Mapping[str, str]) -> MachineProfile | None:
    """The profile that was measured for a key; None if there is none that can be used."""
    file = _file(key)
    try:
        kept = json.loads(file.read_bytes())
        profile, pressure = HardwareProfile.model_validate(kept["profile"]), float(kept.get("pressure", 0.0))
        age_s = max(0.0, time.time() - file.stat().st_mtime)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read, so the machine is measured again: %s", file, error.strerror or error)
        return None
    except (ValueError, KeyError, TypeError, pydantic.ValidationError) as error:
        log.warning("%s is broken, so the machine is measured again: %s", file, one_line(error)[:100])
        return None
    if kept.get("key") != dict(key):
        log.warning("%s was measured on another machine, so this one is measured again", file)
        return None
    disturbed = profile.measured is not None and profile.measured.spread > 0
    if disturbed and (age_s > _MOST_DISTURBED_S or pressure > BUSY >= cpu_pressure()):
        return None
    return MachineProfile(profile, f"measured {_ago(age_s)}", key)


def keep(key: Mapping[str, str], profile: HardwareProfile, seconds: float, pressure: float = 0.0) -> None:
    """Write a profile, whole or not at all. Where that cannot be done, the next run measures again.

    Args:
        key: what it depends on.
        profile: as it was measured.
        seconds: that measuring took.
        pressure: `cpu_pressure` before. What was measured beside other programs is not used once they are gone.
    """
    file = _file(key)
    tree = {
        "key": dict(key),
        "seconds": round(seconds, 2),
        "pressure": pressure,
        "profile": profile.model_dump(mode="json", exclude_none=True),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".partial", delete=False) as partial:
            json.dump(tree, partial)
        os.replace(partial.name, file)
    except OSError as error:
        log.warning("what was measured cannot be kept, so the next run measures again: %s", error)


def forget(key: Mapping[str, str]) -> None:
    """Let the next run measure again."""
    try:
        _file(key).unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be deleted: %s", _file(key), error.strerror or error)


def _file(key: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:20]
    return _folder() / f"{digest}.json"


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "vasuki", "profiles")


def _rated(shape: ModelShape, base: HardwareProfile) -> str:
    return shape.dtype if shape.dtype in base.peak_tflops else "float32"


def _ago(age_s: float) -> str:
    """`3 days ago`."""
    for seconds, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if age_s >= seconds:
            count = round(age_s / seconds)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "less than a minute ago"
