"""A profile as a file, and as a table."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from vasuki.errors import ProfileError
from vasuki.profile import HardwareProfile

_SHOWN_TOKENS = 6
_WIDTH = 100


def default_path(profile: HardwareProfile) -> Path:
    """Where `find_profile` finds it by name, before the profiles that come with the package."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "vasuki" / "profiles" / f"{profile.name}.yaml"


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Write a file that `load_profile` reads back as the same profile. It is there as a whole or not at all.

    Raises:
        ProfileError: the file is not called like the profile, or cannot be written.
    """
    if path.name != f"{profile.name}.yaml":
        raise ProfileError(f"profile {profile.name} must be written to a file called {profile.name}.yaml, not {path}")
    tree = profile.model_dump(mode="json", exclude_none=True)
    text = "# Written by `vasuki profile`.\n" + yaml.dump(
        _laid_out(tree), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120, allow_unicode=True
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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


def profile_table(profile: HardwareProfile) -> str:
    """What was measured, in at most 100 columns."""
    gib = profile.memory_mib / 1024
    peaks = ", ".join(f"{dtype} {rate:.4g}" for dtype, rate in profile.peak_tflops.items())
    efficiency, overheads = profile.efficiency, profile.overheads
    lines = [
        f"{profile.name}: {profile.title}, {gib:.1f} GiB at {profile.memory_gb_per_s:g} GB/s",
        f"peak TFLOP/s  {peaks}",
        f"reached       matmul {efficiency.matmul:.0%}, weights read {efficiency.bandwidth:.0%}, "
        f"attention {efficiency.attention:.0%}, KV read {efficiency.kv_read:.0%}; tiles of {profile.tile_rows} rows",
        f"overheads     step {overheads.step_us:g} us, launch {overheads.launch_us:g} us, "
        f"shortest kernel {overheads.kernel_us:g} us",
        f"power         {profile.power.idle_w:g} W idle, {profile.power.peak_w:g} W limit",
    ]
    if "allocation" in profile.sources:
        lines.append(f"allocation    {profile.sources['allocation']}")
    measured = profile.measured
    if measured is not None:
        series = [(f"matmul {each.k} x {each.n} {each.dtype}", each.tokens, each.us) for each in measured.matmul]
        series += [(each.operator, each.tokens, each.us) for each in measured.elementwise]
        for name, tokens, us in series:
            shown = range(0, len(tokens), -(-len(tokens) // _SHOWN_TOKENS))
            lines.append(_row(f"{name}, us", [f"{tokens[i]}: {us[i]:.4g}" for i in shown]))
        for attention in measured.attention:
            heads = f"{attention.heads}/{attention.kv_heads} heads of {attention.head_dim}"
            for title, points in (
                (f"decodes, {heads}, us", [p for p in attention.points if p.tokens == 1]),
                (f"chunks, {heads}, us", [p for p in attention.points if p.tokens > 1]),
            ):
                points = points[:: -(-len(points) // 4)] if points else []
                cells = [
                    f"{p.sequences}x{p.context}: {p.us:.4g}" if p.tokens == 1 else f"{p.tokens}@{p.context}: {p.us:.4g}"
                    for p in points
                ]
                lines.append(_row(title, cells))
    lines.append(f"copies, GB/s  {'bytes':>11} {'h2d':>8} {'d2h':>8} {'both':>8}")
    lines += [f"{'':13} {p.bytes:>11,} {p.h2d:>8.3g} {p.d2h:>8.3g} {p.both:>8.3g}" for p in profile.link.curve]
    return "\n".join(line[:_WIDTH].rstrip() for line in lines)


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:<34}" + " ".join(f"{cell:>10}" for cell in cells)
