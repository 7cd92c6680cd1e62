"""Where offloading KV pays: layers that a step hides, prompts computed ahead, a map of links against KV memory, and a
table under pressure.

    offload_map.py [--figure docs/img/offload-map.svg] [--only layers|ahead|map|by_batch|table]

All come from the cost model, the planner and the simulator, for Llama-3-8B in bfloat16. A first table counts the layers
whose KV a single step hides; a second says what prefilling ahead changes, where `auto` takes it and where the job asks
for it. The map takes a card's compute and memory bandwidth, gives it other links and other KV memory, and asks which
fixed mode ends a job of long rows first; on the same cells a depth for each batch is held against one for the job. The
last table shrinks the KV memory of real profiles and compares policies on
a job of translations. Prints Markdown, and one JSON line last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vasuki.base.config import EngineConfig, KVConfig
from vasuki.engine.offload import OffloadMode
from vasuki.machines.cost_model import CostModel
from vasuki.machines.link import Link, LinkPoint
from vasuki.machines.memory_budget import memory_budget
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.offload.algorithms import LayerTraffic, choose_stream
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import Simulated, simulate_plan

GIB = 2**30
HOST_BYTES = 256 * GIB
COPY_S = 2.5e-6  # fixed time of one of many queued copies, between the profiles' 2 us (NVLink-C2C) and 3 us (PCIe)
COPY_SIZES = (2**12, 2**16, 2**20, 2**24, 2**28)
PAYS = 0.98  # of the makespan without offload; jobs as small as the map's differ by less for no reason
MOST_ROWS = 400
FULL_DUPLEX = 0.8  # of the rate in each direction when both run

LINK_GB_PER_S = (6.0, 12.0, 25.0, 52.0, 110.0, 220.0, 450.0)


@dataclass(frozen=True, slots=True)
class Panel:
    """One card's compute and memory, and the cards that resemble it."""

    card: str
    kv_gib: tuple[float, ...]
    marked: tuple[str, ...]


PANELS = (
    Panel("a10", (1, 2, 4, 8, 16, 32), ("a10", "a40", "rtx4090")),
    Panel("h200", (4, 8, 16, 32, 64, 128), ("h100-pcie", "h200", "gh200")),
)
LAYER_CARDS = ("a10", "a40", "rtx4090", "h100-pcie", "h200", "gh200")
CONTEXTS = (16_384, 65_536)  # tokens of KV that a step reads
DECODES, CHUNK = 32, 480  # sequences in a step, and prompt tokens in addition in a mixed one
BLOCKS = (16, 256)  # tokens; one copy is a block of a layer
TABLE_CARDS = ("a10", "a40", "h100-pcie", "gh200")
SHARES = (1.0, 0.4, 0.2, 0.1)
ROWS_WANTED = 96  # rows at their full length that the job wants room for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, default=Path("docs/img/offload-map.svg"))
    parser.add_argument("--only", choices=("layers", "ahead", "map", "by_batch", "table"))
    parser.add_argument("--block-tokens", type=int, default=256, help="of the map's KV blocks")
    options = parser.parse_args()
    shape = named_shape("llama-3-8b")
    result: dict[str, Any] = {}
    if options.only in (None, "layers"):
        layers = [row for card in LAYER_CARDS for row in hidden_layers(card, shape)]
        print(layers_table(layers))
        result["layers"] = [vars_of(row) for row in layers]
    if options.only in (None, "ahead"):
        changes = [ahead_change(job, rows, shape) for job in AHEAD_JOBS for rows in job.rows]
        print(ahead_table(changes))
        result["ahead"] = [vars_of(row) for row in changes]
    if options.only in (None, "map"):
        maps = [panel_map(panel, shape, options.block_tokens) for panel in PANELS]
        marks = {card: card_mark(card, shape) for panel in PANELS for card in panel.marked}
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(maps, marks, options.figure)
        result["map"] = [[vars_of(cell) for cell in cells] for cells in maps]
        print(marks_table(marks))
    if options.only in (None, "by_batch"):
        deep = [cell for panel in PANELS for cell in depths_by_batch(panel, shape)]
        print(by_batch_table(deep))
        result["by_batch"] = [vars_of(cell) for cell in deep]
    if options.only in (None, "table"):
        rows = [row for card in TABLE_CARDS for row in pressure(card, shape)]
        print(pressure_table(rows))
        result["pressure"] = [vars_of(row) for row in rows]
        result["targets"] = targets(rows)
        print(json.dumps(result["targets"], indent=1), file=sys.stderr)
    print(json.dumps(result))


def vars_of(item: Any) -> dict[str, Any]:
    """A slotted dataclass as a mapping, floats short."""
    values = {name: getattr(item, name) for name in item.__slots__}
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in values.items()}


# --- jobs ------------------------------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, rows: int, median: float, sigma: float, low: int, high: int) -> np.ndarray:
    """Clipped lognormal lengths: int64 `[rows]`."""
    return np.clip(rng.lognormal(np.log(median), sigma, rows).astype(np.int64), low, high)


def long_rows(rows: int) -> Lengths:
    """Documents and long answers: few fit side by side, so that weights weigh most in a step."""
    rng = np.random.default_rng(0)
    return Lengths(drawn(rng, rows, 1500, 0.5, 256, 4096), drawn(rng, rows, 400, 0.6, 64, 1500))


def translations(rows: int) -> Lengths:
    """Answers somewhat longer than prompts."""
    rng = np.random.default_rng(1)
    return Lengths(drawn(rng, rows, 110, 0.6, 16, 400), drawn(rng, rows, 140, 0.6, 16, 400))


# --- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HiddenLayers:
    """Layers that need no place on the device, because one step hides their copies."""

    card: str
    context_tokens: int
    mixed: bool  # the step carries a prompt chunk
    step_s: float
    by_block: tuple[int, ...]  # for blocks of `BLOCKS` tokens


def hidden_layers(card: str, shape: ModelShape) -> list[HiddenLayers]:
    """Steps of decodes and mixed ones, over little KV and much."""
    profile = find_profile(card)
    cost = CostModel(shape, profile)
    per_token = shape.kv_bytes_per_token_per_layer
    rows = []
    for context, chunk in itertools.product(CONTEXTS, (0, CHUNK)):
        each = context // DECODES
        work = cost.work([1] * DECODES + [chunk] * bool(chunk), [each] * DECODES + [chunk] * bool(chunk))
        by_block = []
        for block_tokens in BLOCKS:
            traffic = LayerTraffic(context * per_token, (DECODES + chunk) * per_token, block_tokens * per_token)
            plan = choose_stream(shape.num_layers, cost.layer_time_s(work), traffic, profile.link)
            by_block.append(plan.offloaded_layers)
        rows.append(HiddenLayers(card, context, bool(chunk), cost.step_time_s(work), tuple(by_block)))
    return rows


def layers_table(rows: Sequence[HiddenLayers]) -> str:
    """One line for each card and context."""
    kinds = ("decodes", "mixed")
    lines = [
        "| card | KV read | " + " | ".join(f"{kind}: step | {kind}: layers" for kind in kinds) + " |",
        "|---|---|" + "---|" * 2 * len(kinds),
    ]
    for card, context in dict.fromkeys((row.card, row.context_tokens) for row in rows):
        cells = [
            f"{row.step_s * 1e3:.0f} ms | " + " / ".join(map(str, row.by_block))
            for row in rows
            if (row.card, row.context_tokens) == (card, context)
        ]
        lines.append(f"| {card} | {context // 1024}k tokens | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# --- ahead -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AheadJob:
    """Equal rows, or long rows of many lengths."""

    title: str
    card: str
    rows: tuple[int, ...]
    lengths: tuple[int, int] | None  # prompt and output tokens; None: `long_rows`
    known: bool = True
    kv_gib: float | None = None


AHEAD_JOBS = (
    AheadJob("2,000 + 400 tokens", "a10", (30, 36, 37, 45, 54, 55, 93), (2000, 400)),
    AheadJob("500 + 1,000 tokens", "a10", (60,), (500, 1000)),
    AheadJob("4,000 + 600 tokens", "a40", (80,), (4000, 600)),
    AheadJob("1,000 + 256 tokens", "h200", (60, 150), (1000, 256), kv_gib=8),
    AheadJob("around 1,500 + 400 tokens", "a10", (40, 150), None),
    AheadJob("the same, not known", "a10", (40, 150), None, known=False),
)


@dataclass(frozen=True, slots=True)
class AheadChange:
    """What prefilling ahead does to the makespan."""

    title: str
    rows: int
    auto_s: float
    auto: OffloadMode  # what auto takes, which never prefills ahead
    asked: float  # change if the job asks for prefilling ahead: -0.02 is 2 % less


def ahead_change(job: AheadJob, rows: int, shape: ModelShape) -> AheadChange:
    """One job, planned by `auto` and as `kv.offload: ahead`."""
    profile, lengths = find_profile(job.card), long_rows(rows)
    if job.lengths is not None:
        prompt, output = job.lengths
        lengths = Lengths(np.full(rows, prompt), np.full(rows, output))
    lengths = replace(lengths, known=job.known)
    memory: dict[str, Any] = {} if job.kv_gib is None else {"device_memory": int(job.kv_gib * GIB)}

    def plan(offload: str) -> Plan:
        kv = KVConfig.model_validate({"host_memory": HOST_BYTES, "offload": offload, **memory})
        return make_plan(lengths, shape, profile, kv=kv)

    auto = plan("auto")
    asked = plan("ahead").makespan_s / auto.makespan_s - 1
    title = f"{job.title}, {job.card}" + (f", {job.kv_gib:g} GiB of KV" if job.kv_gib else "")
    return AheadChange(title, rows, auto.makespan_s, auto.offload.mode, asked)


def ahead_table(changes: Sequence[AheadChange]) -> str:
    """One line for each job and number of rows."""
    lines = ["| job | rows | auto | asked for |", "|---|---|---|---|"]
    lines += [f"| {row.title} | {row.rows} | {row.auto_s:.1f} s, {row.auto} | {row.asked:+.1%} |" for row in changes]
    return "\n".join(lines) + "\n"


# --- map -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the map."""

    card: str
    link_gb_per_s: float
    kv_gib: float
    mode: OffloadMode  # the fixed mode that ends first, unless none is as good
    change: float  # of the makespan against no offload: -0.1 is a tenth less
    change_of_auto: float  # of what the planner picks


def panel_map(panel: Panel, shape: ModelShape, block_tokens: int, least_rows: int = 150) -> list[Cell]:
    """Every cell of one panel, by KV memory and then by link."""
    base = find_profile(panel.card)
    base = base.model_copy(update={"memory_mib": 2**18})  # whatever the card, the grid says how much KV there is
    cells = []
    for kv_gib in panel.kv_gib:
        side_by_side = kv_gib * GIB / shape.kv_bytes_per_token / 2000
        job = long_rows(int(min(MOST_ROWS, max(least_rows, 3 * side_by_side))))

        def plan(profile: HardwareProfile, mode: OffloadMode | None, job: Lengths = job, gib: float = kv_gib) -> Plan:
            kv = KVConfig(
                offload=mode or "auto",
                device_memory=int(gib * GIB),
                host_memory=HOST_BYTES,
                block_tokens=block_tokens,
            )
            return make_plan(job, shape, profile, kv=kv)

        none_s = plan(base, "none").makespan_s
        for rate in LINK_GB_PER_S:
            profile = base.model_copy(update={"link": link_of(rate)})
            plans = [plan(profile, "stream"), plan(profile, "park")]
            best = min(plans, key=lambda made: made.makespan_s)
            pays = best.makespan_s < PAYS * none_s
            auto = plan(profile, None)
            cells.append(
                Cell(
                    card=panel.card,
                    link_gb_per_s=rate,
                    kv_gib=kv_gib,
                    mode=best.offload.mode if pays else "none",
                    change=best.makespan_s / none_s - 1 if pays else 0.0,
                    change_of_auto=auto.makespan_s / none_s - 1,
                )
            )
    return cells


@dataclass(frozen=True, slots=True)
class DepthCell:
    """One point of the map, with layers moved batch by batch: changes of the makespan against what `auto` picks."""

    card: str
    link_gb_per_s: float
    kv_gib: float
    auto: OffloadMode
    corrected: float  # as policy vasuki runs, with the corrected conditions
    printed: float  # with the printed ones


def depths_by_batch(panel: Panel, shape: ModelShape) -> list[DepthCell]:
    """Cells of one panel, every other link and memory. Locking host memory takes no time here."""
    base = find_profile(panel.card)
    overheads = base.overheads.model_copy(update={"pinning_s_per_gib": 0.0})
    base = base.model_copy(update={"memory_mib": 2**18, "overheads": overheads})
    cells = []
    for kv_gib, rate in itertools.product(panel.kv_gib[::2], LINK_GB_PER_S[::2]):
        job = long_rows(int(min(MOST_ROWS, max(150, 3 * kv_gib * GIB / shape.kv_bytes_per_token / 2000))))
        profile = base.model_copy(update={"link": link_of(rate)})

        def plan(mode: str, conditions: str = "corrected", of: tuple[Any, ...] = (job, profile, kv_gib)) -> Plan:
            rows, card, gib = of
            kv = {"offload": mode, "device_memory": int(gib * GIB), "host_memory": HOST_BYTES, "conditions": conditions}
            return make_plan(rows, shape, card, kv=KVConfig.model_validate(kv))

        auto = plan("auto")
        changes = [plan("by_batch", each).makespan_s / auto.makespan_s - 1 for each in ("corrected", "printed")]
        cells.append(DepthCell(panel.card, rate, kv_gib, auto.offload.mode, *changes))
        print(cells[-1], file=sys.stderr)
    return cells


def by_batch_table(cells: Sequence[DepthCell]) -> str:
    """One line for each kind of conditions."""
    lines = ["| conditions | cells | saves 2 % or more | best | median | worst |", "|---|---|---|---|---|---|"]
    for name in ("corrected", "printed"):
        changes = np.array([getattr(cell, name) for cell in cells])
        saves = int((changes < PAYS - 1).sum())
        lines.append(
            f"| {name} | {len(cells)} | {saves} | {changes.min():+.1%} | {np.median(changes):+.1%} | "
            f"{changes.max():+.1%} |"
        )
    return "\n".join(lines) + "\n"


def link_of(gb_per_s: float) -> Link:
    """A link of this rate for large copies, and a fixed time for every copy."""
    points = []
    for size in COPY_SIZES:
        rate = size / (COPY_S + size / (gb_per_s * 1e9)) / 1e9
        both = size / (COPY_S + size / (FULL_DUPLEX * gb_per_s * 1e9)) / 1e9
        points.append(LinkPoint(bytes=size, h2d=rate, d2h=rate, both=both))
    return Link(kind=f"{gb_per_s:g} GB/s", curve=tuple(points), source="a point of the map")


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a card stands."""

    title: str
    link_gb_per_s: float
    kv_gib: float


def card_mark(card: str, shape: ModelShape) -> Mark:
    """A card's link, and the KV that fits together with the weights."""
    profile = find_profile(card)
    budget = memory_budget(shape, profile)
    title = profile.title.replace("NVIDIA ", "").replace("GeForce ", "")
    return Mark(title, profile.link.curve[-1].h2d, budget.kv_bytes / GIB)


def marks_table(marks: dict[str, Mark]) -> str:
    lines = ["| card | link, GB/s | KV that fits, GiB |", "|---|---|---|"]
    lines += [f"| {mark.title} | {mark.link_gb_per_s:g} | {mark.kv_gib:.1f} |" for mark in marks.values()]
    return "\n".join(lines) + "\n"


_COLOURS = {"none": "#f4f4f4", "park": "#f0b64d", "stream": "#0b5a8a"}  # of rising darkness, also in grey
_LABELS = {
    "stream": "S  streaming layers pays",
    "park": "P  parking sequences pays",
    "none": f"nothing saves {1 - PAYS:.0%}",
}
_LETTERS = {"none": "", "park": "P", "stream": "S"}


def draw(maps: Sequence[Sequence[Cell]], marks: dict[str, Mark], figure: Path) -> None:
    """Panels side by side; a cell's letter and number say what its colour says."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "offload-map"})
    fig, axes = plt.subplots(1, len(maps), figsize=(10.5, 4.9), sharey=True, constrained_layout=True)
    for axis, cells, panel in zip(np.atleast_1d(axes), maps, PANELS, strict=False):
        for cell in cells:
            left, right = cell.kv_gib / 2**0.5, cell.kv_gib * 2**0.5
            low, high = cell.link_gb_per_s / 2**0.52, cell.link_gb_per_s * 2**0.52
            axis.add_patch(
                Rectangle((left, low), right - left, high - low, facecolor=_COLOURS[cell.mode], edgecolor="white")
            )
            if cell.mode != "none":
                dark = cell.mode == "stream"
                text = f"{_LETTERS[cell.mode]} {cell.change:.0%}".replace("-", "−")
                axis.text(left * 1.05, low * 1.06, text, fontsize=7.5, color="white" if dark else "black")
        _mark_cards(axis, [marks[card] for card in panel.marked if card in marks])
        gibs, rates = sorted({c.kv_gib for c in cells}), sorted({c.link_gb_per_s for c in cells})
        axis.set(xscale="log", yscale="log", xlim=(gibs[0] / 2**0.5, gibs[-1] * 2**0.5),
                 ylim=(rates[0] / 2**0.52, rates[-1] * 2**0.52))  # fmt: skip
        axis.set_xticks(gibs, [f"{gib:g}" for gib in gibs])
        axis.set_yticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
        profile = find_profile(panel.card)
        axis.set_title(f"compute and memory of an {profile.title.split()[1]} ({profile.memory_gb_per_s:g} GB/s)")
        axis.set_xlabel("KV in device memory, read in a full step (GiB)")
    np.atleast_1d(axes)[0].set_ylabel("host link, one direction (GB/s)")
    shown = {cell.mode for cells in maps for cell in cells}
    legend = [
        Patch(facecolor=_COLOURS[mode], edgecolor="grey", label=label)
        for mode, label in _LABELS.items()
        if mode in shown
    ]
    fig.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    fig.savefig(figure, metadata={"Date": None} if figure.suffix == ".svg" else None, dpi=130)
    plt.close(fig)


def _mark_cards(axis: Any, marks: list[Mark]) -> None:
    """A star for each card, its name above or below it in turn, so that names of near stars keep apart."""
    box = dict(boxstyle="round,pad=0.15", facecolor="white", edgecolor="black", linewidth=0.5)
    for index, mark in enumerate(sorted(marks, key=lambda each: (each.link_gb_per_s, each.kv_gib))):
        place = (mark.kv_gib, mark.link_gb_per_s)
        axis.plot(*place, "*", markersize=13, markerfacecolor="white", markeredgecolor="black", zorder=3)
        offset = (0, 10 if index % 2 == 0 else -17)
        axis.annotate(
            mark.title,
            place,
            xytext=offset,
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            bbox=box,
            zorder=4,
        )


# --- table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pressure:
    """One policy in one amount of memory."""

    card: str
    share: float  # of the KV memory that the job wants
    policy: str
    mode: OffloadMode
    makespan_s: float
    recomputed: float  # tokens computed again, as a share of all prompt tokens
    preemptions: int
    copied_s: float
    hidden: float  # share of the copy time; 1 where nothing is copied


def pressure(
    card: str, shape: ModelShape, shares: Sequence[float] = SHARES, rows: int = 4 * ROWS_WANTED
) -> list[Pressure]:
    """Policies and modes of one card, in less and less KV memory."""
    job, profile = translations(rows), find_profile(card)
    wanted_tokens = ROWS_WANTED * float((job.prompt_tokens + job.output_tokens).mean())
    runs: list[tuple[str, str, OffloadMode | None]] = [
        ("vllm", "vllm", "none"),
        ("vllm-v0", "vllm-v0", "none"),
        ("vasuki, none", "vasuki", "none"),
        ("vasuki, park", "vasuki", "park"),
        ("vasuki, stream", "vasuki", "stream"),
        ("vasuki, auto", "vasuki", None),
    ]
    table = []
    for share in shares:
        kv_bytes = int(share * wanted_tokens * shape.kv_bytes_per_token)
        for title, policy, mode in runs:
            run = _simulated(job, shape, profile, kv_bytes, policy, mode)
            stats, counters = run.result.stats, run.result.counters
            copied_s = stats.hidden_copy_s + stats.exposed_copy_s
            table.append(
                Pressure(
                    card=card,
                    share=share,
                    policy=title,
                    mode=run.plan.offload.mode,
                    makespan_s=run.result.makespan_s,
                    recomputed=run.recomputed_tokens / float(job.prompt_tokens.sum()),
                    preemptions=counters.preemptions_recompute + counters.preemptions_swap,
                    copied_s=copied_s,
                    hidden=stats.hidden_copy_s / copied_s if copied_s else 1.0,
                )
            )
    return table


def _simulated(
    job: Lengths, shape: ModelShape, profile: HardwareProfile, kv_bytes: int, policy: str, mode: OffloadMode | None
) -> Simulated:
    kv = KVConfig(offload=mode or "auto", device_memory=kv_bytes, host_memory=HOST_BYTES)
    engine = EngineConfig.model_validate({"policy": policy})
    plan = make_plan(job, shape, profile, engine=engine, kv=kv)
    return simulate_plan(plan, job, shape, profile)


def targets(rows: Sequence[Pressure]) -> dict[str, Any]:
    """What the table is to show: auto hides its copies, and no fixed mode beats it by more than 2 %."""
    autos = [row for row in rows if row.policy == "vasuki, auto"]
    fixed = {
        (auto.card, auto.share): min(
            row.makespan_s for row in rows if (row.card, row.share) == (auto.card, auto.share) and row.policy in _FIXED
        )
        for auto in autos
    }
    behind = {(a.card, a.share): a.makespan_s / fixed[a.card, a.share] - 1 for a in autos}
    moving = [auto for auto in autos if auto.mode != "none"]
    return {
        "auto_moves": len(moving),
        "auto_hides_95_percent": sum(auto.hidden >= 0.95 for auto in moving),
        "cases": len(autos),
        "within_2_percent_of_best_fixed": sum(value <= 0.02 for value in behind.values()),
        "worst_behind_best_fixed": round(max(behind.values()), 4),
        "missed": [f"{card} at {share:.0%}: {value:+.1%}" for (card, share), value in behind.items() if value > 0.02]
        + [f"{auto.card} at {auto.share:.0%}: {auto.hidden:.0%} hidden" for auto in moving if auto.hidden < 0.95],
    }


_FIXED = ("vasuki, none", "vasuki, park", "vasuki, stream")


def pressure_table(rows: Sequence[Pressure]) -> str:
    """One line for each card and share, one group of columns for each policy."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    lines = ["| card | KV memory | " + " | ".join(policies) + " |", "|---|---|" + "---|" * len(policies)]
    for card, share in dict.fromkeys((row.card, row.share) for row in rows):
        here = {row.policy: row for row in rows if (row.card, row.share) == (card, share)}
        lines.append(f"| {card} | {share:.0%} | " + " | ".join(map(_cell, here.values())) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Pressure) -> str:
    parts = [f"{row.makespan_s:.1f} s"]
    if row.policy == "vasuki, auto":
        parts.append(row.mode)
    if row.recomputed:
        parts.append(f"{row.recomputed:.0%} again")
    if row.copied_s:
        parts.append(f"{row.hidden:.0%} hidden")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
