"""Where offloading KV pays, by the cost model, the planner and the simulator, for Llama-3-8B in bfloat16.

    offload_map.py [--only layers|ahead|map|cards|by_batch|pressure] [--write]

`layers` counts the layers whose KV a single step hides. `ahead` says what prefilling ahead changes where the job asks
for it. `map` takes a card's compute and memory bandwidth, gives it other links and other KV memory, and asks which
fixed mode ends a job of long rows first; `cards` stand on it; `by_batch` holds a depth for each batch against one for
the job, on the same cells. `pressure` shrinks the KV memory of real profiles and compares policies on a job of
translations. Prints Markdown; with --write docs/data/offload.json has the figures, and docs/img/offload-map.svg the
map. All of it takes an hour.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import draw_offload_map
import numpy as np
from reproduce_table import Figures, markdown, rounded
from write_page import ROOT, write_rows

from vasuki.base.config import EngineConfig, KVConfig
from vasuki.machines.cost_model import CostModel
from vasuki.machines.link import Link, LinkPoint
from vasuki.machines.memory_budget import memory_budget
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.planner.offload.algorithms import LayerTraffic, choose_stream
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import simulate_plan

SHAPE = named_shape("llama-3-8b")
DATA = ROOT / "docs" / "data" / "offload.json"
GIB = 2**30
HOST_BYTES = 256 * GIB
COPY_S = 2.5e-6  # fixed time of one of many queued copies, between the profiles' 2 us (NVLink-C2C) and 3 us (PCIe)
COPY_SIZES = (2**12, 2**16, 2**20, 2**24, 2**28)
PAYS = 0.98  # of the makespan without offload; jobs as small as the map's differ by less for no reason
MOST_ROWS = 400
MAP_BLOCK_TOKENS = 256
FULL_DUPLEX = 0.8  # of the rate in each direction when both run

LINK_GB_PER_S = (6.0, 12.0, 25.0, 52.0, 110.0, 220.0, 450.0)
KV_GIB = {"a10": (1, 2, 4, 8, 16, 32), "h200": (4, 8, 16, 32, 64, 128)}  # by the card whose compute it is
LAYER_CARDS = ("a10", "a40", "rtx4090", "h100-pcie", "h200", "gh200")
CONTEXTS = (16_384, 65_536)  # tokens of KV that a step reads
DECODES, CHUNK = 32, 480  # sequences in a step, and prompt tokens in addition in a mixed one
BLOCKS = (16, 256)  # tokens; one copy is a block of a layer
PRESSED_CARDS = ("a10", "a40", "h100-pcie", "gh200")
SHARES = (1.0, 0.4, 0.2, 0.1)
ROWS_WANTED = 96  # rows at their full length that the job wants room for


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


def planned(job: Lengths, profile: HardwareProfile, offload: str, **kv: Any) -> Plan:
    """A plan by a way to offload, with memory on the host that is never the limit."""
    config = KVConfig.model_validate({"host_memory": HOST_BYTES, "offload": offload, **kv})
    return make_plan(job, SHAPE, profile, kv=config)


def layers(cards: Sequence[str] = LAYER_CARDS) -> Iterator[Figures]:
    """Layers that need no place on the device because one step hides their copies, by the size of blocks."""
    per_token = SHAPE.kv_bytes_per_token_per_layer
    for card, context, chunk in itertools.product(cards, CONTEXTS, (0, CHUNK)):
        profile = find_profile(card)
        cost = CostModel(SHAPE, profile)
        each = context // DECODES
        work = cost.work([1] * DECODES + [chunk] * bool(chunk), [each] * DECODES + [chunk] * bool(chunk))
        figures: Figures = {
            "card": card,
            "context_tokens": context,
            "prompt_tokens": chunk,
            "step_s": cost.step_time_s(work),
        }
        for block in BLOCKS:
            traffic = LayerTraffic(context * per_token, (DECODES + chunk) * per_token, block * per_token)
            plan = choose_stream(SHAPE.num_layers, cost.layer_time_s(work), traffic, profile.link)
            figures[f"layers_by_{block}"] = plan.offloaded_layers
        yield figures


@dataclass(frozen=True, slots=True)
class AheadJob:
    """Equal rows, or long rows of many lengths."""

    card: str
    rows: tuple[int, ...]
    lengths: tuple[int, int] | None  # prompt and output tokens; None: `long_rows`
    known: bool = True
    kv: dict[str, Any] | None = None


AHEAD_JOBS = (
    AheadJob("a10", (30, 36, 37, 45, 54, 55, 93), (2000, 400)),
    AheadJob("a10", (60,), (500, 1000)),
    AheadJob("a40", (80,), (4000, 600)),
    AheadJob("h200", (60, 150), (1000, 256), kv={"device_memory": 8 * GIB}),
    AheadJob("a10", (40, 150), None),
    AheadJob("a10", (40, 150), None, known=False),
)


def ahead(jobs: Sequence[AheadJob] = AHEAD_JOBS) -> Iterator[Figures]:
    """What prefilling ahead does to the makespan if a job asks for it: -0.02 is 2 % less than what `auto` takes."""
    for job in jobs:
        for rows in job.rows:
            lengths, profile = long_rows(rows), find_profile(job.card)
            if job.lengths:
                prompt, output = job.lengths
                lengths = Lengths(np.full(rows, prompt), np.full(rows, output))
            lengths = replace(lengths, known=job.known)
            auto, asked = (planned(lengths, profile, offload, **job.kv or {}) for offload in ("auto", "ahead"))
            yield {
                "card": job.card,
                "lengths": "{} + {} tokens".format(*job.lengths) if job.lengths else "around 1500 + 400 tokens",
                "known": int(job.known),
                "rows": rows,
                "auto": auto.offload.mode,
                "auto_s": auto.makespan_s,
                "ahead": asked.makespan_s / auto.makespan_s - 1,
            }


def link_of(gb_per_s: float) -> Link:
    """A link of this rate for large copies, and a fixed time for every copy."""
    points = []
    for size in COPY_SIZES:
        rate = size / (COPY_S + size / (gb_per_s * 1e9)) / 1e9
        both = size / (COPY_S + size / (FULL_DUPLEX * gb_per_s * 1e9)) / 1e9
        points.append(LinkPoint(bytes=size, h2d=rate, d2h=rate, both=both))
    return Link(kind=f"{gb_per_s:g} GB/s", curve=tuple(points), source="a point of the map")


def cell(card: str, gb_per_s: float) -> HardwareProfile:
    """A card on the map: its compute, any memory, and a link. Locking host memory takes no time."""
    base = find_profile(card)
    overheads = base.overheads.model_copy(update={"pinning_s_per_gib": 0.0})
    return base.model_copy(update={"memory_mib": 2**18, "overheads": overheads, "link": link_of(gb_per_s)})


def job_for(kv_gib: float, least_rows: int) -> Lengths:
    """As many long rows as fill that memory three times, within limits."""
    side_by_side = kv_gib * GIB / SHAPE.kv_bytes_per_token / 2000
    return long_rows(int(min(MOST_ROWS, max(least_rows, 3 * side_by_side))))


def offload_map(cards: Sequence[str] = tuple(KV_GIB), least_rows: int = 150) -> Iterator[Figures]:
    """By card, KV memory and link: the fixed mode that ends first unless none is as good, and what it saves.

    Changes are of the makespan against no offload: -0.1 is a tenth less.
    """
    for card in cards:
        for kv_gib in KV_GIB[card]:
            job, memory = job_for(kv_gib, least_rows), {"device_memory": kv_gib * GIB, "block_tokens": MAP_BLOCK_TOKENS}
            none_s = planned(job, cell(card, LINK_GB_PER_S[0]), "none", **memory).makespan_s
            for rate in LINK_GB_PER_S:
                stream, park, auto = (
                    planned(job, cell(card, rate), mode, **memory) for mode in ("stream", "park", "auto")
                )
                best = min(stream, park, key=lambda plan: plan.makespan_s)
                pays = best.makespan_s < PAYS * none_s
                yield {
                    "card": card,
                    "link_gb_per_s": rate,
                    "kv_gib": kv_gib,
                    "mode": best.offload.mode if pays else "none",
                    "change": best.makespan_s / none_s - 1 if pays else 0.0,
                    "change_of_auto": auto.makespan_s / none_s - 1,
                }


def cards() -> Iterator[Figures]:
    """Where cards stand on the map: their link, and the KV that fits together with the weights."""
    for card in LAYER_CARDS:
        profile = find_profile(card)
        budget = memory_budget(SHAPE, profile)
        title = profile.title.replace("NVIDIA ", "").replace("GeForce ", "")
        rate = profile.link.curve[-1].h2d
        yield {"card": card, "title": title, "link_gb_per_s": rate, "kv_gib": budget.kv_bytes / GIB}


def by_batch() -> Iterator[Figures]:
    """Layers moved batch by batch, on every other cell: changes of the makespan against what `auto` picks."""
    for card, memories in KV_GIB.items():
        for kv_gib, rate in itertools.product(memories[::2], LINK_GB_PER_S[::2]):
            job, profile, memory = job_for(kv_gib, 150), cell(card, rate), {"device_memory": kv_gib * GIB}
            auto = planned(job, profile, "auto", **memory)
            changes = {
                conditions: planned(job, profile, "by_batch", conditions=conditions, **memory).makespan_s
                / auto.makespan_s
                - 1
                for conditions in ("corrected", "printed")
            }
            yield {"card": card, "link_gb_per_s": rate, "kv_gib": kv_gib, "auto": auto.offload.mode, **changes}


def pressure(
    cards: Sequence[str] = PRESSED_CARDS, shares: Sequence[float] = SHARES, rows: int = 4 * ROWS_WANTED
) -> Iterator[Figures]:
    """Policies and modes in less and less of the KV memory that a job wants.

    What is computed again is a share of all prompt tokens; what is hidden, of the copies' time, 1 where there are none.
    """
    job = translations(rows)
    wanted_tokens = ROWS_WANTED * float((job.prompt_tokens + job.output_tokens).mean())
    ways = [("vllm", "none"), ("vllm-v0", "none"), *(("vasuki", mode) for mode in ("none", "park", "stream", "auto"))]
    for card, share, (policy, offload) in itertools.product(cards, shares, ways):
        profile, kv_bytes = find_profile(card), int(share * wanted_tokens * SHAPE.kv_bytes_per_token)
        kv = KVConfig.model_validate({"offload": offload, "device_memory": kv_bytes, "host_memory": HOST_BYTES})
        plan = make_plan(job, SHAPE, profile, engine=EngineConfig.model_validate({"policy": policy}), kv=kv)
        run = simulate_plan(plan, job, SHAPE, profile)
        copied_s = run.result.stats.hidden_copy_s + run.result.stats.exposed_copy_s
        yield {
            "card": card,
            "share": share,
            "policy": policy,
            "offload": offload,
            "mode": run.plan.offload.mode,
            "makespan_s": run.result.makespan_s,
            "again": run.recomputed_tokens / float(job.prompt_tokens.sum()),
            "hidden": run.result.stats.hidden_copy_s / copied_s if copied_s else 1.0,
        }


PARTS: dict[str, Callable[[], Iterator[Figures]]] = {
    "layers": layers,
    "ahead": ahead,
    "cards": cards,
    "map": offload_map,
    "by_batch": by_batch,
    "pressure": pressure,
}


def read() -> dict[str, Any]:
    """The stored figures by part, and what else is there."""
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--write", action="store_true", help="into docs/")
    options = parser.parse_args()
    for name in [options.only] if options.only else PARTS:
        rows = rounded(PARTS[name]())
        print(f"{name}\n\n{markdown(rows)}\n", flush=True)
        if options.write:
            found = read() | {name: rows}
            write_rows(found, DATA)
            if name == "map":
                draw_offload_map.draw(rows, found["cards"])


if __name__ == "__main__":
    main()
