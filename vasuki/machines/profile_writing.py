"""A profile, written to a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from vasuki.base.errors import ProfileError
from vasuki.machines.profile import HardwareProfile


def prepare_folder(path: Path, name: str) -> None:
    """Make sure that a profile of this name can be written to a file, before minutes are spent on measuring it.

    Raises:
        ProfileError: the file is not called like the profile, or there is no such folder to write to.
    """
    if path.name != f"{name}.yaml":
        raise ProfileError(f"profile {name} must be written to a file called {name}.yaml, not {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ProfileError(f"cannot write hardware profile {path}: {error.strerror or error}") from None


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Write a file that `load_profile` reads back as the same profile. It is there as a whole or not at all.

    Raises:
        ProfileError: the file is not called like the profile, or cannot be written.
    """
    prepare_folder(path, profile.name)
    tree = profile.model_dump(mode="json", exclude_none=True)
    text = "# Written by `vasuki profile`.\n" + yaml.dump(
        _laid_out(tree), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120, allow_unicode=True
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ProfileError(f"cannot write hardware profile {path}: {error.strerror or error}") from None


class _Line:
    """A list or mapping that is written on one line."""

    def __init__(self, value: list[Any] | dict[str, Any]) -> None:
        self.value = value


class _Dumper(yaml.SafeDumper):
    pass


def _represent_line(dumper: yaml.SafeDumper, line: _Line) -> yaml.Node:
    if isinstance(line.value, dict):
        return dumper.represent_mapping("tag:yaml.org,2002:map", line.value, flow_style=True)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", line.value, flow_style=True)


_Dumper.add_representer(_Line, _represent_line)


def _laid_out(value: Any, in_list: bool = False) -> Any:
    """Lists of numbers, and each point of a list of points, on one line; the rest as people write it."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if children is None:
        return value
    if all(not isinstance(child, dict | list) for child in children) and (in_list or isinstance(value, list)):
        return _Line(value)
    if isinstance(value, dict):
        return {key: _laid_out(child) for key, child in value.items()}
    return [_laid_out(child, in_list=True) for child in value]
