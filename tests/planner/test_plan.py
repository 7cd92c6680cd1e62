"""A plan on a terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vasuki.base.config import CostConfig, KVConfig
from vasuki.base.units import duration, money_text, time_text
from vasuki.commands.this_machine import placed_on
from vasuki.commands.workload import workload_of
from vasuki.machines.price import Cost
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths, Prefixes
from vasuki.report.plan_table import plan_table

LENGTHS = Lengths(np.array([100, 200, 9000]), np.array([50, 20, 10]))


def test_the_table_is_narrow_and_says_why() -> None:
    plans = [
        make_plan(LENGTHS, named_shape("llama-3-8b"), find_profile(card), kv=KVConfig(device_memory=2**29))
        for card in ("a10", "rtx4090", "h100-pcie")
    ]
    text = plan_table(plans)
    assert max(map(len, text.splitlines())) <= 100
    assert text.splitlines()[0].startswith("GPU")
    for plan in plans:
        assert time_text(plan.makespan_s) in text
        assert f"{plan.gpu}, vasuki:" in text
    assert text.count("1 can never run: row 2 needs KV memory for 9,049 tokens") == 3
    assert "offload none: " in text


def test_the_table_says_what_rows_share() -> None:
    prefixes = Prefixes([np.zeros(0, np.int32), np.arange(96, dtype=np.int32)], np.array([1, 1, 0]))
    plan = make_plan(replace(LENGTHS, prefixes=prefixes), named_shape("llama-3-8b"), find_profile("a10"))
    assert "96 of the prompt tokens (1%) are shared with rows that begin alike" in plan_table([plan])
    assert "begin alike" not in plan_table([replace(plan, shared_tokens=0)])


def test_a_price_that_is_not_known_is_a_dash() -> None:
    cost = Cost.of(3600, 2, None, "USD", 1000)
    assert cost.gpu_hours == 2
    assert cost.amount is None
    assert cost.to_dict()["per_million_tokens"] is None
    priced = Cost.of(3600, 2, 1.5, "USD", 1_000_000)
    assert priced.amount == priced.per_million_tokens == 3.0
    assert priced.price_per_hour == 1.5
    profile = find_profile("a10")
    plan = make_plan(LENGTHS.take(np.array([0])), named_shape("llama-3-8b"), profile, cost=CostConfig())
    assert plan.cost.price_per_hour == pytest.approx(profile.price.per_hour)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (245, "4 min 05 s"), (7620, "2 h 07 min")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_money_reads_well() -> None:
    assert [money_text(None), money_text(0.01234, "USD"), money_text(12.4)] == ["-", "0.0123 USD", "12.40"]


@pytest.mark.parametrize(
    ("gpu", "asked", "computed"),
    [("cpu", "auto", "float32"), ("cpu", "bfloat16", "bfloat16"), ("a10", "auto", "bfloat16")],
)
def test_a_cpu_without_bfloat16_instructions_is_planned_in_float32(
    tmp_path: Path, gpu: str, asked: str, computed: str
) -> None:
    """As the run computes there, unless the job says otherwise."""
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n100,20\n")
    workload = workload_of(str(lengths), ("model.shape=llama-3-8b", f"model.dtype={asked}"))
    assert placed_on(workload.config, workload.shape, find_profile(gpu)).shape.dtype == computed
