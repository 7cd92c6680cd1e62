"""The profile that meets steps which were timed.

the longest chunk, the shortest step         ->  rates of a CPU
decodes and chunks of two contexts           ->  measured.attention
each size over what the cost model says      ->  measured.in_step, by tokens of a step
"""

from __future__ import annotations

import datetime
import itertools
import statistics
from collections.abc import Iterator

import torch

from vasuki.hf.profiler.whole_steps import StepSize, StepTimings
from vasuki.machines.cost_model import CostModel, OperatorModel, StepWork
from vasuki.machines.measured_points import AttentionPoint, AttentionPoints, InStep, Measured
from vasuki.machines.profile import HardwareProfile
from vasuki.models.shape import ModelShape

_STEP_US = 300.0  # of scheduler, observers and output, which run between the steps measured here
_ATTENTION = (0.05, 4.0)  # times what rooflines say of it: beyond, it is noise of two steps that hardly differ


def fitted(timings: StepTimings, shape: ModelShape, base: HardwareProfile, spread: float = 0.0) -> HardwareProfile:
    """The base profile with rates, attention and ratios by which it meets these steps."""
    base = _paced(timings, shape, base)
    points = tuple(_attention_points(timings, shape, base))
    source = f"steps of {shape.name}, {datetime.date.today().isoformat()}, torch {torch.__version__.partition('+')[0]}"
    before = base.measured or Measured(source=source)
    attention = before.attention
    if points:
        kv_heads, head_dim = shape.full_heads
        heads = {"heads": shape.num_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        attention = (AttentionPoints(**heads, dtype=shape.dtype, kv_dtype=shape.kv_dtype, points=points),)
    measured = before.model_copy(
        update={
            "source": source,
            "rates": base.rates,
            "attention": attention,
            "in_step": None,
            "spread": float(f"{spread:.3g}"),
        }
    )
    profile = base.model_copy(update={"measured": measured})
    return profile.model_copy(
        update={"measured": measured.model_copy(update={"in_step": _ratios(timings, shape, profile)})}
    )


def _paced(timings: StepTimings, shape: ModelShape, base: HardwareProfile) -> HardwareProfile:
    """Give a CPU the rates that the longest chunk and the shortest step show, so that ratios are near 1 everywhere and
    hold beyond the sizes measured. A card keeps its own."""
    on_gpu = base.kind == "gpu"
    overheads = base.overheads.model_copy(
        update={
            "step_us": _STEP_US * timings.stretch,
            "launch_us": _launch_us(timings, shape, base) if on_gpu else 0,
            "kernel_us": 0.1,
            "source": "steps were measured as a whole",
        }
    )
    base = base.model_copy(update={"overheads": overheads, "rates_measured_on": datetime.date.today().isoformat()})
    if on_gpu:
        return base
    by_tokens = sorted(timings.seconds, key=lambda size: size.tokens)
    longest, shortest = by_tokens[-1], by_tokens[0]
    cost_model = CostModel(shape, base)
    flops_per_s = cost_model.step(longest.work(cost_model)).flops / timings.typical_s(longest)
    bytes_per_s = cost_model.step(shortest.work(cost_model)).memory_bytes / timings.typical_s(shortest)
    efficiency = base.efficiency.model_copy(
        update={"matmul": 1.0, "bandwidth": 1.0, "source": "of rates that steps of the model reached"}
    )
    return base.model_copy(
        update={
            "peak_tflops": {**base.peak_tflops, shape.dtype: flops_per_s / 1e12},
            "memory_gb_per_s": bytes_per_s / 1e9,
            "efficiency": efficiency,
            "tile_rows": 1,
        }
    )


def _launch_us(timings: StepTimings, shape: ModelShape, base: HardwareProfile) -> float:
    """Host time of a launch: what is known of the card's hosts, unless a step that was launched took less.

    Steps that are replayed do not tell. It decides which ones are worth recording."""
    cost_model = CostModel(shape, base)
    launches_s = {size: cost_model.launches_s(size.work(cost_model)) for size in timings.seconds}
    shares = [timings.typical_s(size) / seconds for size, seconds in launches_s.items() if seconds]
    return base.overheads.launch_us * min([1.0, *shares])


def _attention_points(timings: StepTimings, shape: ModelShape, base: HardwareProfile) -> Iterator[AttentionPoint]:
    """Points of decodes and of chunks, where there were steps of both a short and a long context."""
    operators = OperatorModel(base.datasheet_only(), shape.dtype, shape.kv_dtype, shape.product_dtype)
    heads = (shape.num_heads, *shape.full_heads)
    for short, long in itertools.permutations(timings.seconds, 2):
        if (short.decodes, short.chunk) == (long.decodes, long.chunk) and short.context < long.context:
            rows, tokens = max(1, long.decodes), max(1, long.chunk)
            work = StepWork.of([tokens] * rows, [long.context] * rows)
            if long.chunk:
                alone = operators.chunk_attention(work.chunk_pairs, work.chunk_context_tokens, *heads)
            else:
                alone = operators.decode_attention(work.decode_context_tokens, *heads)
            us = alone.total_s * _attention_ratio(timings, shape, base, short, long) * 1e6
            yield AttentionPoint(sequences=rows, tokens=tokens, context=long.context, us=us)


def _attention_ratio(
    timings: StepTimings, shape: ModelShape, base: HardwareProfile, short: StepSize, long: StepSize
) -> float:
    """Ratio of attention's time to its rooflines, from two steps that differ only in context.

    With d seconds of everything but attention, and a and b of attention by the rooflines, the steps take r (d + x a)
    and r (d + x b): the ratio of the two leaves x.
    """
    cost_model = CostModel(shape, base.datasheet_only())
    costs = [cost_model.step(size.work(cost_model)) for size in (short, long)]
    rest_s = statistics.mean(cost.device_s - cost.attention_s for cost in costs)
    short_s, long_s = timings.typical_s(short), timings.typical_s(long)
    below = costs[1].attention_s * short_s - costs[0].attention_s * long_s
    least, most = _ATTENTION
    found = rest_s * (long_s - short_s) / below if below > 0 else most
    return min(most, max(least, found))


def _ratios(timings: StepTimings, shape: ModelShape, profile: HardwareProfile) -> InStep:
    """Steps over what the cost model says of the device, behind which launches hide, by tokens. Of sizes with as many
    tokens, the shortest context."""
    cost_model, ratios = CostModel(shape, profile), {}
    for size in sorted(timings.seconds, key=lambda size: (size.tokens, -size.kv_tokens)):
        device_s = cost_model.step(size.work(cost_model)).device_s
        ratios[size.tokens] = float(f"{max(1e-3, timings.typical_s(size) / device_s):.4g}")
    return InStep(tokens=tuple(ratios), ratio=tuple(ratios.values()))
