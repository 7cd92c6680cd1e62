"""How far predictions have been off, by what a profile's rates come from."""

from __future__ import annotations

from vasuki.machines.profile import HardwareProfile

MEASURED = 0.18  # of 40 runs on CPUs 27 were within 10 %, most others within 18 % (docs/profiles.md)
DATASHEET = 0.25  # a layer at worst 20 % (docs/cost-model.md); overheads and attention are assumed
TYPICAL_CPU = 1.0  # clocks and memory of CPUs differ by a factor of two


def known_error(profile: HardwareProfile, in_8_bits: bool = False) -> float:
    """The share by which a makespan may be off either way: 0.25 means from 0.8 to 1.25 times as long.

    Args:
        profile: that it was predicted with.
        in_8_bits: whether something is rounded to 8 bits, of which no prediction was compared with a run yet.
    """
    if profile.measured and profile.is_as_measured:
        return max(DATASHEET if in_8_bits else MEASURED, profile.measured.spread)
    return TYPICAL_CPU if profile.kind == "cpu" else DATASHEET
