"""Draw which way to offload ends a job soonest, by KV memory and link, and where cards stand: see `offload_map`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from reproduce_table import Figures
from write_page import ROOT

from vasuki.machines.profile_files import find_profile

FIGURE = ROOT / "docs" / "img" / "offload-map.svg"
MARKED = {"a10": ("a10", "a40", "rtx4090"), "h200": ("h100-pcie", "h200", "gh200")}  # that resemble a panel's card
LOOKS = {  # colour, letter and words; of rising darkness, also in grey
    "none": ("#f4f4f4", "", "nothing saves 2%"),
    "park": ("#f0b64d", "P", "P  parking sequences pays"),
    "stream": ("#0b5a8a", "S", "S  streaming layers pays"),
}
WIDE, HIGH = 2**0.5, 2**0.52  # half of a cell, as a factor


def draw(cells: Sequence[Figures], cards: Sequence[Figures], to: Path = FIGURE) -> None:
    """A panel for each card's compute; a cell's letter and number say what its colour says."""
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "offload-map"}):
        figure = Figure(figsize=(10.5, 4.9), layout="constrained")
        axes = figure.subplots(1, len(MARKED), sharey=True)
        for axis, (card, marked) in zip(axes, MARKED.items(), strict=True):
            _panel(axis, card, [cell for cell in cells if cell["card"] == card])
            _mark(axis, [mark for mark in cards if mark["card"] in marked])
        axes[0].set_ylabel("host link, one direction (GB/s)")
        shown = {cell["mode"] for cell in cells}
        looks = [look for mode, look in LOOKS.items() if mode in shown]
        legend = [Patch(facecolor=colour, edgecolor="grey", label=words) for colour, _, words in looks]
        figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(to, metadata={"Date": None} if to.suffix == ".svg" else None, dpi=130)


def _panel(axis: Any, card: str, cells: Sequence[Any]) -> None:
    for cell in cells:
        left, low = cell["kv_gib"] / WIDE, cell["link_gb_per_s"] / HIGH
        colour, letter, _ = LOOKS[cell["mode"]]
        size = (left * (WIDE**2 - 1), low * (HIGH**2 - 1))
        axis.add_patch(Rectangle((left, low), *size, facecolor=colour, edgecolor="white"))
        if letter:
            text = f"{letter} {cell['change']:.0%}".replace("-", "\N{MINUS SIGN}")
            axis.text(left * 1.05, low * 1.06, text, fontsize=7.5, color="white" if letter == "S" else "black")
    gibs, rates = (sorted({cell[name] for cell in cells}) for name in ("kv_gib", "link_gb_per_s"))
    axis.set(
        xscale="log", yscale="log", xlim=(gibs[0] / WIDE, gibs[-1] * WIDE), ylim=(rates[0] / HIGH, rates[-1] * HIGH)
    )
    axis.set_xticks(gibs, [f"{gib:g}" for gib in gibs])
    axis.set_yticks(rates, [f"{rate:g}" for rate in rates])
    axis.minorticks_off()
    profile = find_profile(card)
    axis.set_title(f"compute and memory of an {profile.title.split()[1]} ({profile.memory_gb_per_s:g} GB/s)")
    axis.set_xlabel("KV in device memory, read in a full step (GiB)")


def _mark(axis: Any, marks: Sequence[Any]) -> None:
    """A star for each card, its name above or below it in turn, so that names of near stars keep apart."""
    box = dict(boxstyle="round,pad=0.15", facecolor="white", edgecolor="black", linewidth=0.5)
    for index, mark in enumerate(sorted(marks, key=lambda each: (each["link_gb_per_s"], each["kv_gib"]))):
        place, offset = (mark["kv_gib"], mark["link_gb_per_s"]), (0, 10 if index % 2 == 0 else -17)
        axis.plot(*place, "*", markersize=13, markerfacecolor="white", markeredgecolor="black", zorder=3)
        label = dict(xytext=offset, textcoords="offset points", ha="center", fontsize=7.5, bbox=box, zorder=4)
        axis.annotate(mark["title"], place, **label)
