"""vasuki runs an offline LLM batch as fast and cheaply as the hardware allows, and predicts time and cost beforehand.

Each room imports only rooms below it in this list:

    commands/     what people type
    runs/         a job becomes a run, or is planned
    report/       what people read about plans and runs
    planner/      what to run, in which order, and what that will take
    simulator/    prices steps: the same loop in virtual time
    hf/           computes steps: transformers models on torch
    io/           tables in, parts out
    machines/     a machine as data, and what a step takes on it
    arrivals/     when rows that arrive start
    engine/       requests to steps: integers only, no model and no price
    models/       a model as data
    base/         what every room stands on: job files, errors, units

`vasuki.api` is the Python interface, whose names are here too; `vasuki.ray` is a step of a Ray Data pipeline.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vasuki import report as report
    from vasuki.api import RunOptions as RunOptions
    from vasuki.api import enrich as enrich
    from vasuki.api import plan as plan
    from vasuki.api import run as run
    from vasuki.api import simulate as simulate

__all__ = ["RunOptions", "enrich", "plan", "report", "run", "simulate"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: `import vasuki` takes no time, and planning no torch."""
    if name == "report":
        return importlib.import_module("vasuki.report")
    if name in __all__:
        return getattr(importlib.import_module("vasuki.api"), name)
    raise AttributeError(f"module 'vasuki' has no attribute {name!r}")
