"""Profiles that first runs measured, kept in the user's cache: one file for each machine, set-up and model.

    $XDG_CACHE_HOME/vasuki/profiles/KEY.json      {"key": {...}, "seconds": 4.1, "profile": {...}}

Nothing depends on them: a file that is broken, or another machine's, costs a line of warning and a few seconds of
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pydantic

from vasuki.base.errors import one_line
from vasuki.base.version import VERSION
from vasuki.machines.here import cpu
from vasuki.machines.here.cpu import LEVEL_VARIABLE, level_of
from vasuki.machines.profile import HardwareProfile
from vasuki.models.shape import Matrix, ModelShape

log = logging.getLogger(__name__)

_MOST_DISTURBED_S = 3600.0  # for which a busy machine is taken to stay so


@dataclass(frozen=True, slots=True)
class Cached:
    """A profile from the cache."""

    profile: HardwareProfile
    age_s: float


def cache_key(shape: ModelShape, device: str = "", compiles: bool = True) -> dict[str, str]:
    """Everything that a measurement depends on, without torch.

    Args:
        shape: the model, as its configuration has it, and the way in which its rows are computed.
        device: the name of a GPU, or empty for the CPU.
        compiles: whether the kernels of this package may be compiled, or steps recorded.
    """
    processor = cpu.processor()
    return {
        "device": device or processor.model,
        "instructions": (os.environ.get(LEVEL_VARIABLE) or level_of(processor)) + " compiled" * compiles,
        "threads": str(processor.cores),
        "rows": shape.way,
        "torch": importlib.metadata.version("torch"),
        "vasuki": VERSION,
        "model": " ".join(f"{matrix.k}x{matrix.n}x{matrix.copies}" for matrix in _matrices(shape))
        + f" {shape.num_layers} layers, vocabulary {shape.vocab_size}, {shape.dtype}, KV {shape.kv_dtype or 'alike'}",
    }


def _matrices(shape: ModelShape) -> list[Matrix]:
    recurrent = shape.recurrent.matrices if shape.recurrent else ()
    return [*shape.dense_matrices, *shape.expert_matrices, *recurrent]


def read_cached(key: Mapping[str, str]) -> Cached | None:
    """The profile that was measured for a key; None if there is none that can be used."""
    file = _file(key)
    try:
        kept = json.loads(file.read_bytes())
        profile = HardwareProfile.model_validate(kept["profile"])
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
    return None if disturbed and age_s > _MOST_DISTURBED_S else Cached(profile, age_s)


def keep(key: Mapping[str, str], profile: HardwareProfile, seconds: float) -> None:
    """Write a profile, whole or not at all. Where that cannot be done, the next run measures again."""
    file = _file(key)
    tree = {
        "key": dict(key),
        "seconds": round(seconds, 2),
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
