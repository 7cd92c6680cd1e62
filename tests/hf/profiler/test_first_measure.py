"""A machine measured by steps of the model at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vasuki.base.config import ModelConfig
from vasuki.hf import ragged_executor
from vasuki.hf.kv.kv_cache import KVCache
from vasuki.hf.loading.load_model import load_model
from vasuki.hf.profiler import whole_steps
from vasuki.hf.profiler.fit import fitted
from vasuki.hf.profiler.whole_steps import SIZES, StepSize, StepTimings, time_steps
from vasuki.machines.cost_model import CostModel
from vasuki.machines.here import cpu
from vasuki.machines.here.cpu import typical_of
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.named import named_shape

SHAPE = named_shape("llama-3.2-1b").with_dtype("float32", "auto")
OTHERS = (
    StepSize(4, 0, 200),
    StepSize(16, 0, 300),
    StepSize(64, 0, 100),
    StepSize(0, 128, 128),
    StepSize(0, 384, 384),
    StepSize(0, 256, 900),
)


@pytest.mark.parametrize("matmul", [0.15, 0.7])
@pytest.mark.parametrize("kv_read", [0.1, 0.8])
def test_steps_of_other_sizes_are_foreseen(matmul: float, kv_read: float) -> None:
    """Of a machine that is as the cost model says, but with shares that nobody knows."""
    generic = find_profile("cpu")
    shares = generic.efficiency.model_copy(update={"matmul": matmul, "kv_read": kv_read, "attention": matmul / 3})
    true = CostModel(SHAPE, generic.model_copy(update={"efficiency": shares, "tile_rows": 1}))
    timings = StepTimings({size: [true.step_time_s(size.work(true))] for size in SIZES})
    found = CostModel(SHAPE, fitted(timings, SHAPE, typical_of(cpu.processor())))
    for size in (*SIZES, *OTHERS):
        seen_s, true_s = found.step_time_s(size.work(found)), true.step_time_s(size.work(true))
        assert seen_s == pytest.approx(true_s, rel=0.12), size


@pytest.mark.parametrize("launch_us", [10.0, 44.0])
def test_a_card_s_launches_are_no_longer_than_the_steps_that_were_launched(launch_us: float) -> None:
    """They decide which steps with prompts are recorded, in the run that was measured for, too."""
    h100 = find_profile("h100")

    def with_launches(us: float) -> CostModel:
        overheads = h100.overheads.model_copy(update={"launch_us": us})
        return CostModel(SHAPE.with_dtype("bfloat16"), h100.model_copy(update={"overheads": overheads}))

    true, known = with_launches(launch_us), with_launches(100.0)
    sizes = (*SIZES, StepSize(0, 4096, 4096))  # only the last one is launched, whatever launches take
    timings = StepTimings({size: [true.step_time_s(size.work(true))] for size in sizes})
    found = CostModel(true.shape, fitted(timings, true.shape, known.profile))
    assert found.most_recorded_tokens == known.most_recorded_tokens  # the last step says no more
    for size in sizes:
        step_s = found.step_time_s(size.work(found)) - found.profile.overheads.step_us * 1e-6
        assert step_s == pytest.approx(timings.typical_s(size), rel=0.1)
    eager = StepTimings({size: [true.step_time_s(size.work(true)) / 2] for size in SIZES})
    shape = replace(true.shape, compiles=False)
    launched = fitted(eager, shape, known.profile).overheads
    fastest_s = min(map(eager.typical_s, SIZES))
    assert launched.launch_us < 100.0
    assert (
        CostModel(shape, known.profile).launches_s(SIZES[0].work(true)) * launched.launch_us / 100 <= fastest_s * 1.001
    )


def test_a_few_sizes_will_do() -> None:
    """Where there was no time for more."""
    true = CostModel(SHAPE, find_profile("cpu"))
    for count in range(1, len(SIZES) + 1):
        timings = StepTimings({size: [true.step_time_s(size.work(true))] for size in SIZES[:count]})
        found = CostModel(SHAPE, fitted(timings, SHAPE, find_profile("cpu")))
        for size in timings.seconds:
            assert found.step_time_s(size.work(found)) == pytest.approx(timings.typical_s(size), rel=0.1)


@pytest.mark.parametrize(("preferred", "asked", "used"), [(256, "auto", 256), (None, "auto", 16), (256, 32, 32)])
def test_steps_are_measured_in_the_blocks_of_a_run(
    preferred: int | None, asked: Any, used: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_steps, "preferred_block_tokens", lambda *_: preferred)
    built: list[int] = []

    class Watched(KVCache):
        def __init__(self, layout: Any, num_blocks: int, block_tokens: int, *others: Any, **more: Any) -> None:
            super().__init__(layout, num_blocks, block_tokens, *others, **more)
            built.append(block_tokens)

    monkeypatch.setattr(ragged_executor, "KVCache", Watched)
    loaded = load_model(ModelConfig(path=str(tiny_model)), "cpu")
    shape = shape_from_config(tiny_model).with_dtype("float32", "auto")
    assert time_steps(loaded, CostModel(shape, find_profile("cpu")), lambda slower: 0.1, asked).seconds
    assert built == [used]


def test_real_steps_are_timed(tiny_model: Path) -> None:
    loaded = load_model(ModelConfig(path=str(tiny_model)), "cpu")
    shape = shape_from_config(tiny_model).with_dtype("float32", "auto")
    timings = time_steps(loaded, CostModel(shape, find_profile("cpu")), lambda slower: 0.5)
    assert timings.seconds
    assert all(second > 0 for seconds in timings.seconds.values() for second in seconds)
    assert all(size.context <= 128 for size in timings.seconds), "the model has no more"
    profile = fitted(timings, shape, find_profile("cpu"))
    cost_model = CostModel(shape, profile)
    for size in timings.seconds:
        if size.context <= 64:
            seen_s = cost_model.step_time_s(size.work(cost_model))
            assert seen_s == pytest.approx(timings.typical_s(size), rel=0.5, abs=1e-3)


def test_a_machine_that_is_now_fast_now_slow_is_told() -> None:
    steady, restless = ({SIZES[0]: [1.0, 1.01, 1.02, 1.0]}, {SIZES[0]: [1.0, 2.0, 1.0, 3.0]})
    assert StepTimings(steady).spread < 0.05
    assert StepTimings(restless).spread > 0.5


def test_decodes_that_are_timed_are_of_outputs() -> None:
    """As in a run: tokens of prompts and outputs pass kernels of their own."""
    batch = whole_steps._batch(StepSize(5, 0, 32), 50, 16)
    assert len(batch.decodes) == 5
    for sequence, start in zip(batch.decodes, batch.starts, strict=True):
        assert sequence.num_tokens == 32
        assert sequence.num_computed_tokens == start == 31 == sequence.num_prompt_tokens


def test_chunks_that_are_timed_are_of_prompts() -> None:
    [chunk] = whole_steps._batch(StepSize(0, 8, 32), 50, 16).prefills
    assert (chunk.start, chunk.end) == (24, 32)
    assert chunk.end <= chunk.sequence.num_prompt_tokens
