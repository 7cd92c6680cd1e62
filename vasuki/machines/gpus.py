"""A datasheet profile for any NVIDIA GPU, by the name that its driver reports.

listed in a profile's `device_names`     that profile
a variant of such a card                 that profile with the figures that differ
a slice of a card ("... MIG 3g.40gb")    the slice's share of it
unknown                                  from multiprocessors, clocks and bus width, as the driver reports them
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile, profile_for_device

# From NVIDIA's datasheets; memory as nvidia-smi reports it. Rates that are not named are taken from the similar card.
_VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "NVIDIA A10G": ("a10", {"title": "NVIDIA A10G 24GB", "half": 70.0, "float32": 35.0, "peak_w": 300}),
        "NVIDIA A100-SXM4-40GB": ("a100", {"title": "NVIDIA A100 40GB SXM", "memory_mib": 40960, "gb_per_s": 1555.0}),
        "NVIDIA A100-PCIE-40GB": (
            "a100",
            {"title": "NVIDIA A100 40GB PCIe", "memory_mib": 40960, "gb_per_s": 1555.0, "peak_w": 250},
        ),
        "NVIDIA A100 80GB PCIe": ("a100", {"title": "NVIDIA A100 80GB PCIe", "gb_per_s": 1935.0, "peak_w": 300}),
        "NVIDIA H100 NVL": (
            "h100-pcie",
            {"title": "NVIDIA H100 NVL", "memory_mib": 95830, "gb_per_s": 3938.0, "half": 835.5, "peak_w": 400},
        ),
    }
)
_SLICE = re.compile(r"(?P<card>.+) MIG (?P<sevenths>\d)g\.(?P<gigabytes>\d+)gb.*")
# FLOP of a multiprocessor and clock, dense, accumulating in float32: (half precision, float32), and a similar card.
_BY_CAPABILITY = {
    (7, 0): (1024, 128, "a100"),
    (7, 5): (1024, 128, "a10"),
    (8, 0): (2048, 128, "a100"),
    (8, 6): (1024, 256, "a10"),
    (8, 9): (1024, 256, "l4"),
    (9, 0): (4096, 256, "h100"),
    (10, 0): (8192, 256, "h100"),
    (12, 0): (1024, 256, "l4"),
}


@dataclass(frozen=True, slots=True)
class Reported:
    """A GPU as its driver describes it."""

    name: str
    memory_bytes: int
    multiprocessors: int
    clock_hz: float  # of multiprocessors, at most
    memory_clock_hz: float
    bus_bits: int
    capability: tuple[int, int]


def profile_of_gpu(name: str, reported: Reported | None = None) -> HardwareProfile:
    """A datasheet profile for a GPU of that name.

    Args:
        name: as torch or NVML reports it.
        reported: the rest of what its driver says, for a card that is not listed.

    Raises:
        ProfileError: a profile file is malformed.
    """
    if known := known_profile(name):
        return known
    if reported is None:
        profile = find_profile("a100")
        return profile.model_copy(update={"title": f"{name}, which nothing is known of: as an A100"})
    return scaled(reported)


def known_profile(name: str) -> HardwareProfile | None:
    """The profile of a card that is listed, of a variant of one, or of a slice of either; None of others."""
    if found := profile_for_device(name):
        return found
    if name in _VARIANTS:
        return _variant(*_VARIANTS[name])
    if (match := _SLICE.fullmatch(name)) and (card := known_profile(match["card"])):
        memory_mib = min(card.memory_mib, int(match["gigabytes"]) * 1024)
        return _scaled(card, name, int(match["sevenths"]) / 7, memory_mib / card.memory_mib, memory_mib)
    return None


def _variant(card: str, differs: dict[str, Any]) -> HardwareProfile:
    profile = find_profile(card)
    peaks = dict(profile.peak_tflops)
    for dtype, key in (("bfloat16", "half"), ("float16", "half"), ("float32", "float32")):
        peaks[dtype] = differs.get(key, peaks[dtype])
    for dtype in {"float8"} & peaks.keys():  # at a fixed multiple of bfloat16's rate
        peaks[dtype] *= peaks["bfloat16"] / profile.peak_tflops["bfloat16"]
    power = profile.power.model_copy(update={"peak_w": differs.get("peak_w", profile.power.peak_w)})
    return profile.model_copy(
        update={
            "title": differs["title"],
            "memory_mib": differs.get("memory_mib", profile.memory_mib),
            "memory_gb_per_s": differs.get("gb_per_s", profile.memory_gb_per_s),
            "peak_tflops": peaks,
            "power": power,
            "measured": None,  # on the similar card
        }
    )


def _scaled(card: HardwareProfile, title: str, compute: float, bandwidth: float, memory_mib: int) -> HardwareProfile:
    return card.model_copy(
        update={
            "title": title,
            "memory_mib": memory_mib,
            "memory_gb_per_s": card.memory_gb_per_s * bandwidth,
            "peak_tflops": {dtype: peak * compute for dtype, peak in card.peak_tflops.items()},
            "processors": max(1, round(card.processors * compute)),
            "measured": None,
        }
    )


def scaled(reported: Reported) -> HardwareProfile:
    """A profile for a GPU that no file lists: rates from what the driver reports, the rest from a similar card."""
    newest = max(each for each in _BY_CAPABILITY if each <= max(reported.capability, min(_BY_CAPABILITY)))
    half, single, similar = _BY_CAPABILITY[newest]
    card = find_profile(similar)
    tera_clocks = reported.multiprocessors * reported.clock_hz / 1e12
    peaks = {"bfloat16": half * tera_clocks, "float16": half * tera_clocks, "float32": single * tera_clocks}
    if "float8" in card.peak_tflops:
        peaks["float8"] = 2 * peaks["bfloat16"]
    gb_per_s = 2 * reported.memory_clock_hz * reported.bus_bits / 8 / 1e9  # twice a clock
    unknown = {"per_hour": 0, "spot": None, "source": "unknown; set cost.price_per_hour to yours"}
    return card.model_copy(
        update={
            "title": f"{reported.name}, from what its driver reports",
            "memory_mib": reported.memory_bytes // 2**20,
            "memory_gb_per_s": gb_per_s,
            "peak_tflops": peaks,
            "processors": reported.multiprocessors,
            "compute_capability": reported.capability,
            "measured": None,
            "price": card.price.model_copy(update=unknown),
        }
    )
