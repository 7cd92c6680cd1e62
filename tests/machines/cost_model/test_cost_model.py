"""The cost model against published measurements, against its own invariants, and the bounds against brute force."""

from __future__ import annotations

import statistics
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vasuki.base.errors import JobFileError, ModelError, ProfileError
from vasuki.engine.batch import Batch, ScheduledChunk, Swap
from vasuki.engine.sequence import Request, Sequence
from vasuki.machines.cost_model import (
    LEAST_RECORDED_TOKENS,
    MOST_RECORDED_ROWS,
    MOST_RECORDED_TOKENS,
    Copies,
    CostModel,
    OperatorModel,
    causal_pairs,
    recorded_steps,
    roofline,
    windowed_causal_pairs,
)
from vasuki.machines.cost_model.copies import HostTraffic
from vasuki.machines.cost_model.stages import STREAMED_LAYER_S, Part
from vasuki.machines.experts import MOST_ROWS_OF_ALL_EXPERTS, waits_for_experts
from vasuki.machines.known_error import known_error
from vasuki.machines.measured_points import AttentionPoint, AttentionPoints, InStep, Measured
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.models.shape import ModelShape

LLAMA = named_shape("llama-3-8b")
TINY = replace(LLAMA, num_layers=4)


def model(card: str = "a10", shape: str = "llama-3-8b", layout: Layout | None = None) -> CostModel:
    return CostModel(named_shape(shape), find_profile(card), layout)


def launched_in_us(profile: HardwareProfile, launch_us: float) -> HardwareProfile:
    """A machine whose host takes so long for an operator."""
    return profile.model_copy(update={"overheads": profile.overheads.model_copy(update={"launch_us": launch_us})})


def prefill_s(cost: CostModel, tokens: int) -> float:
    return cost.step_time_s(cost.work([tokens], [tokens]))


# --- against measurements ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", ["a100", "h100"])
def test_datasheet_alone_predicts_measured_matmuls(card: str) -> None:
    """Llama-2-7B layers, Vidur's public profiles: the points in the profile, not shown to the model here."""
    profile = find_profile(card)
    assert profile.measured is not None
    operators = OperatorModel(profile.datasheet_only(), "float16")
    errors = []
    for index, tokens in enumerate(profile.measured.matmul[0].tokens):
        if 64 <= tokens <= 4096:
            predicted_s = sum(
                operators.matmul(tokens, series.k, series.n).total_s for series in profile.measured.matmul
            )
            measured_s = sum(series.us[index] for series in profile.measured.matmul) * 1e-6
            errors.append(abs(predicted_s / measured_s - 1))
    assert statistics.median(errors) < 0.08
    assert max(errors) < 0.30


@pytest.mark.parametrize("card", ["a100", "h100"])
def test_measured_points_predict_the_ones_between(card: str) -> None:
    """Half of the points are given to the model, the others predicted."""
    profile = find_profile(card)
    assert profile.measured is not None
    shown = profile.measured.model_copy(
        update={
            "matmul": tuple(
                s.model_copy(update={"tokens": s.tokens[::2], "us": s.us[::2]}) for s in profile.measured.matmul
            )
        }
    )
    operators = OperatorModel(profile.model_copy(update={"measured": shown}), "float16")
    errors = [
        abs(operators.matmul(tokens, series.k, series.n).total_s / (us * 1e-6) - 1)
        for series in profile.measured.matmul
        for tokens, us in zip(series.tokens[1::2], series.us[1::2], strict=True)
        if tokens >= 64
    ]
    assert statistics.median(errors) < 0.05


def test_measured_points_are_met_exactly_and_hold_beyond_the_ends() -> None:
    profile = find_profile("a100")
    assert profile.measured is not None
    measured, datasheet = OperatorModel(profile, "float16"), OperatorModel(profile.datasheet_only(), "float16")
    for series in profile.measured.matmul:
        for tokens, us in zip(series.tokens, series.us, strict=True):
            assert measured.matmul(tokens, series.k, series.n).total_s == pytest.approx(us * 1e-6)
        last = series.tokens[-1]
        ratio_at_end = series.us[-1] * 1e-6 / datasheet.matmul(last, series.k, series.n).total_s
        beyond = (
            measured.matmul(4 * last, series.k, series.n).total_s
            / datasheet.matmul(4 * last, series.k, series.n).total_s
        )
        assert beyond == pytest.approx(ratio_at_end)


@pytest.mark.parametrize("card", ["a100", "h100"])
@pytest.mark.parametrize("shape", ["qwen2.5-0.5b", "llama-2-7b"])
def test_a_better_card_than_the_measured_one_is_never_slower(card: str, shape: str) -> None:
    """What was measured are shares of its rates, also for sizes that were not."""
    profile = find_profile(card)
    faster = {
        "memory_gb_per_s": 4 * profile.memory_gb_per_s,
        "peak_tflops": {dtype: 2 * peak for dtype, peak in profile.peak_tflops.items()},
        "overheads": profile.overheads.model_copy(update={"kernel_us": 1.0}),
        "efficiency": profile.efficiency.model_copy(update={"bandwidth": 0.95}),
    }
    for change in [{key: value} for key, value in faster.items()] + [faster]:
        better = profile.model_copy(update=change)
        assert better.basis == f"{profile.basis}; scaled to the profile's rates, which are others"
        assert known_error(better) > known_error(profile), "as a datasheet's"
        before, after = (CostModel(named_shape(shape), each) for each in (profile, better))
        for tokens in (1, 16, 64, 128, 500, 2048, 8000):
            assert prefill_s(after, tokens) <= prefill_s(before, tokens), (change, tokens)
        assert prefill_s(after, 1) < prefill_s(before, 1) or "peak_tflops" in change


def test_sarathi_table_2_and_figure_7() -> None:
    """LLaMA-13B on A6000: nothing of this was fitted. Linear operators of 1024 tokens 224.8 ms, of 4 decodes 44.28 ms
    and their attention at context 1024 5.68 ms; steps of 128 tokens 55 ms, of 256 69.8 ms, of 257 92.33 ms."""
    cost = CostModel(named_shape("llama-13b").with_dtype("float16"), find_profile("rtx-a6000"))
    assert cost.step(cost.work([1024], [1024])).linear_s == pytest.approx(224.8e-3, rel=0.10)
    decodes = cost.step(cost.work([1] * 4, [1024] * 4))
    assert decodes.linear_s == pytest.approx(44.28e-3, rel=0.10)
    assert decodes.attention_s == pytest.approx(5.68e-3, rel=0.20)
    for tokens, seconds in ((128, 55e-3), (256, 69.8e-3), (257, 92.33e-3)):
        assert prefill_s(cost, tokens) == pytest.approx(seconds, rel=0.10)


def test_one_token_past_a_tile() -> None:
    """Sarathi measured +32 % from 256 to 257 tokens; from 257 on the tile is paid for and tokens are nearly free."""
    cost = CostModel(named_shape("llama-13b").with_dtype("float16"), find_profile("rtx-a6000"))
    assert 1.25 < prefill_s(cost, 257) / prefill_s(cost, 256) < 1.40
    assert prefill_s(cost, 384) / prefill_s(cost, 257) < 1.06


def test_design_figures_of_an_8b_model_on_a10() -> None:
    cost = model("a10")
    decode = cost.step(cost.work([1], [128]))
    assert decode.total_s == pytest.approx(27e-3, rel=0.20)  # 16 GB at 600 GB/s
    assert decode.weights_read_s > decode.matmul_compute_s
    assert prefill_s(cost, 512) == pytest.approx(110e-3, rel=0.10)


# --- invariants -------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1e3), st.floats(0, 1e3))
def test_roofline_is_never_below_either_side(compute_s: float, memory_s: float) -> None:
    seconds = roofline(compute_s, memory_s)
    assert max(compute_s, memory_s) <= seconds <= 2 ** (1 / 3) * max(compute_s, memory_s) * (1 + 1e-12)


chunks = st.lists(
    st.tuples(st.integers(1, 600), st.integers(0, 4000)).map(lambda chunk: (chunk[0], chunk[0] + chunk[1])),
    min_size=1,
    max_size=40,
)


@given(chunks, st.sampled_from(["a10", "a100", "h100", "cpu"]), st.sampled_from(["llama-3.2-1b", "gemma-2-9b"]))
def test_parts_add_up(work: list[tuple[int, int]], card: str, shape: str) -> None:
    cost = model(card, shape)
    tokens, contexts = zip(*work, strict=True)
    step = cost.step(
        cost.work(tokens, contexts)._replace(copies=(Copies(2**28, 2**20), Copies(2**24, overlapped=False)))
    )
    assert step.total_s == pytest.approx(step.device_s + step.launch_s + step.overhead_s + step.exposed_copy_s)
    assert step.energy_j >= step.total_s * cost.profile.power.idle_w
    assert step.energy_j <= step.total_s * cost.profile.power.peak_w * (1 + 1e-9)
    assert step.flops / cost.profile.peak_flops("bfloat16") < step.total_s
    assert all(getattr(step, field.name) >= 0 for field in fields(step))


@given(chunks, st.integers(1, 300))
def test_more_work_never_takes_less_time(work: list[tuple[int, int]], more: int) -> None:
    cost = model("a40", "llama-3.2-1b")
    tokens, contexts = (list(column) for column in zip(*work, strict=True))
    before_s = cost.step_time_s(cost.work(tokens, contexts))
    longer_context = [context + more for context in contexts]
    assert cost.step_time_s(cost.work(tokens, longer_context)) >= before_s
    assert cost.step_time_s(cost.work([*tokens, more], [*contexts, more])) >= before_s


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_matmul_time_is_monotone_in_tokens(one: int, other: int) -> None:
    operators = OperatorModel(find_profile("l4"), "bfloat16")
    few, many = sorted((one, other))
    assert operators.matmul(few, 4096, 28672).total_s <= operators.matmul(many, 4096, 28672).total_s


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 80))
def test_pairs_equal_a_count_of_the_mask(num_tokens: int, start: int, window: int) -> None:
    context = num_tokens + start
    keys = [query + 1 for query in range(start, context)]
    assert causal_pairs(num_tokens, context) == sum(keys)
    assert windowed_causal_pairs(num_tokens, context, window) == sum(min(window, count) for count in keys)


def sequence(prompt: int) -> Sequence:
    return Sequence(Request(row=0, id=0, num_prompt_tokens=prompt, max_tokens=8))


def test_work_of_a_batch_equals_work_of_its_chunks() -> None:
    chunks = [
        ScheduledChunk(sequence(90), start=90, num_tokens=1, samples=True),
        ScheduledChunk(sequence(300), start=100, num_tokens=200, samples=True),
        ScheduledChunk(sequence(900), start=0, num_tokens=256, samples=False),
    ]
    cost = model("a10", "gemma-2-9b")
    work = cost.batch_work(Batch([], [], chunks, []))
    assert work == cost.work([1, 200, 256], [91, 300, 256], num_samples=2)
    assert (work.num_tokens, work.num_decodes, work.num_chunks, work.num_samples) == (457, 1, 2, 2)
    assert work.chunk_pairs == causal_pairs(200, 300) + causal_pairs(256, 256)


@pytest.mark.parametrize(("gpu", "copy_ms"), [("h100", 2.84), ("a10", 5.64)])
def test_a_recorded_step_hides_nothing_of_what_leaves_before_it(gpu: str, copy_ms: float) -> None:
    """A row of 1,024 tokens and 64 decodes: read from all layers before any of them is written to."""
    cost, swap = model(gpu), Swap(sequence(1024), to_host=True, device=[0, 1, 2, 3], host=[0, 1, 2, 3])
    copies = cost.swap_copies(Batch([], [], [], [swap]), block_tokens=256)
    recorded, launched = cost.work([1] * 64, [512] * 64), cost.work([1] * 64 + [1024], [512] * 64 + [1024])
    leaves = cost.step(recorded._replace(copies=copies))
    assert 1e3 * leaves.exposed_copy_s == pytest.approx(copy_ms, rel=0.01)
    assert leaves.hidden_copy_s == 0
    assert leaves.total_s - cost.step(recorded).total_s == pytest.approx(leaves.exposed_copy_s)
    assert cost.step(launched._replace(copies=copies)).exposed_copy_s == pytest.approx(leaves.exposed_copy_s / 32)


def test_swaps_become_copies() -> None:
    """What leaves a layer does so before its kernels, what returns does so while they run."""
    swaps = [
        Swap(sequence(90), to_host=True, device=[1, 2, 3], host=[0, 1, 2]),
        Swap(sequence(90), to_host=False, device=[7], host=[3]),
    ]
    out, back = model("a10").swap_copies(Batch([], [], [], swaps), block_tokens=16)
    assert (out.to_host_bytes, out.to_device_bytes, out.overlapped) == (3 * 16 * 128 * 1024, 0, False)
    assert (back.to_host_bytes, back.to_device_bytes, back.overlapped) == (0, 16 * 128 * 1024, True)
    assert out.copy_bytes == back.copy_bytes == 16 * 4096
    assert model("a10").swap_copies(Batch([], [], [], []), block_tokens=16) == ()


def test_windowed_layers_read_less() -> None:
    windowed, full = (
        model("a100", "gemma-2-9b"),
        CostModel(replace(named_shape("gemma-2-9b"), sliding_window=0, num_windowed_layers=0), find_profile("a100")),
    )
    tokens, contexts = [1] * 32, [8000] * 32
    narrow, wide = windowed.step(windowed.work(tokens, contexts)), full.step(full.work(tokens, contexts))
    assert narrow.kv_read_s == pytest.approx(wide.kv_read_s * (0.5 + 0.5 * 4096 / 8000))


def test_experts_are_read_only_if_chosen() -> None:
    cost = model("h100", "qwen3-30b-a3b")
    one, many = cost.step(cost.work([1], [64])), cost.step(cost.work([1] * 256, [64] * 256))
    assert one.weights_read_s < 0.15 * many.weights_read_s
    assert many.weights_read_s < 1.3 * cost.shape.weight_bytes / (3350e9 * 0.85)


def test_the_last_mlp_is_for_sampled_tokens() -> None:
    cost, matrices = model("a100"), LLAMA.dense_matrices
    steps = {samples: cost.step(cost.work([512], [512], samples)) for samples in (1, 256, 512)}
    mlp_s = {
        samples: sum(cost.operators.matmul(samples, matrix.k, matrix.n).total_s for matrix in matrices)
        for samples in steps
    }
    flops_per_sample = LLAMA.last_mlp_flops_per_token + LLAMA.head_flops_per_sample
    for samples, step in steps.items():
        assert steps[512].linear_s - step.linear_s == pytest.approx(mlp_s[512] - mlp_s[samples])
        assert steps[512].flops - step.flops == (512 - samples) * flops_per_sample
        assert next(cost.repeated(cost.work([512], [512], samples), 1)).total_s == pytest.approx(step.total_s)
    assert steps[1].total_s < steps[256].total_s < steps[512].total_s


def test_the_last_mlp_of_a_mixture_is_that_of_its_experts() -> None:
    cost = model("a100", "mixtral-8x7b")
    one, all_of_them = [cost.step(cost.work([512], [512], samples)) for samples in (1, 512)]
    assert 0.5 / cost.shape.num_layers < 1 - one.linear_s / all_of_them.linear_s < 1 / cost.shape.num_layers


def test_launches_show_only_where_kernels_are_short() -> None:
    cost = model("h100", "qwen2.5-0.5b")
    slow_cost = CostModel(cost.shape, launched_in_us(cost.profile, 40))
    decode, chunk = cost.work([1], [64]), cost.work([16384], [16384])
    few = cost.work([MOST_RECORDED_TOKENS + 1], [MOST_RECORDED_TOKENS + 1])
    assert slow_cost.step(few).launch_s > cost.step(few).launch_s
    assert slow_cost.step(few).launch_s == pytest.approx((24 * 13 + 18) * 40e-6 - slow_cost.step(few).device_s)
    assert slow_cost.step(chunk).launch_s == 0
    assert slow_cost.step(decode).launch_s == 0


QWEN = named_shape("qwen2.5-0.5b")
MIXTURE = replace(named_shape("qwen3-30b-a3b"), num_layers=4, num_expert_layers=4)


@pytest.mark.parametrize(
    ("card", "shape", "layout", "rows", "changes"),
    [
        pytest.param("h100", QWEN, Layout(), 4, True, id="layers change place"),
        pytest.param("h100", QWEN, Layout(host_layers=1), 4, False, id="weights are on the host"),
        pytest.param("h100", QWEN, Layout(), MOST_RECORDED_ROWS + 1, False, id="more rows than are recorded"),
        pytest.param("h100", replace(QWEN, backend="padded"), Layout(), 4, False, id="rows are padded"),
        pytest.param("h100", replace(QWEN, backend="alone"), Layout(), 4, False, id="row by row"),
        pytest.param("h100", replace(QWEN, compiles=False), Layout(), 4, False, id="the job says so"),
        pytest.param("a100", MIXTURE, Layout(), 129, False, id="experts wait"),
    ],
)
def test_decodes_that_are_not_recorded_wait_for_their_launches(
    card: str, shape: ModelShape, layout: Layout, rows: int, changes: bool
) -> None:
    slow = launched_in_us(find_profile(card), 400)
    cost = CostModel(shape, slow, layout)
    work = cost.work([1] * rows, [64] * rows)
    [time] = cost.repeated(work, 1, may_be_recorded=not changes)
    launches_s = Part.whole(shape.num_layers, 1).launches_s(shape, slow)
    assert time.total_s >= launches_s >= 12 * shape.num_layers * 400e-6
    assert changes or cost.step_time_s(work) == pytest.approx(time.total_s)
    packed = CostModel(QWEN, slow)
    assert packed.step_time_s(packed.work([1] * 4, [64] * 4)) < launches_s / 10


def test_recorded_decodes_wait_for_the_copies_of_layers_that_stream() -> None:
    """However long a launch takes: but for theirs, nothing is launched."""
    for launch_us in (1, 400):
        slow = launched_in_us(find_profile("h100"), launch_us)
        cost = CostModel(QWEN, slow)
        work, overhead_s = cost.work([1] * 4, [64] * 4), slow.overheads.step_us * 1e-6
        none, few, all_but_one = (next(cost.repeated(work, 1, layers)).total_s for layers in (0, 1, 23))
        assert few == none
        assert cost.step_time_s(work) == pytest.approx(none)
        assert few < all_but_one == pytest.approx(23 * STREAMED_LAYER_S + overhead_s)
    on_cpu = CostModel(QWEN, find_profile("cpu"))
    times = [next(on_cpu.repeated(on_cpu.work([1], [64]), 1, layers)) for layers in (0, 23)]
    assert times[0].total_s == pytest.approx(times[1].total_s - times[1].exposed_copy_s)


@pytest.mark.parametrize(
    ("generation", "waits"), [((8, 0), True), ((8, 9), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)]
)
def test_few_generations_have_a_grouped_product(generation: tuple[int, int], waits: bool) -> None:
    """An RTX 5090 is newer than a B200, and has none."""
    assert waits_for_experts(generation) == waits
    card = find_profile("h100").model_copy(update={"compute_capability": generation})
    most = recorded_steps(MIXTURE, card, Layout()).rows
    assert most == (MOST_ROWS_OF_ALL_EXPERTS if waits else MOST_RECORDED_ROWS)


@pytest.mark.parametrize(("card", "rows"), [("a100", 128), ("h100", 512)])
def test_decodes_of_a_mixture_are_recorded(card: str, rows: int) -> None:
    """Where its experts don't wait."""
    cost = CostModel(MIXTURE, launched_in_us(find_profile(card), 4000))
    assert cost.step_time_s(cost.work([1] * rows, [64] * rows)) < 0.1


@pytest.mark.parametrize(
    ("card", "shape", "attention", "most"),
    [
        pytest.param("h100", QWEN, "auto", MOST_RECORDED_TOKENS, id="packed forward"),
        pytest.param("a100", MIXTURE, "auto", MOST_ROWS_OF_ALL_EXPERTS, id="experts wait"),
        pytest.param("h100", QWEN, "packed", 2, id="torch's kernel alone attends"),
    ],
)
def test_prompts_beside_decodes_are_recorded_up_to_a_size(
    card: str, shape: ModelShape, attention: str, most: int
) -> None:
    """The model's host takes a second for an operator; `most` tokens are replayed, one more is launched."""
    slow = launched_in_us(find_profile(card), 1e6).model_copy(update={"attention": attention})
    cost = CostModel(shape, slow)
    launches_s = Part.whole(shape.num_layers, 1).launches_s(shape, slow)
    recorded = cost.work([1, most - 1], [64, most - 1]) if most > 2 else cost.work([1, 1], [64, 64])
    more = cost.work([1, most], [64, most])
    assert cost.step_time_s(recorded) < 1 < launches_s <= cost.step_time_s(more)
    assert [time.total_s for time in cost.repeated(more, 2)] == pytest.approx([cost.step_time_s(more)] * 2, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "launch_us", "tokens"),
    [
        ("qwen2.5-0.5b", 10, MOST_RECORDED_TOKENS),
        ("llama-3-8b", 10, LEAST_RECORDED_TOKENS),  # whose products take the device longer
        ("llama-3-8b", 44, 1060),
    ],
)
def test_steps_are_recorded_up_to_the_size_that_keeps_the_device_as_long_as_the_host(
    shape: str, launch_us: float, tokens: int
) -> None:
    cost = model("h100", shape)
    cost = CostModel(cost.shape, launched_in_us(cost.profile, launch_us))
    assert cost.most_recorded_tokens == pytest.approx(tokens, rel=0.1)
    step = cost.step(cost.work([cost.most_recorded_tokens], [cost.most_recorded_tokens]))
    assert step.launch_s == 0
    more = cost.step(cost.work([cost.most_recorded_tokens + 1], [cost.most_recorded_tokens + 1]))
    assert more.total_s >= step.total_s


def test_launches_of_a_cpu_always_show() -> None:
    cost = model("cpu", "qwen2.5-0.5b")
    assert cost.step(cost.work([512], [512])).launch_s == pytest.approx((24 * 11 + 6) * 8e-6)


def test_copies_hide_behind_kernels_up_to_their_time() -> None:
    cost = model("a10")
    work = cost.work([1] * 64, [1000] * 64)
    plain = cost.step(work)
    room_bytes = plain.device_s * 25e9
    hidden = cost.step(work._replace(copies=(Copies(to_device_bytes=0.5 * room_bytes),)))
    assert hidden.total_s == plain.total_s
    assert hidden.hidden_copy_s == pytest.approx(0.5 * plain.device_s, rel=0.01)
    twice = cost.step(work._replace(copies=(Copies(to_device_bytes=2 * room_bytes),)))
    assert twice.total_s == pytest.approx(plain.total_s + plain.device_s, rel=0.02)
    work = cost.work([1] * 64 + [1024], [1000] * 64 + [1024])  # more tokens than are recorded
    plain = cost.step(work)
    for num_bytes in (2**28, 2**32):
        swap = cost.step(work._replace(copies=(Copies(to_host_bytes=num_bytes, overlapped=False),)))
        copy_s, layer_s = (swap.hidden_copy_s + swap.exposed_copy_s) / 32, plain.device_s / 32
        assert swap.exposed_copy_s == pytest.approx(copy_s if copy_s < layer_s else 32 * copy_s - 31 * layer_s)
        assert swap.exposed_copy_s == pytest.approx(swap.total_s - plain.total_s)


def test_decode_step_hides_five_thousand_streamed_tokens_on_pcie_4() -> None:
    """An 8B decode step of 27 ms on a 25 GB/s link: 0.67 GB, about 5k tokens of KV over all layers."""
    cost = model("a10")
    work = cost.work([1] * 16, [320] * 16)
    traffic = HostTraffic(cost.shape, cost.profile, cost.layout)
    for tokens, are_hidden in ((5000, True), (8000, False)):
        copies = Copies(*traffic.streamed_bytes(32, tokens, 16), overlapped=True)
        assert (cost.step(work._replace(copies=(copies,))).exposed_copy_s == 0) == are_hidden


def test_explain_lists_every_part_and_the_total() -> None:
    cost = model("a10")
    table = cost.step(cost.work([1] * 8 + [256], [500] * 8 + [256])).explain()
    for part in ("matmuls (compute)", "attention (", "elementwise", "step overhead", "100.0%", "TFLOP/s"):
        assert part in table


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_tensor_parallel_divides_kernels_and_adds_network() -> None:
    one, two = model("a100", "llama-3-70b"), model("a100", "llama-3-70b", Layout(tensor_parallel=4))
    work = one.work([2048], [2048])
    alone, spread = one.step(work), two.step(work)
    assert spread.linear_s == pytest.approx(alone.linear_s / 4, rel=0.15)
    assert spread.network_s == pytest.approx(2 * 80 * two.network.all_reduce_s(2048))
    assert spread.total_s < alone.total_s
    assert spread.flops == alone.flops


def test_all_reduce_is_a_ring() -> None:
    cost = model("a100", "llama-3-8b", Layout(tensor_parallel=8))
    num_bytes = 1000 * 4096 * 2
    assert cost.network.all_reduce_s(1000) == pytest.approx(2 * 7 / 8 * num_bytes / 240e9 + 14 * 5e-6)
    assert model("a100").network.all_reduce_s(1000) == 0


def test_pipeline_stages_share_the_layers() -> None:
    one, cut = model("a100", "llama-33b"), model("a100", "llama-33b", Layout(pipeline_parallel=8))
    work = one.work([512], [512])
    stages = [cut.stage(work, stage) for stage in range(8)]
    whole = one.step(work)
    assert sum(stage.linear_s for stage in stages) == pytest.approx(whole.linear_s)
    assert sum(stage.attention_s for stage in stages) == pytest.approx(whole.attention_s)
    assert sum(stage.outside_s for stage in stages) == pytest.approx(whole.outside_s)
    assert max(stage.total_s for stage in stages) < whole.total_s / 7
    assert cut.step(work).total_s == pytest.approx(sum(stage.total_s for stage in stages))
    assert stages[-1].network_s == 0 < stages[0].network_s
    with pytest.raises(ValueError, match="stage 8 of 8"):
        cut.stage(work, 8)


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(JobFileError, match="32 heads, not divisible by 3"):
        model("a100", "llama-3-8b", Layout(tensor_parallel=3))
    with pytest.raises(JobFileError, match="too few for 64 stages"):
        model("a100", "llama-3-8b", Layout(pipeline_parallel=64))
    with pytest.raises(ModelError, match="no interconnect"):
        model("gh200", "llama-3-8b", Layout(tensor_parallel=2)).network.all_reduce_s(1)
    with pytest.raises(ProfileError, match="no peak_tflops for float8"):
        CostModel(LLAMA.with_dtype("float8"), find_profile("a10"))


# --- measured attention -----------------------------------------------------------------------------------------------


def test_measured_attention_takes_precedence() -> None:
    profile = find_profile("a10")
    points = (
        AttentionPoint(sequences=64, tokens=1, context=1000, us=900),
        AttentionPoint(sequences=1, tokens=512, context=512, us=300),
        AttentionPoint(sequences=1, tokens=512, context=4096, us=1500),
    )
    attention = AttentionPoints(heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", points=points)
    calibrated = profile.model_copy(update={"measured": Measured(source="test", attention=(attention,))})
    cost = CostModel(LLAMA, HardwareProfile.model_validate(calibrated.model_dump()))
    assert cost.step(cost.work([1] * 64, [1000] * 64)).attention_s == pytest.approx(32 * 900e-6)
    assert cost.step(cost.work([512], [512])).attention_s == pytest.approx(32 * 300e-6)
    assert cost.step(cost.work([512], [4096])).attention_s == pytest.approx(32 * 1500e-6)
    assert cost.step(cost.work([512], [512])).linear_s == model("a10").step(cost.work([512], [512])).linear_s


def test_a_step_that_computes_nothing_takes_the_time_of_its_copies() -> None:
    """On a measured profile too, whose curves know no step of zero tokens, and whatever would come from the host."""
    copies = Copies(2**28, 0, 2**20), Copies(0, 2**27, 2**20, overlapped=False)
    for layout in (Layout(), Layout(pipeline_parallel=2), Layout(host_layers=4)):
        cost = CostModel(LLAMA, find_profile("a100"), layout)
        work = cost.work([], [])._replace(copies=copies)
        link = cost.profile.link
        seconds: Any = pytest.approx(link.transfer_s(2**28, 0, 2**20) + link.transfer_s(0, 2**27, 2**20))
        for step in (*cost.repeated(work, 1), *cost.stage_times(work)):
            assert step == (seconds, seconds, 0.0)


def test_narrow_keys_and_values_are_read_faster_unless_measured_otherwise() -> None:
    wide, narrow = LLAMA.with_dtype("float32"), LLAMA.with_dtype("float32", "bfloat16")
    assert narrow.kv_bytes_per_token * 2 == wide.kv_bytes_per_token

    def attention_s(shape: ModelShape, *series: AttentionPoints) -> float:
        measured = Measured(source="test", attention=series) if series else None
        cost = CostModel(shape, find_profile("cpu").model_copy(update={"measured": measured}))
        return cost.step(cost.work([1] * 64, [1000] * 64)).attention_s / 32

    assert attention_s(narrow) < attention_s(wide)
    taken = [
        AttentionPoints(
            heads=32,
            kv_heads=8,
            head_dim=128,
            dtype="float32",
            kv_dtype=kv_dtype,
            points=(AttentionPoint(sequences=64, tokens=1, context=1000, us=us),),
        )
        for kv_dtype, us in (("", 900), ("bfloat16", 700))
    ]
    assert attention_s(wide, *taken) == pytest.approx(900e-6)
    assert attention_s(narrow, *taken) == pytest.approx(700e-6)
    assert attention_s(narrow, taken[0]) == pytest.approx(900e-6)  # no faster than what was seen


# --- whole steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b"])  # without and with a sliding window
def test_operators_take_longer_in_a_step(name: str) -> None:
    shape, profile = named_shape(name), find_profile("a10")
    in_step = InStep(tokens=(16, 256), ratio=(1.5, 1.1))
    slowed = CostModel(shape, profile.model_copy(update={"measured": Measured(source="test", in_step=in_step)}))
    alone = CostModel(shape, profile)
    for tokens, contexts, ratio in (([1] * 4, [500] * 4, 1.5), ([1] * 16, [9000] * 16, 1.5), ([512], [6000], 1.1)):
        work = alone.work(tokens, contexts)
        cost, before = slowed.step(work), alone.step(work)
        assert cost.device_s == pytest.approx(ratio * before.device_s)
        assert (cost.overhead_s, cost.flops) == (before.overhead_s, before.flops)
        assert cost.memory_bytes == pytest.approx(before.memory_bytes)
        assert slowed.layer_time_s(work) == pytest.approx(ratio * alone.layer_time_s(work))
        assert [step.total_s for step in slowed.repeated(work, 1)] == pytest.approx([cost.total_s])
        assert [step.total_s for step in slowed.stage_times(work)] == pytest.approx([cost.total_s])
    between = alone.work([1] * 64, [500] * 64)
    assert 1.1 < slowed.step(between).device_s / alone.step(between).device_s < 1.5
    assert slowed.step(alone.work([], [])).total_s > 0, "a step that only moves KV"


@pytest.mark.parametrize(("ratio", "message"), [((1.2,), "in pairs"), ((1.2, 0.0), "greater than 0")])
def test_ratios_come_in_pairs_and_are_positive(ratio: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InStep(tokens=(1, 2), ratio=ratio)


def test_first_touches_are_paid_once_for_the_peak() -> None:
    cpu = find_profile("cpu")
    overheads = cpu.overheads.model_copy(update={"first_touch_us_per_mib": 500.0})
    shape = named_shape("llama-3-8b")
    cost = CostModel(shape, cpu.model_copy(update={"overheads": overheads}))
    assert cost.first_touch_s(2**20 // shape.kv_bytes_per_token * 3) == pytest.approx(3 * 500e-6)
    assert CostModel(shape, cpu).first_touch_s(1000) == 0, "profiles that do not say so know no first touches"
