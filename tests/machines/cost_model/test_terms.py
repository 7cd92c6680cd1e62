"""No step is below its terms, and where nothing was measured in steps they are its time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hybrid import HYBRID
from hypothesis import given, settings
from hypothesis import strategies as st

from vasuki.machines.cost_model import TABLE, CostModel, StepTerms, StepWork, roofline
from vasuki.machines.cost_model.terms import AttentionTerms
from vasuki.machines.measured_points import InStep, Measured
from vasuki.machines.profile_files import find_profile
from vasuki.models.layout import Layout
from vasuki.models.named import named_shape

DENSE = replace(named_shape("llama-3-8b"), num_layers=3)
EXPERTS = replace(named_shape("mixtral-8x7b"), num_layers=3, num_expert_layers=3)
WINDOWS = replace(DENSE, sliding_window=200, num_windowed_layers=2)
A10, CPU = find_profile("a10"), find_profile("cpu")
IN_STEP = Measured(source="made up", in_step=InStep(tokens=(1, 30, 400, 9000), ratio=(1.3, 0.8, 1.1, 0.7)))
COSTS = {
    "dense": CostModel(DENSE, A10),
    "cpu": CostModel(DENSE, CPU),
    "measured": CostModel(replace(named_shape("llama-2-7b"), num_layers=3), find_profile("h100")),
    "in step": CostModel(DENSE, A10.model_copy(update={"measured": IN_STEP})),
    "experts": CostModel(EXPERTS, A10),
    "windows": CostModel(WINDOWS, A10),
    "recurrent": CostModel(HYBRID, A10),
    "weights on the host": CostModel(DENSE, A10, Layout(host_layers=1)),
    "tensor parallel": CostModel(DENSE, A10, Layout(2)),
    "padded": CostModel(replace(DENSE, backend="padded"), A10),
    "every kernel launched": CostModel(replace(DENSE, compiles=False), A10),
}
TERMS = {name: cost.terms() for name, cost in COSTS.items()}
EXACT = ("dense", "cpu", "measured", "experts", "weights on the host", "tensor parallel")


def summed_s(terms: StepTerms, work: StepWork) -> float:
    """What the terms say of a step."""
    tokens, samples = work.num_tokens, work.num_samples

    def attention_s(layer: AttentionTerms, decode: int, pairs: float, ends: int) -> float:
        points, slope = layer.decode
        x, y = zip(*points, strict=True)
        decode_s = np.interp(decode, x, y) + slope * max(0, decode - x[-1])
        return float(layer.layers * (decode_s + roofline(pairs * layer.pair_s, ends * layer.read_s)))

    device_s = terms.tokens_s[tokens - 1] if tokens <= TABLE else terms.token_s * tokens
    of_samples_s = terms.samples_s[samples] if samples <= TABLE else terms.sample_s * samples
    full_s = attention_s(terms.full, work.decode_context_tokens, work.chunk_pairs, work.chunk_context_tokens)
    windowed = work.windowed_decode_context_tokens, work.windowed_chunk_pairs, work.windowed_chunk_context_tokens
    of_samples_s += full_s + attention_s(terms.windowed, *windowed)
    device_s += terms.in_step[min(tokens, TABLE + 1) - 1] * of_samples_s
    return float(max(device_s, terms.floor_s) + terms.overhead_s)


chunks = st.lists(st.tuples(st.one_of(st.just(1), st.integers(2, 700)), st.integers(0, 3000)), min_size=1, max_size=60)


@settings(deadline=None)
@given(st.sampled_from(sorted(COSTS)), chunks, st.floats(0, 1))
def test_no_step_is_below_its_terms(name: str, chunks: list[tuple[int, int]], sampled: float) -> None:
    cost, terms = COSTS[name], TERMS[name]
    tokens, contexts = zip(*((count, count + before) for count, before in chunks), strict=True)
    work = cost.work(tokens, contexts, round(sampled * len(chunks)))
    step_s, least_s = cost.step_time_s(work), summed_s(terms, work)
    assert least_s <= step_s * (1 + 1e-9)
    launches_show = cost.profile.kind == "gpu" and cost.step(work).launch_s > 0  # of a step that might be replayed
    if name in EXACT and work.num_tokens <= TABLE and not launches_show:
        second_kernel_s = terms.full.layers * cost.profile.overheads.kernel_us * 1e-6
        assert step_s - least_s <= second_kernel_s * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name, cost in COSTS.items() if cost.shape.backend == "ragged"])
def test_steps_beyond_the_table(name: str) -> None:
    """Their rates are no more than they take, and nearly that."""
    cost, terms = COSTS[name], TERMS[name]
    for tokens in (TABLE + 1, 3 * TABLE, 100_000):
        step_s = cost.step_time_s(cost.work([tokens], [tokens], 1))
        linear_s = tokens * terms.token_s
        assert linear_s <= step_s
        assert linear_s > 0.4 * (step_s - terms.full.layers * roofline(tokens**2 / 2 * terms.full.pair_s, 0.0))


def test_a_step_of_every_size() -> None:
    for name in ("dense", "experts", "in step", "recurrent"):
        cost, terms = COSTS[name], TERMS[name]
        for tokens in (*range(1, 300, 7), 1000, TABLE):
            work = cost.work([1] * tokens, [1] * tokens)
            assert summed_s(terms, work) <= cost.step_time_s(work) * (1 + 1e-9)


def test_stages_add_up() -> None:
    cost = CostModel(DENSE, A10, Layout(1, 3))
    whole, stages = cost.terms(), cost.stage_terms()
    assert len(stages) == 3
    assert sum(stage.token_s for stage in stages) == pytest.approx(whole.token_s, rel=1e-3)
    assert stages[0].sample_s == 0 < stages[2].sample_s
