"""Seconds that no schedule of a job can beat, from rates that nothing beats and the lengths of its requests.

Rates are those of the datasheet, or what was measured where that is more; on a CPU those of its instructions at its
fastest clock. What a CPU's caches hold need not come from memory in every step.

Four arguments, of which the largest counts; docs/cost-model.md states them side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Seconds that no schedule can beat on this hardware, at datasheet rates, by argument."""

    compute_s: float
    memory_s: float
    kv_area_s: float
    longest_request_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s, self.kv_area_s, self.longest_request_s)

    @property
    def binding(self) -> str:
        """Which argument gives the largest bound: compute, memory, kv_area or longest_request."""
        bounds = {name: getattr(self, f"{name}_s") for name in ("compute", "memory", "kv_area", "longest_request")}
        return max(bounds, key=lambda name: bounds[name])


def job_lower_bound(
    shape: ModelShape,
    profile: HardwareProfile,
    prompt_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    kv_capacity_tokens: int,
    layout: Layout | None = None,
) -> LowerBound:
    """Lower bounds of the makespan of a job whose lengths are known.

    They hold for any engine that samples one token of a sequence a step and keeps its KV as heads attend to it. Where
    rows share prefixes, give what each has of its own: what is shared then counts as computed, held and read for
    nothing.

    Args:
        shape: the model.
        profile: the device.
        prompt_tokens: `[requests]`.
        output_tokens: `[requests]`, each at least 1.
        kv_capacity_tokens: tokens of KV that can take part in one step of a replica: device memory, or device and host
            memory together where KV may be streamed.
        layout: rates add up over its GPUs.
    """
    prompts, outputs = _lengths(prompt_tokens, output_tokens)
    layout = layout or Layout()
    return LowerBound(
        compute_s=compute_bound_s(shape, profile, prompts, outputs, layout),
        memory_s=memory_bound_s(shape, profile, prompts, outputs, layout),
        kv_area_s=kv_area_bound_s(shape, profile, prompts, outputs, kv_capacity_tokens, layout),
        longest_request_s=longest_request_bound_s(shape, profile, prompts, outputs, layout),
    )


def compute_bound_s(
    shape: ModelShape, profile: HardwareProfile, prompts: Tokens, outputs: Tokens, layout: Layout
) -> float:
    """Every token but a request's last one passes all layers, but for the last MLP where nothing is sampled from it;
    every sampled one comes out of the head; at peak rate."""
    if not len(prompts):
        return 0.0
    flops = float(np.sum(_request_flops(shape, prompts, outputs)))
    return flops / (profile.most_flops(shape.dtype) * layout.num_gpus)


def memory_bound_s(
    shape: ModelShape, profile: HardwareProfile, prompts: Tokens, outputs: Tokens, layout: Layout
) -> float:
    """Weights are read once a step and there are at least as many steps as the longest output has tokens, all requests
    running beside it; each decode reads its sequence's KV once; at peak bandwidth."""
    if not len(prompts):
        return 0.0
    weights = float(np.max(outputs)) * _step_weight_bytes(shape, profile)
    return (weights + _kv_read_bytes(shape, profile, prompts, outputs)) / (profile.most_bytes_per_s * layout.num_gpus)


def kv_area_bound_s(
    shape: ModelShape,
    profile: HardwareProfile,
    prompts: Tokens,
    outputs: Tokens,
    kv_capacity_tokens: int,
    layout: Layout,
) -> float:
    """A request holds its prompt and what it has produced for one step an output token. The sum of that area over all
    requests, divided by the capacity, is a number of steps; each reads the weights, and all KV reads come on top."""
    if not len(prompts):
        return 0.0
    area = float(np.sum(outputs * prompts + outputs * (outputs - 1) / 2))
    steps = math.ceil(area / (kv_capacity_tokens * layout.data_parallel))
    weights = steps * _step_weight_bytes(shape, profile) * layout.data_parallel
    return (weights + _kv_read_bytes(shape, profile, prompts, outputs)) / (profile.most_bytes_per_s * layout.num_gpus)


def longest_request_bound_s(
    shape: ModelShape, profile: HardwareProfile, prompts: Tokens, outputs: Tokens, layout: Layout
) -> float:
    """A request alone: its prompt at peak rate or one reading of the weights, whichever is longer, and then one step
    after the other that reads the weights and its KV. The longest request of the job."""
    if not len(prompts):
        return 0.0
    bandwidth = profile.most_bytes_per_s * layout.gpus_per_replica
    peak = profile.most_flops(shape.dtype) * layout.gpus_per_replica
    weights_s = _step_weight_bytes(shape, profile) / bandwidth
    prefill_s = np.maximum(_request_flops(shape, prompts, np.ones_like(outputs)) / peak, weights_s)
    decode_s = (outputs - 1) * weights_s + _kv_read_bytes_each(shape, profile, prompts, outputs) / bandwidth
    return float(np.max(prefill_s + decode_s))


def _lengths(prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike) -> tuple[Tokens, Tokens]:
    prompts, outputs = np.asarray(prompt_tokens, dtype=np.int64), np.asarray(output_tokens, dtype=np.int64)
    if prompts.shape != outputs.shape or prompts.ndim != 1:
        raise ValueError(f"prompt and output lengths differ in shape: {prompts.shape} and {outputs.shape}")
    if len(prompts) and (prompts.min() < 1 or outputs.min() < 1):
        raise ValueError("every request has at least one prompt token and one output token")
    return prompts, outputs


def _request_flops(shape: ModelShape, prompts: Tokens, outputs: Tokens) -> npt.NDArray[np.float64]:
    computed = (prompts + outputs - 1).astype(np.float64)
    pairs = computed * (computed + 1) / 2
    if shape.sliding_window:
        growing = np.minimum(computed, shape.sliding_window)
        windowed = growing * (growing + 1) / 2 + (computed - growing) * shape.sliding_window
    else:
        windowed = pairs
    attention = shape.attention_flops(pairs, windowed)
    flops: npt.NDArray[np.float64] = (
        computed * shape.linear_flops_per_token
        - (computed - outputs) * shape.last_mlp_flops_per_token
        + outputs * float(shape.head_flops_per_sample)
        + attention
    )
    return flops


def _step_weight_bytes(shape: ModelShape, profile: HardwareProfile) -> float:
    """Weights that any step reads from memory: those in matrices that at least one token meets, and the head, less what
    a cache may keep of them."""
    numbers = float(shape.active_layer_parameters + shape.hidden_size * shape.vocab_size)
    return max(0.0, numbers * _stored_bytes(profile, shape.dtype_bytes) - _cache_bytes(profile))


def _kv_read_bytes(shape: ModelShape, profile: HardwareProfile, prompts: Tokens, outputs: Tokens) -> float:
    return float(np.sum(_kv_read_bytes_each(shape, profile, prompts, outputs)))


def _cache_bytes(profile: HardwareProfile) -> float:
    return profile.limits.cache_mib * 2.0**20 if profile.limits else 0.0


def _stored_bytes(profile: HardwareProfile, item_bytes: int) -> int:
    """Bytes in which a number may lie in memory, narrower than it is multiplied."""
    fewest = profile.limits.stored_bytes if profile.limits else 0
    return min(fewest or item_bytes, item_bytes)


def _kv_read_bytes_each(
    shape: ModelShape, profile: HardwareProfile, prompts: Tokens, outputs: Tokens
) -> npt.NDArray[np.float64]:
    """KV that each request's decodes read: contexts prompt + 1 to prompt + output - 1, cut at the window where there is
    one. Nothing where a cache has room for more than the weights."""
    if profile.limits and not _step_weight_bytes(shape, profile):
        return np.zeros(len(outputs))
    decodes = (outputs - 1).astype(np.float64)
    contexts = decodes * prompts + decodes * (decodes + 1) / 2
    full_kv_heads, full_head_dim = shape.full_heads
    total = shape.num_full_layers * full_kv_heads * full_head_dim * contexts
    if shape.num_windowed_layers:
        growing = np.clip(shape.sliding_window - prompts, 0, decodes)
        windowed = growing * prompts + growing * (growing + 1) / 2 + (decodes - growing) * shape.sliding_window
        total = total + shape.num_windowed_layers * shape.num_kv_heads * shape.head_dim * windowed
    read: npt.NDArray[np.float64] = total * (2.0 * _stored_bytes(profile, shape.kv_dtype_bytes))
    return read
