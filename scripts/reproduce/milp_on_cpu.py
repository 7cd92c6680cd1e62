"""How long the MILP of the Vasuki paper's Appendix A takes on this machine, by HiGHS, for a few prompts.

    python scripts/reproduce/milp_on_cpu.py [--limit-s 20] [--write]

Prompts of 20 to 60 tokens and outputs of 10 to 40 have room for about a third of them at once; no schedule is longer
than some hundred steps. A thousand-token output would have a thousand steps, and as many variables to a prompt.
"""

from __future__ import annotations

import time

import numpy as np
from on_cpu import arguments, tell
from reproduce_table import Figures

from vasuki_solvers import Instance
from vasuki_solvers.milp import milp_schedule

PROMPTS = (4, 6, 8, 12, 16)


def measured(limit_s: float) -> list[Figures]:
    """Seconds until the optimum is proved, for each number of prompts; `proved` is 0 where the limit came first."""
    found: list[Figures] = []
    for count in PROMPTS:
        random = np.random.default_rng(0)
        prompts, outputs = random.integers(20, 60, count), random.integers(10, 40, count)
        capacity = max(int((prompts + outputs).sum()) // 3, int((prompts + outputs).max()))
        instance = Instance(prompts, outputs, capacity)
        start = time.perf_counter()
        schedule = milp_schedule(instance, time_limit_s=limit_s, threads=1, formulation="static", solver="highs")
        seconds = time.perf_counter() - start
        found.append({"prompts": count, "seconds": round(seconds, 2), "proved": int(seconds < limit_s)})
        print(f"{count} prompts: {seconds:.2f} s, {schedule.makespan} steps", flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--limit-s", type=float, default=20.0, help="seconds for each number of prompts")
    options = parser.parse_args()
    found = measured(options.limit_s)
    tell({"milp-on-cpu": found}, options.write)


if __name__ == "__main__":
    main()
