"""The bounds by hand, and against schedules that the cost model times."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vasuki.machines.cost_model import CostModel
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape
from vasuki.planner.job_sums import JobSums
from vasuki.planner.lower_bound import (
    compute_bound_s,
    job_lower_bound,
    kv_area_bound_s,
    longest_request_bound_s,
    memory_bound_s,
)

LLAMA = named_shape("llama-3-8b")
TINY = replace(LLAMA, num_layers=4)


lengths = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=30)


@given(lengths, st.sampled_from(["a10", "h100", "h100 float8", "cpu"]), st.integers(500, 5000))
def test_no_schedule_beats_the_lower_bound(work: list[tuple[int, int]], card: str, capacity: int) -> None:
    """A greedy schedule that never exceeds the capacity, timed by the cost model."""
    card, *product_dtype = card.split()
    shape = replace(TINY, product_dtype="".join(product_dtype))
    cost = CostModel(shape, find_profile(card))
    prompts, outputs = zip(*work, strict=True)
    bound = job_lower_bound(shape, cost.profile, JobSums.of(shape, prompts, outputs), capacity)
    waiting, elapsed_s = list(work), 0.0
    running: list[tuple[int, int, int]] = []
    while waiting or running:
        held = sum(prompt + output for prompt, output, _ in running)
        tokens, contexts = [1] * len(running), [prompt + done for prompt, _, done in running]
        running = [(prompt, output, done + 1) for prompt, output, done in running]
        while waiting and held + sum(waiting[-1]) <= capacity:
            prompt, output = waiting.pop()
            held += prompt + output
            tokens.append(prompt)
            contexts.append(prompt)
            running.append((prompt, output, 1))
        elapsed_s += cost.step_time_s(cost.work(tokens, contexts))
        running = [entry for entry in running if entry[2] < entry[1]]
    assert bound.seconds <= elapsed_s


def test_each_bound_by_hand() -> None:
    profile, layout = find_profile("a10"), Layout()
    job = JobSums.of(LLAMA, [10, 20], [3, 1])
    weights = (LLAMA.layer_parameters + LLAMA.hidden_size * LLAMA.vocab_size) * 2
    reads = (11 + 12) * LLAMA.kv_bytes_per_token
    tokens, pairs = 12 + 20, 12 * 13 / 2 + 20 * 21 / 2
    unsampled = tokens - 4
    flops = (
        2 * LLAMA.layer_parameters * tokens
        - 2 * 3 * 4096 * 14336 * unsampled
        + 4 * LLAMA.head_flops_per_sample
        + LLAMA.attention_flops(pairs)
    )
    assert compute_bound_s(LLAMA, profile, job, layout) == pytest.approx(flops / 125e12)
    assert memory_bound_s(LLAMA, profile, job, layout) == pytest.approx((3 * weights + reads) / 600e9)
    area = 10 + 11 + 12 + 20
    assert kv_area_bound_s(LLAMA, profile, job, area // 5, layout) == pytest.approx((6 * weights + reads) / 600e9)
    assert longest_request_bound_s(LLAMA, profile, job, layout) == pytest.approx((3 * weights + reads) / 600e9)


def test_each_argument_can_bind() -> None:
    profile = find_profile("a100")

    def binding(prompt: int, output: int, requests: int, capacity: int) -> str:
        job = JobSums.of(LLAMA, [prompt] * requests, [output] * requests)
        bounds = asdict(job_lower_bound(LLAMA, profile, job, capacity))
        return max(bounds, key=lambda name: float(bounds[name])).removesuffix("_s")

    assert binding(2000, 1, 1000, 500_000) == "compute"
    assert binding(10, 1000, 100, 10_000_000) == "memory"
    assert binding(10, 100, 2000, 2_000) == "kv_area"
    assert binding(3000, 10, 1, 500_000) in ("compute", "longest_request")


def test_windowed_attention_lowers_the_bound() -> None:
    shape = named_shape("gemma-2-9b")
    full = replace(shape, sliding_window=0, num_windowed_layers=0)
    profile = find_profile("a100")
    windowed_bound, full_bound = (
        job_lower_bound(each, profile, JobSums.of(each, [8000], [500]), 500_000) for each in (shape, full)
    )
    assert windowed_bound.memory_s < full_bound.memory_s
    assert windowed_bound.compute_s < full_bound.compute_s


def test_bounds_of_nothing_and_of_nonsense() -> None:
    assert job_lower_bound(LLAMA, find_profile("a10"), JobSums.of(LLAMA, [], []), 1000).seconds == 0
    with pytest.raises(ValueError, match="at least one prompt token"):
        JobSums.of(LLAMA, [1], [0])
    with pytest.raises(ValueError, match="differ in shape"):
        JobSums.of(LLAMA, [1, 2], [1])
