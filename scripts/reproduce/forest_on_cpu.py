"""Bandwidth of a link by size of a transfer: by a random forest, as the Vasuki paper has it (5.1), and by our curve.

    python scripts/reproduce/forest_on_cpu.py [--write]

Blocks of random sizes are copied by the mover of a CPU, whose link is memory to memory, alone in each direction. Both
learn from half of the sizes, below the one from which bandwidth changes by less than 10 % with its doubling (the
paper's saturation point), and tell the time of the others. The curve has one point to a doubling, as a profile has, and
is linear in bytes between two of them.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from on_cpu import arguments, tell
from reproduce_table import Figures
from sklearn.ensemble import RandomForestRegressor

from vasuki.hf.kv.kv_mover import ThreadCopyEngine
from vasuki.machines.link import Link, LinkPoint

SMALLEST, LARGEST = 12, 27  # powers of two, bytes
SIZES, TIMES = 160, 15
SATURATED = 0.1  # change of bandwidth from a size to its double


def copy_s(engine: ThreadCopyEngine, num_bytes: int) -> float:
    """The median of some copies of that many bytes."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))

    def copy() -> int:
        target.copy_(source)
        return num_bytes

    seconds = []
    for _ in range(TIMES):
        begun_s = time.perf_counter()
        engine.wait(engine.submit(False, copy, []))
        seconds.append(time.perf_counter() - begun_s)
    return statistics.median(seconds[2:])


def curve_of(points: dict[int, float]) -> Link:
    """A profile's link with these copies."""
    least_s, curve = 0.0, []
    for size, seconds in sorted(points.items()):
        least_s = max(seconds, least_s)
        rate = size / least_s / 1e9
        curve.append(LinkPoint(bytes=size, h2d=rate, d2h=rate, both=rate))
    return Link(kind="memory to memory", curve=tuple(curve), source="measured just now")


def measured() -> list[Figures]:
    """Quartiles of the relative errors of both, over the sizes that neither has seen."""
    engine, random = ThreadCopyEngine(), np.random.default_rng(0)
    points = {2**power: copy_s(engine, 2**power) for power in range(SMALLEST, LARGEST + 1)}
    rates = np.array([size / seconds for size, seconds in points.items()])
    changes = np.abs(np.diff(rates) / rates[:-1])
    steady = [index for index in range(len(changes)) if (changes[index:] < SATURATED).all()]
    saturated = list(points)[steady[0] if steady else -1]
    print(f"saturated from {saturated / 2**20:.2f} MiB on, at {rates[-1] / 1e9:.1f} GB/s")
    sizes = np.exp2(random.uniform(SMALLEST, np.log2(saturated), SIZES)).astype(int)
    seconds = np.array([copy_s(engine, int(size)) for size in sizes])
    learned = np.arange(SIZES) % 2 == 0
    forest = RandomForestRegressor(random_state=0).fit(sizes[learned, None], (sizes / seconds)[learned])
    told = {
        "forest": sizes[~learned] / forest.predict(sizes[~learned, None]),
        "curve": np.array([curve_of(points).copy_s(float(size), "h2d") for size in sizes[~learned]]),
    }
    errors = {name: np.abs(by / seconds[~learned] - 1) for name, by in told.items()}
    quartiles = {"median": 0.5, "third quartile": 0.75}
    return [
        {"quartile": name, **{by: round(float(np.quantile(each, share)), 4) for by, each in errors.items()}}
        for name, share in quartiles.items()
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    tell({"forest-on-cpu": measured()}, options.write)


if __name__ == "__main__":
    main()
