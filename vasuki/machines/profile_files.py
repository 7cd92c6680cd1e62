"""Where hardware profiles lie, and how they are read.

They are found by name in this order; the first folder that holds `NAME.yaml` wins:

    $VASUKI_PROFILES                 folders of the user's own, separated like $PATH
    ~/.config/vasuki/profiles        where `vasuki profile` leaves what it measured
    ../profiles                      next to the package, in a checkout
    share/vasuki/profiles            of the environment that a wheel was installed into
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
import yaml

from vasuki.base.errors import ProfileError, did_you_mean, one_line
from vasuki.base.files import read_short
from vasuki.base.schema import explain
from vasuki.machines.profile import HardwareProfile

_MOST_BYTES = 2**20  # of a file; those that come with vasuki have 8,000


def find_profile(name_or_path: str | Path) -> HardwareProfile:
    """Read the profile of that name, or the file at that path.

    Raises:
        ProfileError: nothing goes by that name (the message names the nearest), or the file is malformed.
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")) or os.sep in text:
        return load_profile(Path(text))
    known = _profile_files()
    key = text.lower().replace("_", "-").replace(" ", "-")
    if key not in known:
        raise ProfileError(f"unknown GPU '{text}'{did_you_mean(key, known)}; known: {', '.join(sorted(known))}")
    return load_profile(known[key])


def available_profiles() -> tuple[str, ...]:
    """Names that `find_profile` knows, sorted."""
    return tuple(sorted(_profile_files()))


def user_profile_path(name: str) -> Path:
    """Where a measured profile goes, so that `find_profile` finds it by name."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "vasuki" / "profiles" / f"{name}.yaml"


def profile_for_device(device_name: str) -> HardwareProfile | None:
    """The profile that lists this driver-reported name, such as "NVIDIA A10"; None if there is none."""
    for name in available_profiles():
        profile = find_profile(name)
        if device_name in profile.device_names:
            return profile
    return None


def profile_measured_here(device_name: str, model: str) -> tuple[HardwareProfile, float] | None:
    """What `vasuki profile` left in the user's folders for this driver-reported name, and how many seconds ago: with
    steps of a model of these sizes, or with operators."""
    for folder in _user_folders():
        for file in sorted(folder.glob("*.yaml")):
            profile = load_profile(file)
            measured = profile.measured
            if device_name in profile.device_names and measured is not None and measured.model in ("", model):
                return profile, max(0.0, time.time() - file.stat().st_mtime)
    return None


def load_profile(path: Path) -> HardwareProfile:
    """Read and check one file. `measured` may name a file in its folder that holds that section."""
    tree = _read_yaml(path)
    measured = tree.get("measured")
    if isinstance(measured, str):
        tree["measured"] = _read_yaml(path.parent / measured)
    try:
        profile = HardwareProfile.model_validate(tree)
    except pydantic.ValidationError as error:
        raise ProfileError(f"{path}: " + "; ".join(explain(error, HardwareProfile))) from None
    if profile.name != path.stem:
        raise ProfileError(f"{path}: name is '{profile.name}' but the file is called '{path.stem}'")
    return profile


def _profile_files() -> dict[str, Path]:
    """Name -> file. Folders that come first win."""
    files: dict[str, Path] = {}
    for folder in _folders():
        for file in sorted(folder.glob("*.yaml")):
            files.setdefault(file.stem, file)
    return files


def _user_folders() -> Iterator[Path]:
    yield from (Path(folder) for folder in os.environ.get("VASUKI_PROFILES", "").split(os.pathsep) if folder)
    yield user_profile_path("").parent


def _folders() -> Iterator[Path]:
    yield from _user_folders()
    yield Path(__file__).resolve().parents[2] / "profiles"  # of a checkout
    yield Path(sys.prefix) / "share" / "vasuki" / "profiles"  # of an installed wheel


@functools.lru_cache(maxsize=64)
def _parse_yaml(path: Path, modified_ns: int) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(read_short(path, _MOST_BYTES), Loader=loader)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = _parse_yaml(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ProfileError(f"cannot read hardware profile {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date that no calendar has
        raise ProfileError(f"{path} is not valid YAML: {one_line(error)}") from None
    if not isinstance(tree, Mapping):
        raise ProfileError(f"{path} does not describe a hardware profile: expected keys such as name and memory_mib")
    return dict(tree)
