"""Plans of models whose rows keep a state in addition to their KV."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hybrid import HYBRID

from vasuki.base.config import EngineConfig, KVConfig, PlanConfig
from vasuki.base.errors import ModelError
from vasuki.base.units import bytes_text
from vasuki.machines.memory_budget import memory_budget
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths, SharedPrefixes
from vasuki.planner.plan import Plan
from vasuki.planner.simulated import simulate_plan
from vasuki.report.plan_table import plan_table

CARD = find_profile("a40")
GIB = 2**30


def lengths_of(rows: int, prompt: int = 200, output: int = 300, limit: int = 300) -> Lengths:
    return Lengths(np.full(rows, prompt), np.full(rows, output), None, np.full(rows, limit))


def planned(lengths: Lengths, kv_bytes: int = 3 * GIB, **engine: object) -> Plan:
    return make_plan(lengths, HYBRID, CARD, engine=EngineConfig(**engine), kv=KVConfig(device_memory=kv_bytes))


def test_states_and_blocks_fill_the_memory() -> None:
    plan = planned(lengths_of(300))
    states = plan.max_num_seqs * HYBRID.state_bytes
    assert (
        3 * GIB - 64 * HYBRID.kv_bytes_per_token
        < states + plan.settings.kv_tokens * HYBRID.kv_bytes_per_token
        <= 3 * GIB
    )
    assert 0.6 < states / (3 * GIB) < 0.95
    assert plan.offload.mode == "none"
    text = plan_table([plan])
    assert f"memory for states {bytes_text(states)}" in " ".join(text.split())


def test_the_longest_row_fits_beside_the_states() -> None:
    """Rows are expected to be short, and may become long; or one of them is."""
    plan = planned(lengths_of(300, limit=32_000))
    assert plan.misfits == 0
    assert plan.settings.kv_tokens >= 32_200
    prompts = np.full(300, 200)
    prompts[7] = 30_000
    limits = np.full(300, 300)
    plan = planned(Lengths(prompts, limits, None, limits))
    assert plan.misfits == 0


def test_more_rows_than_usually_fit_where_states_are_small() -> None:
    lengths = lengths_of(1500)
    tiny = shape_from_config(
        dict(model_type="lfm2", vocab_size=65536, hidden_size=2048, block_ff_dim=12288, num_hidden_layers=16,
             num_attention_heads=32, num_key_value_heads=8, conv_L_cache=3, full_attn_idxs=[2, 5, 8, 11, 14])
    )  # fmt: skip
    plan = make_plan(lengths, tiny, CARD, kv=KVConfig(device_memory=GIB // 2))
    held = 350  # tokens of a row, on average
    assert plan.max_num_seqs > 1.3 * plan.settings.kv_tokens / held


def test_too_many_states_are_named() -> None:
    with pytest.raises(
        ModelError, match=r"states of 256 rows .* 3\.0 GiB for them and KV; engine.max_num_seqs may be 6\d"
    ):
        planned(lengths_of(300), max_num_seqs=256)
    assert planned(lengths_of(300), max_num_seqs=61).max_num_seqs == 61


def test_other_policies_run_as_many_rows_as_states_fit() -> None:
    plan = planned(lengths_of(300), policy="vllm")
    assert 1 < plan.max_num_seqs < 100


@pytest.mark.parametrize("output", [50, 1500])
def test_no_plan_beats_the_bound(output: int) -> None:
    lengths = lengths_of(200, output=output, limit=output)
    plan = planned(lengths)
    simulated = simulate_plan(plan, lengths, HYBRID, CARD)
    assert plan.lower_bound_s <= simulated.result.makespan_s == pytest.approx(plan.makespan_s)


def test_devices_share_states_as_they_share_kv() -> None:
    one = memory_budget(HYBRID, find_profile("a100"), max_num_seqs=100)
    two = memory_budget(HYBRID, find_profile("a100"), max_num_seqs=100, layout=Layout(tensor_parallel=2))
    assert one.state_bytes == 100 * HYBRID.state_bytes == 2 * two.state_bytes


def test_memory_is_one_for_both() -> None:
    share = make_plan(lengths_of(300), HYBRID, CARD, kv=KVConfig(device_memory=0.9))
    states = share.max_num_seqs * HYBRID.state_bytes
    used = HYBRID.weight_bytes + states + share.settings.kv_tokens * HYBRID.kv_bytes_per_token
    assert used < 0.9 * CARD.memory_bytes


@pytest.mark.parametrize("policy", ["vllm", "sarathi"])
def test_other_policies_too_run_no_more_rows_computed_alone_than_keep_their_caches(policy: str) -> None:
    shape = replace(named_shape("llama-3-8b"), backend="alone", kept_bytes=GIB // 4)
    kv = KVConfig(device_memory=3 * GIB)
    plan = make_plan(lengths_of(300), shape, CARD, engine=EngineConfig.model_validate({"policy": policy}), kv=kv)
    assert 1 <= plan.max_num_seqs < 12


def test_rows_with_states_share_nothing_in_a_simulation_either() -> None:
    """Nor do rows whose prompts begin alike stand together."""
    random = np.random.default_rng(0)
    ids = [np.zeros(0, np.int32), *(np.full(800, group, np.int32) for group in range(20))]
    prompts, outputs = random.integers(801, 1500, 120), random.integers(1, 40, 120)
    lengths = Lengths(prompts, outputs, prefixes=SharedPrefixes(ids, random.integers(0, 21, 120)))
    plan = make_plan(lengths, HYBRID, CARD, plan=PlanConfig(solver="greedy"), kv=KVConfig(device_memory=GIB))
    assert simulate_plan(plan, lengths, HYBRID, CARD).result.makespan_s == pytest.approx(plan.makespan_s, rel=1e-12)


def test_a_limit_of_kv_is_none_of_what_padded_rows_need_beside_it() -> None:
    """One long row makes all rectangles wide, and the device has room for many."""
    padded = replace(named_shape("qwen2.5-0.5b"), backend="padded")
    lengths = Lengths(np.array([6500, *[200] * 150]), np.full(151, 60))
    few = make_plan(lengths, padded, CARD, kv=KVConfig(device_memory=300 * 2**20))
    assert few.max_num_seqs > 60
    small = make_plan(lengths, padded, CARD, kv=KVConfig(device_memory=18 * GIB))
    assert 1 <= small.max_num_seqs < few.max_num_seqs
