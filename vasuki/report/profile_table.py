"""A measured profile on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from vasuki.machines.profile import HardwareProfile

_CELLS = 5  # of a row

Item = TypeVar("Item")


def profile_table(profile: HardwareProfile) -> str:
    """Return a table of what was measured, at most 100 columns wide."""
    gib = profile.memory_mib / 1024
    peaks = ", ".join(f"{dtype} {rate:.4g}" for dtype, rate in profile.peak_tflops.items())
    efficiency, overheads = profile.efficiency, profile.overheads
    lines = [
        f"{profile.name}: {profile.title}, {gib:.1f} GiB at {profile.memory_gb_per_s:g} GB/s",
        f"peak TFLOP/s  {peaks}",
        f"overheads     step {overheads.step_us:g} us, launch {overheads.launch_us:g} us, "
        f"shortest kernel {overheads.kernel_us:g} us",
        f"power         {profile.power.idle_w:g} W idle, {profile.power.peak_w:g} W limit",
    ]
    if profile.kind == "gpu":  # a CPU's rates are those that were reached
        shares = f"matmul {efficiency.matmul:.0%}, weights read {efficiency.bandwidth:.0%}, "
        shares += f"attention {efficiency.attention:.0%}, KV read {efficiency.kv_read:.0%}"
        lines.insert(2, f"reached       {shares}; tiles of {profile.tile_rows} rows")
    measured = profile.measured
    if measured is not None:
        series = [(f"{each.k} x {each.n} {each.dtype}", each.tokens, each.us) for each in measured.matmul]
        series += [(each.operator, each.tokens, each.us) for each in measured.elementwise]
        for name, tokens, us in series:
            cells = [f"{count}: {_short(time)}" for count, time in _spread(list(zip(tokens, us, strict=True)))]
            lines.append(_row(f"{name}, us", cells))
        for attention in measured.attention:
            heads = f"{attention.heads}/{attention.kv_heads}, KV {attention.kv_dtype or attention.dtype}, us"
            decodes = [point for point in attention.points if point.tokens == 1]
            chunks = [point for point in attention.points if point.tokens > 1]
            cells = [f"{p.sequences}@{p.context}: {_short(p.us)}" for p in _spread(decodes)]
            lines.append(_row(f"decodes {heads}", cells))
            cells = [f"{p.tokens}@{p.context}: {_short(p.us)}" for p in _spread(chunks)]
            lines.append(_row(f"chunks {heads}", cells))
        if measured.in_step is not None:
            pairs = zip(measured.in_step.tokens, measured.in_step.ratio, strict=True)
            lines.append(
                _row("steps over their rooflines", [f"{count}: {ratio:.2f}" for count, ratio in _spread(list(pairs))])
            )
    lines.append(f"copies, GB/s  {'bytes':>11} {'h2d':>8} {'d2h':>8} {'both':>8}")
    lines += [f"{'':13} {p.bytes:>11,} {p.h2d:>8.3g} {p.d2h:>8.3g} {p.both:>8.3g}" for p in profile.link.curve]
    return "\n".join(line.rstrip() for line in lines)


def _spread(items: Sequence[Item]) -> list[Item]:
    """A few of many values, evenly spaced, with the first and the last."""
    count = min(_CELLS, len(items))
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def _short(us: float) -> str:
    return f"{us / 1e3:.4g}k" if us >= 1e4 else f"{us:.0f}" if us >= 100 else f"{us:.3g}"


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:<29}" + "".join(f" {cell:>13}" for cell in cells)
