"""Plans: choices by price, predictions against whole simulations, and what is said of rows that never fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vasuki.base.config import CostConfig, EngineConfig, KVConfig, PlanConfig
from vasuki.base.errors import InputError, JobFileError, ModelError
from vasuki.engine.policy import Mixing
from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.named import named_shape
from vasuki.planner import make_plan, one_device, search, whole_job
from vasuki.planner.lengths import Lengths, SharedPrefixes
from vasuki.planner.plan import Plan
from vasuki.planner.prediction import sample_rows
from vasuki.planner.simulated import simulate_plan
from vasuki.planner.steady_state import MeanRow, steady_state

LLAMA = named_shape("llama-3-8b")
SMALL = replace(LLAMA, num_layers=8)
A10 = find_profile("a10")
LINE = 160  # characters of a reason


def lengths_of(rows: int, prompt: float = 800, output: float = 120, seed: int = 0) -> Lengths:
    random = np.random.default_rng(seed)
    prompts = np.clip(random.lognormal(np.log(prompt), 0.5, rows), 1, 3000).astype(np.int64)
    outputs = np.clip(random.lognormal(np.log(output), 0.5, rows), 1, 1000).astype(np.int64)
    return Lengths(prompts, outputs)


def with_link(gb_per_s: float, card: HardwareProfile = A10) -> HardwareProfile:
    """A card behind another link."""
    tree = card.model_dump()
    for point in tree["link"]["curve"]:
        point |= {"h2d": gb_per_s, "d2h": gb_per_s, "both": gb_per_s}
    return HardwareProfile.model_validate(tree)


def simulated_s(plan: Plan, lengths: Lengths) -> float:
    return simulate_plan(plan, lengths, LLAMA, A10).result.makespan_s


def test_a_plan_has_the_fields_that_users_rely_on() -> None:
    lengths = lengths_of(60)
    plan = make_plan(lengths, LLAMA, A10, cost=CostConfig(price_per_hour=3.6, currency="EUR"))
    fields = plan.to_dict()
    assert list(fields) == [
        *("gpu", "requests", "prompt_tokens", "output_tokens_estimate", "shared_tokens", "makespan_s", "range_s"),
        "predicted_from",
        "lower_bound_s",
        *(
            "schedule_bound_s",
            "gap",
            "at_risk_s",
            "at_risk_most_s",
            "source",
            "solver",
            "optimal",
            "order_gap",
            "policy",
            "chunk_tokens",
            "max_num_seqs",
            "offload",
            "cost",
            "host_bytes",
            "backend",
            "one_replica_s",
            "uncertainty",
        ),
        "plan_s",
    ]
    assert fields["requests"] == 60
    assert fields["prompt_tokens"] == lengths.prompt_tokens.sum()
    assert 0 < fields["lower_bound_s"] < fields["schedule_bound_s"] < fields["makespan_s"]
    assert fields["gap"] == pytest.approx(fields["makespan_s"] / fields["schedule_bound_s"] - 1)
    assert set(fields["offload"]) == {"mode", "layers", "reason", "weights_on_host"}
    assert fields["cost"]["currency"] == "EUR"
    assert fields["cost"]["amount"] == pytest.approx(fields["makespan_s"] * 0.001)
    tokens = int((lengths.prompt_tokens + lengths.output_tokens).sum())
    assert fields["cost"]["per_million_tokens"] == pytest.approx(fields["cost"]["amount"] / tokens * 1e6)
    assert fields["cost"]["gpu_hours"] == pytest.approx(fields["makespan_s"] / 3600)
    assert fields["plan_s"] > 0


def test_a_small_job_is_predicted_to_the_last_digit() -> None:
    lengths = lengths_of(80)
    plan = make_plan(lengths, LLAMA, A10)
    assert plan.simulated_requests == 80
    assert plan.makespan_s == simulated_s(plan, lengths)
    again = make_plan(lengths, LLAMA, A10)
    assert replace(again, plan_s=0.0) == replace(plan, plan_s=0.0)


@pytest.mark.parametrize(("prompt", "output"), [(1500, 60), (300, 150)])
def test_a_large_job_is_predicted_from_a_sample(monkeypatch: pytest.MonkeyPatch, prompt: float, output: float) -> None:
    monkeypatch.setattr(whole_job, "MOST_S", 0.4)
    lengths = lengths_of(4000, prompt, output)
    plan = make_plan(lengths, LLAMA, A10)
    assert 500 < plan.simulated_requests < 3000
    # Lengths that are not known make samples noisy: the spread is two standard deviations, of a single pair of halves.
    assert plan.makespan_s == pytest.approx(simulated_s(plan, lengths), rel=max(0.03, 1.5 * plan.sample_spread))
    assert 0.03 < plan.sample_spread < 0.06
    assert plan.to_dict()["predicted_from"] == {"rows": plan.simulated_requests, "spread": plan.sample_spread}
    assert plan.range_s is not None
    assert plan.range_s[1] == pytest.approx(plan.makespan_s * (1 + plan.error) * (1 + plan.sample_spread))


def test_a_job_is_simulated_whole_where_that_takes_little_of_its_time() -> None:
    """A sample of long outputs does not fill memory as all rows do."""
    random = np.random.default_rng(3)
    outputs = np.clip(random.lognormal(np.log(1500), 0.5, 600), 1, 4000).astype(np.int64)
    lengths = Lengths(np.clip(random.lognormal(4.1, 0.5, 600), 1, 500).astype(np.int64), outputs)
    plan = make_plan(lengths, LLAMA, A10)
    assert plan.simulated_requests == 600
    assert plan.makespan_s == simulated_s(plan, lengths)
    assert plan.sample_spread == 0
    assert plan.gap > 0.02


def test_rows_that_arrive_are_predicted_as_they_do() -> None:
    rows = replace(lengths_of(60), arrived_at_s=np.linspace(0.0, 177.0, 60))
    plan = make_plan(rows, LLAMA, A10)
    assert plan.makespan_s == simulated_s(plan, rows) > 177


def test_a_sample_tells_never_less_than_the_bound_and_how_far_its_halves_differ() -> None:
    """Of jobs that take a second a row, and more at their start and end."""
    lengths = lengths_of(1000)

    def least_s(rows: Lengths) -> float:
        return 0.9 * len(rows)

    even = whole_job.told_from(lengths, 100, lambda rows: 10 + len(rows), least_s)
    assert [even.makespan_s, even.rows, even.spread] == pytest.approx([1010, 100, 0.054])
    late = whole_job.told_from(lengths, 100, lambda rows: 10 + len(rows) + rows.prompt_tokens.max() / 50, least_s)
    assert late.spread > even.spread
    falling = whole_job.told_from(lengths, 100, lambda rows: 100.0 + (len(rows) == 50) * 50, least_s)
    assert falling.makespan_s == pytest.approx(900 + 100 - 90)


def test_a_sample_has_the_means_of_the_job() -> None:
    lengths = lengths_of(5000)
    rows = sample_rows(lengths, 400)
    assert len(set(rows.tolist())) == 400
    sample = lengths.take(rows)
    assert sample.prompt_tokens.mean() == pytest.approx(lengths.prompt_tokens.mean(), rel=0.05)
    assert sample.output_tokens.mean() == pytest.approx(lengths.output_tokens.mean(), rel=0.05)


def test_steps_are_whole_tiles_and_small_where_decodes_rule() -> None:
    prefill = make_plan(lengths_of(1500, 1500, 10), LLAMA, A10)
    decode = make_plan(lengths_of(1500, 60, 300), LLAMA, A10)
    assert prefill.chunk_tokens % A10.tile_rows == decode.chunk_tokens % A10.tile_rows == 0
    assert prefill.chunk_tokens > decode.chunk_tokens
    assert prefill.mixing.startswith("mixed")
    assert "% slower" in prefill.mixing


def test_vasuki_is_not_slower_than_what_it_is_compared_with() -> None:
    """In a single small job of unknown lengths it is luck when the longest row starts; over several jobs it is not."""
    for prompt, output in ((900, 150), (200, 300)):
        jobs = [lengths_of(200, prompt, output, seed) for seed in range(3)]

        def total_s(policy: str, jobs: list[Lengths] = jobs) -> float:
            engine = EngineConfig(policy=policy)
            plans = [make_plan(job, LLAMA, A10, engine=engine) for job in jobs]
            assert policy == "vasuki" or all(plan.offload.mode == "none" for plan in plans)
            return sum(plan.makespan_s for plan in plans)

        vasuki_s = total_s("vasuki")
        for policy in ("sarathi", "vllm", "vllm-v0", "orca", "static", "static-sorted"):
            assert vasuki_s < total_s(policy), policy


def test_what_is_given_is_kept() -> None:
    engine = EngineConfig(chunk_tokens=192, max_num_seqs=5)
    plan = make_plan(
        lengths_of(30), LLAMA, A10, engine=engine, kv=KVConfig(block_tokens=8), plan=PlanConfig(solver="fifo")
    )
    assert (plan.chunk_tokens, plan.max_num_seqs, plan.settings.block_tokens) == (192, 5, 8)
    assert plan.solver == "fifo"
    fewer = make_plan(lengths_of(30), LLAMA, A10, kv=KVConfig(offload="none", device_memory=2**30))
    assert fewer.settings.kv_tokens == 2**30 // LLAMA.kv_bytes_per_token


def test_known_lengths_are_worth_something() -> None:
    lengths = lengths_of(200, 300, 200)
    known = make_plan(replace(lengths, known=True), LLAMA, A10)
    learned = make_plan(lengths, LLAMA, A10)
    assert known.makespan_s < learned.makespan_s
    assert known.lower_bound_s == learned.lower_bound_s
    assert known.schedule_bound_s == learned.schedule_bound_s


def test_optimal_is_said_only_of_what_was_proved() -> None:
    few = Lengths(np.full(6, 50), np.array([40, 30, 30, 20, 10, 10]), known=True)
    plan = make_plan(few, LLAMA, A10)
    assert plan.solver == "greedy", "it meets the bound, so that nothing is left to find"
    assert plan.optimal
    assert simulate_plan(plan, few, LLAMA, A10).result.stats.steps == 40
    assert not make_plan(replace(few, known=False), LLAMA, A10).optimal, "lengths are not known"
    assert not make_plan(replace(lengths_of(100), known=True), LLAMA, A10).optimal


# --- shared prefixes --------------------------------------------------------------------------------------------------


def templated(rows: int, groups: int = 3, shared: int = 1000, seed: int = 0) -> Lengths:
    """Rows that begin, one after the other, with one of some templates."""
    own = lengths_of(rows, 100, 100, seed)
    templates = [np.zeros(0, np.int32), *(np.full(shared, group, np.int32) for group in range(groups))]
    prefixes = SharedPrefixes(templates, 1 + np.arange(rows) % groups)
    return replace(own, prompt_tokens=own.prompt_tokens + shared, prefixes=prefixes)


@pytest.mark.parametrize("rows", [200, 4000])
def test_what_rows_share_is_computed_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(whole_job, "MOST_S", 0.4)
    lengths = templated(rows)
    plan = make_plan(lengths, LLAMA, A10)
    simulated = simulate_plan(plan, lengths, LLAMA, A10).result
    assert plan.makespan_s == pytest.approx(simulated.makespan_s, rel=0.06)
    assert plan.shared_tokens == pytest.approx(simulated.counters.shared_tokens, rel=0.02)
    assert plan.shared_tokens == plan.to_dict()["shared_tokens"] > 0.95 * rows * 992
    assert (plan.simulated_requests == rows) == (rows == 200)
    apart = make_plan(replace(lengths, prefixes=None), LLAMA, A10)
    assert apart.shared_tokens == 0
    assert plan.lower_bound_s < plan.makespan_s < 0.6 * apart.makespan_s


def test_only_vasuki_shares() -> None:
    assert make_plan(templated(50), LLAMA, A10, engine=EngineConfig(policy="sarathi")).shared_tokens == 0


# --- weights on the host ----------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_come_from_the_host() -> None:
    lengths, a100, large = lengths_of(60), find_profile("a100"), named_shape("llama-3-70b")
    with pytest.raises(ModelError, match=r"or \d+\.\d GiB of its weights on the host, see kv.host_memory"):
        make_plan(lengths, large, a100)
    plan = make_plan(lengths, large, a100, kv=KVConfig(host_memory=200 * 2**30))
    layers = plan.layout.host_layers
    assert 40 < layers < 80
    assert plan.to_dict()["offload"]["weights_on_host"] == layers
    assert f"the weights of {layers} of 80 layers stay on the host, since 131.4 GiB" in plan.offload.reason
    assert len(plan.offload.reason) <= LINE
    assert plan.makespan_s == simulate_plan(plan, lengths, large, a100).result.makespan_s
    fetch_s = a100.link.transfer_s(layers * large.layer_weight_bytes, 0, large.layer_weight_bytes)
    assert plan.makespan_s > 0.9 * fetch_s * 100, "every step fetches them"
    longer = make_plan(lengths, large, with_link(200, a100), kv=KVConfig(host_memory=200 * 2**30))
    assert longer.makespan_s < plan.makespan_s / 2


def test_as_many_weights_go_to_the_host_as_the_job_says() -> None:
    lengths = lengths_of(30)
    plain = make_plan(lengths, LLAMA, A10)
    assert plain.layout.host_layers == 0
    plan = make_plan(lengths, LLAMA, A10, engine=EngineConfig(weights_on_host=12))
    assert plan.layout.host_layers == 12
    assert "12 of 32 layers stay on the host, as the job asks" in plan.offload.reason
    roomier = (plan.settings.kv_tokens - plain.settings.kv_tokens) * LLAMA.kv_bytes_per_token
    assert roomier == pytest.approx(10 * LLAMA.layer_weight_bytes, rel=0.05)  # two of them pass through buffers
    with pytest.raises(JobFileError, match=r"20 layers need 8\.1 GiB of host memory, kv.host_memory allows 8\.0 GiB"):
        make_plan(lengths, LLAMA, A10, engine=EngineConfig(weights_on_host=20))
    with pytest.raises(ModelError, match="at least one stays on the device"):
        make_plan(lengths, LLAMA, A10, engine=EngineConfig(weights_on_host=32))
    with pytest.raises(ModelError, match=r"or a smaller model$"):  # both tiers of a CPU are the same memory
        make_plan(lengths, LLAMA, find_profile("cpu"))


def test_kv_streams_beside_weights_that_keep_the_link_busy() -> None:
    """A step of several times as many rows takes little longer, though it lets a kill lose several times as much."""
    lengths, large = Lengths(np.full(60, 900), np.full(60, 400)), named_shape("llama-3-70b")
    plan, none = (
        make_plan(lengths, large, A10, kv=KVConfig.model_validate({"host_memory": 400 * 2**30, "offload": offload}))
        for offload in ("auto", "none")
    )
    assert plan.offload.mode == "stream"
    assert plan.layout.host_layers > 70
    assert plan.schedule_bound_s < plan.makespan_s < none.makespan_s / 2
    assert plan.makespan_s == simulate_plan(plan, lengths, large, A10).result.makespan_s


@pytest.mark.parametrize("mode", ["stream", "park"])
def test_weights_and_kv_share_the_link(mode: str) -> None:
    lengths = lengths_of(200, 300, 600)
    kv = KVConfig(offload=mode, device_memory=2**31, host_memory=64 * 2**30)
    engine, card = EngineConfig(weights_on_host=4), with_link(400)
    both = make_plan(lengths, LLAMA, card, kv=kv, engine=engine)
    assert (both.offload.mode, both.layout.host_layers) == (mode, 4)
    alone = make_plan(lengths, LLAMA, card, kv=kv)
    assert both.offload.streamed_layers <= alone.offload.streamed_layers
    assert (both.offload.host_blocks > 0) == (alone.offload.host_blocks > 0) == (mode == "park")
    assert both.offload.host_blocks <= alone.offload.host_blocks


# --- offload ----------------------------------------------------------------------------------------------------------


def test_parking_is_taken_where_moving_is_cheaper_than_computing() -> None:
    lengths = Lengths(np.full(120, 500), np.full(120, 400))
    memory = KVConfig(device_memory=2**31, offload="park")
    plan = make_plan(lengths, LLAMA, A10, kv=memory)
    assert plan.offload.mode == "park"
    assert plan.offload.host_blocks > 0
    assert plan.offload.park_min_tokens > 0
    assert "cheaper than computing them again" in plan.offload.reason
    slow = make_plan(lengths, LLAMA, with_link(0.05), kv=memory)
    assert (slow.offload.mode, slow.offload.park_min_tokens) == ("park", 1)
    assert "are parked, as the job asks" in slow.offload.reason
    by_price = make_plan(lengths, LLAMA, with_link(0.05), kv=memory.model_copy(update={"offload": "auto"}))
    assert by_price.offload.mode == "none"
    assert plan.makespan_s <= by_price.makespan_s < slow.makespan_s
    assert max(len(plan.offload.reason), len(slow.offload.reason)) <= LINE


def test_streaming_is_taken_on_a_fast_link_only() -> None:
    lengths = lengths_of(300, 300, 600)
    memory = KVConfig(device_memory=2**31, host_memory=64 * 2**30)
    fast = make_plan(lengths, LLAMA, with_link(400), kv=memory)
    assert fast.offload.mode == "stream"
    assert fast.to_dict()["offload"]["layers"] == fast.offload.streamed_layers > 0
    none = make_plan(lengths, LLAMA, with_link(400), kv=memory.model_copy(update={"offload": "none"}))
    assert fast.makespan_s < none.makespan_s
    assert fast.settings.kv_tokens > none.settings.kv_tokens
    slow = make_plan(lengths, LLAMA, with_link(1), kv=memory)
    assert slow.offload.mode != "stream"
    assert none.offload.reason == "as the job asks"
    assert max(len(fast.offload.reason), len(slow.offload.reason)) <= LINE


def test_streamed_copies_hide() -> None:
    """As many rows as memory has room for would have to wait for their copies, and end hardly earlier."""
    lengths, card = lengths_of(240, 110, 140), find_profile("gh200")
    kv = KVConfig(device_memory=350 * 2**20, host_memory=64 * 2**30)
    for asked in ("stream", "auto"):
        plan = make_plan(lengths, LLAMA, card, kv=kv.model_copy(update={"offload": asked}))
        stats = simulate_plan(plan, lengths, LLAMA, card).result.stats
        assert plan.offload.mode == "stream"
        assert stats.hidden_copy_s >= 0.9 * (stats.hidden_copy_s + stats.exposed_copy_s)


def test_streamed_blocks_are_large_unless_the_job_says_otherwise() -> None:
    """A copy is a block of a layer: of 16 tokens it reaches half of what PCIe can do. Larger ones have emptier ends."""
    lengths = lengths_of(300, 110, 140)
    kv = KVConfig(device_memory=2**29, host_memory=64 * 2**30)
    plan = make_plan(lengths, LLAMA, A10, kv=kv)
    assert plan.offload.mode == "stream"
    assert plan.settings.block_tokens > 16
    assert plan.settings.kv_tokens * LLAMA.kv_bytes_per_token > 2**29
    small = make_plan(lengths, LLAMA, A10, kv=kv.model_copy(update={"block_tokens": 16}))
    assert small.settings.block_tokens == 16
    assert plan.makespan_s < small.makespan_s


def test_prompts_are_computed_ahead_where_the_job_asks_for_it() -> None:
    """Two waves of long prompts: prompts of the second one are computed while the first has yet to grow."""
    rows = Lengths(np.full(34, 2000), np.full(34, 400), known=True)
    plan = make_plan(rows, LLAMA, A10, kv=KVConfig(offload="ahead"))
    assert plan.offload.mode == "ahead"
    assert plan.offload.prefills_ahead
    assert "prompts are computed ahead" in plan.offload.reason
    assert len(plan.offload.reason) <= LINE
    auto = make_plan(rows, LLAMA, A10)
    assert not auto.offload.prefills_ahead
    pinned_s = plan.host_bytes / 2**30 * A10.overheads.pinning_s_per_gib
    assert plan.makespan_s - pinned_s < auto.makespan_s < plan.makespan_s
    run = simulate_plan(plan, rows, LLAMA, A10)
    assert run.to_dict()["kv"]["prefilled_ahead"] > 9
    assert run.result.makespan_s == plan.makespan_s


def test_a_cpu_moves_nothing_by_itself() -> None:
    """Both tiers are the same memory there."""
    lengths, card = Lengths(np.full(120, 500), np.full(120, 400)), find_profile("cpu")
    card = card.model_copy(update={"memory_mib": 64 * 1024})
    memory = KVConfig(device_memory=2**31)
    assert make_plan(lengths, LLAMA, card, kv=memory).offload.mode == "none"
    asked = make_plan(lengths, LLAMA, card, kv=memory.model_copy(update={"offload": "stream"}))
    assert asked.offload.mode == "stream"


def test_forced_modes_are_obeyed_where_they_are_possible() -> None:
    lengths = lengths_of(40)
    parked = make_plan(lengths, LLAMA, A10, kv=KVConfig(offload="park"))
    assert parked.offload.mode == "park"
    streamed = make_plan(lengths, LLAMA, with_link(400), kv=KVConfig(offload="stream", host_memory=64 * 2**30))
    assert streamed.offload.mode == "stream"
    ahead = make_plan(lengths, LLAMA, A10, kv=KVConfig(offload="ahead"))
    assert ahead.offload.mode == "ahead"
    assert ahead.offload.host_blocks > 0
    for mode in ("stream", "park", "ahead"):
        with pytest.raises(JobFileError, match=rf"kv.offload: {mode} cannot be done: .*kv\.host_memory"):
            make_plan(lengths, LLAMA, A10, kv=KVConfig(offload=mode, host_memory=0))


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_a_row_that_fits_once_layers_are_streamed_can_run() -> None:
    """None of the layouts without offload has room for the last row."""
    lengths = Lengths(np.array([200] * 40 + [3300]), np.full(41, 200))
    memory = KVConfig(device_memory=400 * 2**20)
    plan = make_plan(lengths, LLAMA, A10, kv=memory)
    assert (plan.misfits, plan.misfit) == (0, "")
    assert plan.offload.mode == "stream"
    assert plan.offload.reason.endswith("which the longest row needs")
    run = simulate_plan(plan, lengths, LLAMA, A10).result
    assert (run.written.failed, run.makespan_s) == (0, plan.makespan_s)
    for mode in ("none", "park", "ahead"):
        without = make_plan(lengths, LLAMA, A10, kv=memory.model_copy(update={"offload": mode}))
        assert without.misfits == 1, mode
        assert "has room for 3,200" in without.misfit
        assert simulate_plan(without, lengths, LLAMA, A10).result.written.failed == 1


def test_what_no_layout_has_room_for_is_left_out_by_the_roomiest() -> None:
    lengths = Lengths(np.array([200] * 40 + [3300, 90_000]), np.full(42, 200))
    plan = make_plan(lengths, LLAMA, A10, kv=KVConfig(device_memory=400 * 2**20))
    assert plan.misfits == 1
    assert plan.misfit.startswith("row 41 needs KV memory for 90,199 tokens")
    assert simulate_plan(plan, lengths, LLAMA, A10).result.written.failed == 1


def test_requests_that_never_fit_are_named_with_what_they_need() -> None:
    lengths = Lengths(np.array([100, 9000, 100, 8000]), np.array([20, 20, 20, 20]))
    memory = KVConfig(device_memory=2**29, offload="none")
    plan = make_plan(lengths, LLAMA, A10, kv=memory)
    assert plan.misfits == 2
    assert "row 1 needs KV memory for 9,019 tokens" in plan.misfit
    assert "has room for 4,096" in plan.misfit
    assert plan.requests == 4
    fitting = make_plan(lengths.take(np.array([0, 2])), LLAMA, A10, kv=memory)
    assert (plan.chunk_tokens, plan.makespan_s) == (fitting.chunk_tokens, fitting.makespan_s), (
        "planned by those that fit"
    )
    with pytest.raises(InputError, match="no request fits: row 0 needs KV memory for 9,019 tokens"):
        make_plan(lengths.take(np.array([1])), LLAMA, A10, kv=memory)


def test_a_row_that_has_no_room_beside_the_batch_of_those_that_fit_is_left_out_too() -> None:
    """Without the longest row the others are short: more of them run side by side, whose logits take up KV memory."""
    prompts, outputs = np.array([10] * 900 + [40_000, 100_000]), np.array([10] * 900 + [1, 20_000])
    plan = make_plan(Lengths(prompts, outputs, None, outputs), LLAMA, A10, kv=KVConfig(offload="none"))
    assert plan.misfits == 2
    assert "row 901 needs KV memory for 119,999 tokens" in plan.misfit


def test_a_model_that_is_too_large_is_refused() -> None:
    with pytest.raises(ModelError, match="what would fit"):
        make_plan(lengths_of(5), named_shape("llama-3-70b"), A10)


def test_cpu_profiles_are_planned_too() -> None:
    plan = make_plan(lengths_of(30, 50, 20), named_shape("llama-3.2-1b"), find_profile("cpu"))
    assert plan.makespan_s > plan.lower_bound_s > 0
    assert plan.chunk_tokens % find_profile("cpu").tile_rows == 0


def test_no_more_rows_run_than_end_with_the_longest() -> None:
    """Memory holds all 64 at once, but then the longest goes on in tiny batches."""
    lengths, card = Lengths(np.full(64, 100), np.array([400] * 4 + [140] * 60), known=True), find_profile("cpu")
    plan = make_plan(lengths, SMALL, card)
    assert plan.max_num_seqs < 64
    all_at_once = make_plan(lengths, SMALL, card, engine=EngineConfig(max_num_seqs=64))
    assert plan.makespan_s < all_at_once.makespan_s


def test_fewer_rows_run_only_where_that_saves_more_than_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, card = Lengths(np.full(64, 100), np.array([400] * 8 + [250] * 56), known=True), find_profile("cpu")
    monkeypatch.setattr(one_device, "searched", lambda problem, base, *_: base)
    plan = make_plan(lengths, SMALL, card)
    monkeypatch.setattr(one_device, "NOISE", 0.0)
    fewer = make_plan(lengths, SMALL, card)
    assert fewer.max_num_seqs < 64 <= plan.max_num_seqs
    assert 0.98 * plan.makespan_s < fewer.makespan_s < plan.makespan_s


def test_tiles_of_single_rows_leave_the_choice_of_large_steps() -> None:
    card, lengths = find_profile("cpu"), lengths_of(30, 400, 40)
    slow_steps = card.overheads.model_copy(update={"step_us": 200_000})
    card = card.model_copy(update={"tile_rows": 1, "overheads": slow_steps})

    def plan(**engine: int) -> Plan:
        return make_plan(lengths, named_shape("llama-3.2-1b"), card, engine=EngineConfig(**engine))

    assert plan().makespan_s <= 1.03 * min(plan(chunk_tokens=size).makespan_s for size in (64, 256, 512))


def test_streamed_kv_counts_on_the_host() -> None:
    lengths = lengths_of(100, 300, 600)
    kv = KVConfig(device_memory=2**31, host_memory=64 * 2**30, offload="stream")
    card = with_link(400)
    plan = make_plan(lengths, LLAMA, card, kv=kv)
    runs = [simulate_plan(plan, lengths, LLAMA, card, one_by_one=one) for one in (False, True)]
    stats, counted = runs[0].result.stats, runs[0].to_dict()["kv"]
    streamed, block_bytes = plan.offload.streamed_layers, plan.settings.block_tokens * LLAMA.kv_bytes_per_token
    assert streamed > 3
    assert counted["peak_host_bytes"] == stats.peak_device_blocks * block_bytes * streamed // 32
    assert counted["peak_device_bytes"] <= 2**31
    assert counted["offloaded_bytes"] == runs[1].to_dict()["kv"]["offloaded_bytes"] > 100 * counted["peak_host_bytes"]
    # Everything comes back in every step, and the copies' time is that of these bytes.
    copied_s = counted["exposed_copy_s"] + counted["hidden_copy_s"]
    assert counted["offloaded_bytes"] / copied_s == pytest.approx(400e9, rel=0.05)


def test_deeper_streaming_is_priced_with_the_memory_that_it_fills() -> None:
    """What is hidden for the context of today's memory would not be for that of the larger one."""
    lengths = lengths_of(300, 300, 600)
    kv = KVConfig(device_memory=2**31, host_memory=64 * 2**30, offload="stream")
    for rate in (25, 100, 400):
        card = with_link(rate)
        plan = make_plan(lengths, LLAMA, card, kv=kv)
        if plan.offload.mode == "stream":
            assert plan.settings.num_blocks * LLAMA.kv_bytes_per_token * plan.settings.block_tokens > 2**31
            assert (
                plan.settings.limits.max_num_seqs
                > make_plan(
                    lengths, LLAMA, card, kv=kv.model_copy(update={"offload": "none"})
                ).settings.limits.max_num_seqs
            )
            assert plan.offload.streamed_layers < 32, "the first layer always stays"


# --- simulated runs ---------------------------------------------------------------------------------------------------


def test_simulated_runs_report_like_real_ones() -> None:
    lengths = lengths_of(100, 400, 200)
    plan = make_plan(lengths, LLAMA, A10, kv=KVConfig(device_memory=2**31, offload="park"))
    run = simulate_plan(plan, lengths, LLAMA, A10)
    fields = run.to_dict()
    assert {"steps", "batch", "kv", "preemptions"} <= set(fields)
    assert fields["batch"]["mean_seqs"] <= fields["batch"]["max_seqs"] <= plan.max_num_seqs
    assert 0 < fields["kv"]["peak_device_bytes"] <= 2**31
    assert sum(fields["preemptions"].values()) > 0
    assert fields["makespan_s"] == run.result.makespan_s
    assert fields["cost"]["gpu_hours"] == pytest.approx(run.result.makespan_s / 3600)
    assert run.recomputed_tokens == run.result.counters.recomputed_tokens
    assert simulate_plan(plan, lengths, LLAMA, A10, one_by_one=True).to_dict() == fields


def test_arrivals_are_simulated_in_order() -> None:
    lengths = Lengths(np.array([100, 50, 10]), np.array([5, 5, 5]), np.array([0.0, 30.0, 60.0]))
    run = simulate_plan(make_plan(lengths, LLAMA, A10), lengths, LLAMA, A10)
    assert 60 < run.result.makespan_s < 62
    assert run.result.stats.max_seqs == 1


# --- steady state -----------------------------------------------------------------------------------------------------


def test_prompts_limit_the_batch_where_steps_are_small() -> None:
    cost, work = CostModel(LLAMA, A10), MeanRow.of(Lengths(np.full(9000, 2000), np.full(9000, 100)))
    small = steady_state(cost, work, 1_000_000, 128, 4096, Mixing.MIXED)
    assert small.sequences == pytest.approx(128 * 100 / 2099)
    large = steady_state(cost, work, 40_000, 2048, 4096, Mixing.MIXED)
    assert large.sequences == pytest.approx(0.97 * 40_000 / work.held_tokens)
    assert steady_state(cost, work, 40_000, 2048, 4096, Mixing.EXCLUSIVE).request_s > large.request_s
    assert steady_state(cost, work, 40_000, 2048, 3, Mixing.MIXED).sequences == 3


def test_rows_of_few_output_tokens_get_large_steps() -> None:
    """A prompt of 3,800 tokens takes 119 steps of 32, whatever the number of steps that its output takes."""
    lengths, h100 = Lengths(np.full(60, 3800), np.full(60, 4)), find_profile("h100")
    small = steady_state(CostModel(LLAMA, h100), MeanRow.of(lengths), 400_000, 32, 4096, Mixing.MIXED)
    assert small.request_s == pytest.approx(3803 / 32 * small.mixed_step_s, rel=0.01)
    plans = {name: make_plan(lengths, LLAMA, h100, engine=EngineConfig(policy=name)) for name in ("vasuki", "vllm")}
    runs = {name: simulate_plan(plan, lengths, LLAMA, h100).result.makespan_s for name, plan in plans.items()}
    assert runs["vasuki"] < 1.02 * runs["vllm"]
    assert runs["vasuki"] < 1.03 * plans["vasuki"].schedule_bound_s


@pytest.mark.parametrize("mixing", [Mixing.MIXED, Mixing.EXCLUSIVE])
def test_the_steady_state_says_what_share_of_the_copies_hides(mixing: Mixing) -> None:
    work = MeanRow.of(lengths_of(200, 300, 600))

    def hidden(layers: int, gb_per_s: float) -> float:
        cost = CostModel(LLAMA, with_link(gb_per_s))
        return steady_state(cost, work, 40_000, 512, 512, mixing, layers, 2**20).hidden

    assert hidden(0, 25) == hidden(8, 400) == 1
    assert 1 > hidden(8, 25) > hidden(16, 25) > 0


def test_static_batches_grow_as_far_as_outputs_do() -> None:
    """Memory for four rows at their `max_tokens` holds all eight as long as they become."""
    lengths = Lengths(np.full(8, 100), np.full(8, 50), None, np.full(8, 2000))
    shape = named_shape("llama-3-8b")
    plan, kv = PlanConfig(), KVConfig(device_memory=4 * 2100 * shape.kv_bytes_per_token)
    made = make_plan(lengths, shape, find_profile("a10"), plan=plan, engine=EngineConfig(policy="static"), kv=kv)
    simulated = simulate_plan(made, lengths, shape, find_profile("a10"), plan_config=plan)
    assert simulated.result.stats.max_seqs == 8


@pytest.mark.whole_search
def test_the_best_way_is_tried_in_both_orders_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as they come stream in the time that there is; in planned order the same way is shorter."""
    random = np.random.default_rng(1)
    prompts, outputs = (
        np.clip(random.lognormal(np.log(median), 0.6, 384).astype(np.int64), 16, 400) for median in (110, 140)
    )
    job, gh200 = Lengths(prompts, outputs), find_profile("gh200")
    memory = int(0.4 * 96 * float((prompts + outputs).mean()) * LLAMA.kv_bytes_per_token)
    kv = KVConfig(device_memory=memory, host_memory=2**38)
    auto, stream = (
        make_plan(job, LLAMA, gh200, kv=kv.model_copy(update={"offload": mode})) for mode in ("auto", "stream")
    )
    assert auto.makespan_s <= stream.makespan_s
    monkeypatch.setattr(search._BestFirst, "turned", lambda self: self._best)
    assert make_plan(job, LLAMA, gh200, kv=kv).makespan_s > 1.05 * stream.makespan_s


@pytest.mark.whole_search
def test_rows_computed_one_by_one_are_not_searched_over() -> None:
    """No way to pack them differs from another, and simulating them takes long."""
    lengths = Lengths(np.array([100, 900] * 4), np.array([50, 20] * 4))
    for backend in ("alone", "uncached"):
        plan = make_plan(lengths, replace(named_shape("qwen2.5-0.5b"), backend=backend), find_profile("h200"))
        assert "found by simulation" not in plan.mixing
