"""A plan on a terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vasuki.base.config import CostConfig, EngineConfig, KVConfig
from vasuki.base.units import duration, money_text, time_text
from vasuki.machines.known_error import DATASHEET
from vasuki.machines.price import Cost
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths, SharedPrefixes
from vasuki.report.plan_table import plan_table, plan_verdict
from vasuki.runs.placement import placed_on
from vasuki.runs.workload import workload_of

LENGTHS = Lengths(np.array([100, 200, 9000]), np.array([50, 20, 10]))


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_is_narrow_and_says_why(width: int) -> None:
    plans = [
        make_plan(
            LENGTHS, named_shape("llama-3-8b"), find_profile(card), kv=KVConfig(device_memory=2**29, offload="none")
        )
        for card in ("a10", "rtx4090", "h100-pcie", "l4")
    ]
    text = plan_table(plans, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.splitlines()[0] == "3 requests: 9,300 prompt tokens, about 80 output tokens"
    for plan in plans:
        assert time_text(plan.makespan_s) in text
        assert plan.gpu in text
    assert text.count("1 can never run: row 2 needs KV memory for 9,049 tokens") == 4
    assert "offload: " in text


def test_a_plan_says_how_far_off_it_may_be() -> None:
    card = find_profile("a10")
    plan = make_plan(LENGTHS, named_shape("llama-3-8b"), card)
    assert plan.range_s == (plan.makespan_s / (1 + DATASHEET), plan.makespan_s * (1 + DATASHEET))
    assert plan.cost_range is not None
    assert plan.cost_range[1] == pytest.approx((plan.cost.amount or 0) * (1 + DATASHEET))
    busy = replace(plan, spread=0.6)
    assert busy.range_s == (plan.makespan_s / 1.6, plan.makespan_s * 1.6)
    capped = Lengths(LENGTHS.prompt_tokens, LENGTHS.output_tokens, None, LENGTHS.output_tokens)
    plan = make_plan(capped, named_shape("llama-3-8b"), card)
    assert plan.outputs_at_most
    assert plan.range_s is not None
    assert plan.range_s[0] == pytest.approx(plan.prompt_share * plan.makespan_s / (1 + DATASHEET))
    assert "at most 80 output tokens" in plan_table([plan])


@settings(max_examples=20, deadline=None)
@given(st.integers(10, 4000), st.integers(1, 400))
def test_prices_of_input_and_output_make_up_the_cost(prompt: int, output: int) -> None:
    lengths = Lengths(np.full(20, prompt), np.full(20, output))
    plan = make_plan(lengths, named_shape("llama-3-8b"), find_profile("a40"))
    of_input, of_output = plan.per_million_input_tokens, plan.per_million_output_tokens
    assert of_input is not None
    assert of_output is not None
    assert 20 * (prompt * of_input + output * of_output) / 1e6 == pytest.approx(plan.cost.amount)
    assert 0 < of_input < of_output  # a decode reads all weights for few tokens
    fields = plan.to_dict()["cost"]
    assert fields["per_million_input_tokens"] == of_input


def test_cards_within_the_error_are_a_draw() -> None:
    plan = make_plan(LENGTHS, named_shape("llama-3-8b"), find_profile("a10"))
    assert "Call it a draw on time and cost:" in plan_verdict(
        [plan, replace(plan, gpu="twin", makespan_s=1.2 * plan.makespan_s)]
    )
    twice = replace(plan, gpu="slow", makespan_s=2 * plan.makespan_s, cost=replace(plan.cost, amount=9.0))
    assert "times as fast" not in plan_verdict([plan, replace(plan, gpu="twin", makespan_s=1.001 * plan.makespan_s)])
    assert "by a factor of 2.00" in " ".join(plan_verdict([plan, twice]).split())


def test_the_host_memory_of_weights_that_wait_there_is_counted() -> None:
    shape = named_shape("llama-3-8b")
    plan = make_plan(LENGTHS, shape, find_profile("a10"), engine=EngineConfig(weights_on_host=4))
    assert plan.host_bytes >= 4 * shape.layer_weight_bytes
    assert make_plan(LENGTHS, shape, find_profile("h100")).host_bytes == 0


def test_the_table_says_what_rows_share() -> None:
    prefixes = SharedPrefixes([np.zeros(0, np.int32), np.arange(96, dtype=np.int32)], np.array([1, 1, 0]))
    plan = make_plan(replace(LENGTHS, prefixes=prefixes), named_shape("llama-3-8b"), find_profile("a10"))
    assert "96 of their tokens (1 %) are shared with other rows" in plan_table([plan])
    assert "shared" not in plan_table([replace(plan, shared_tokens=0)])


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
