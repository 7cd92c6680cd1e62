"""What the comparison of plans says of the hosts that they were made for."""

from __future__ import annotations

import numpy as np

from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths
from vasuki.report.plan_table import plan_verdict


def test_hosts_that_were_measured_are_told_from_those_that_are_assumed() -> None:
    rows = Lengths(np.full(20, 100), np.full(20, 20))
    plans = {name: make_plan(rows, named_shape("qwen2.5-0.5b"), find_profile(name)) for name in ("h100", "h200", "a10")}
    both = " ".join(plan_verdict([plans["h100"], plans["h200"]]).split())
    assert "A step takes 1.1 ms of the host of h200, as measured, and 0.3 ms of that of h100, as assumed" in both
    assert "of the host" not in plan_verdict([plans["h100"], plans["a10"]])
    assert plans["h200"].source.startswith("measured on 2026-11-26")
