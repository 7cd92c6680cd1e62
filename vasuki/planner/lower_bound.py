"""Seconds that no schedule of a job can beat, from rates that nothing beats and the lengths of its requests.

Rates come from the datasheet, or from measurements where these are higher; on a CPU from its instructions and fastest
clock. What a CPU's caches hold need not come from memory in every step.

The largest of four bounds counts:

    compute          every token but each request's last passes all layers (the last MLP only where it is sampled), and
                     every sampled one the head
    memory           weights are read once a step, in at least as many steps as the longest output has tokens; decodes
                     read their KV
    kv_area          a request of p prompt and o output tokens holds o p + o (o - 1) / 2 tokens, summed over its steps;
                     the sum over all requests, divided by the capacity, is a number of steps that read the weights
    longest_request  the longest request alone: its prompt, then one step after the other
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape
from vasuki.planner.job_sums import JobSums, Number, Sums, sums_of_rows


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


def job_lower_bound(
    shape: ModelShape, profile: HardwareProfile, job: JobSums, kv_tokens: float, layout: Layout | None = None
) -> LowerBound:
    """Lower bounds of the makespan of a job whose lengths are known.

    They hold for any engine that samples one token of a sequence a step and keeps its KV as heads attend to it. What
    rows begin with in common is computed, held and read for nothing.

    Args:
        shape: the model.
        profile: the device.
        job: what there is to do.
        kv_tokens: of KV that can take part in one step of a replica, at most; infinite where KV may be streamed.
        layout: rates add up over its GPUs.
    """
    if job.is_empty:
        return LowerBound(0.0, 0.0, 0.0, 0.0)
    layout = layout or Layout()
    return LowerBound(
        compute_s=compute_bound_s(shape, profile, job, layout),
        memory_s=memory_bound_s(shape, profile, job, layout),
        kv_area_s=kv_area_bound_s(shape, profile, job, kv_tokens, layout),
        longest_request_s=longest_request_bound_s(shape, profile, job, layout),
    )


def compute_bound_s(shape: ModelShape, profile: HardwareProfile, job: JobSums, layout: Layout) -> float:
    """Every token but a request's last one passes all layers, but for the last MLP where nothing is sampled from it;
    every sampled one comes out of the head; at peak rate."""
    return float(_compute_s(shape, profile, job.sums)) / layout.num_gpus


def memory_bound_s(shape: ModelShape, profile: HardwareProfile, job: JobSums, layout: Layout) -> float:
    """Weights are read once a step and there are at least as many steps as the longest output has tokens, with
    all other requests in the same steps; each decode reads its sequence's KV once; at peak bandwidth."""
    weights = float(job.prompts.outputs.max()) * _step_weight_bytes(shape, profile)
    read = float(_kv_read_bytes(shape, profile, job.sums))
    return (weights + read) / (profile.most_bytes_per_s * layout.num_gpus)


def kv_area_bound_s(
    shape: ModelShape, profile: HardwareProfile, job: JobSums, kv_tokens: float, layout: Layout
) -> float:
    """A request holds its prompt and what it has produced for one step an output token. The sum of that area over all
    requests, divided by the capacity, is a number of steps; each reads the weights, and all KV reads come on top."""
    steps = math.ceil(job.sums.held / (kv_tokens * layout.data_parallel))
    weights = steps * _step_weight_bytes(shape, profile) * layout.data_parallel
    read = float(_kv_read_bytes(shape, profile, job.sums))
    return (weights + read) / (profile.most_bytes_per_s * layout.num_gpus)


def longest_request_bound_s(shape: ModelShape, profile: HardwareProfile, job: JobSums, layout: Layout) -> float:
    """A request alone: its prompt at peak rate or one reading of the weights, whichever is longer, and then one step
    after the other that reads the weights and its KV. The longest request of the job."""
    prompts, outputs = job.prompts.own, job.prompts.outputs  # of requests with equal prompts, the longest
    bandwidth = profile.most_bytes_per_s * layout.gpus_per_replica
    weights_s = _step_weight_bytes(shape, profile) / bandwidth
    first, all_tokens = (sums_of_rows(shape, prompts, upto, prompts) for upto in (np.ones_like(outputs), outputs))
    prefill_s = np.maximum(_compute_s(shape, profile, first) / layout.gpus_per_replica, weights_s)
    decode_s = (outputs - 1) * weights_s + _kv_read_bytes(shape, profile, all_tokens) / bandwidth
    return float(np.max(prefill_s + decode_s))


def _compute_s(shape: ModelShape, profile: HardwareProfile, sums: Sums[Number]) -> Number:
    """At peak rates of one device; of layers' matrices at that of their products, if these have a type of their own."""
    products = sums.tokens * shape.linear_flops_per_token
    products = products - (sums.tokens - sums.samples) * shape.last_mlp_flops_per_token
    others = sums.samples * float(shape.head_flops_per_sample)
    others = others + shape.attention_flops(sums.pairs + sums.contexts, sums.windowed_pairs + sums.windowed_contexts)
    peak = profile.most_flops(shape.dtype)
    if not shape.product_dtype:
        return (products + others) / peak
    return products / profile.most_flops(shape.product_dtype) + others / peak


def _step_weight_bytes(shape: ModelShape, profile: HardwareProfile) -> float:
    """Weights that any step reads from memory: those in matrices that at least one token meets, and the head, less what
    a cache may keep of them."""
    numbers = float(shape.active_layer_parameters + shape.hidden_size * shape.vocab_size)
    read = numbers * _stored_bytes(profile, shape.dtype_bytes) - shape.saved_bytes
    return max(0.0, read - _cache_bytes(profile))


def _cache_bytes(profile: HardwareProfile) -> float:
    return profile.limits.cache_mib * 2.0**20 if profile.limits else 0.0


def _stored_bytes(profile: HardwareProfile, item_bytes: int) -> int:
    """Bytes in which a number may lie in memory, narrower than it is multiplied."""
    fewest = profile.limits.stored_bytes if profile.limits else 0
    return min(fewest or item_bytes, item_bytes)


def _kv_read_bytes(shape: ModelShape, profile: HardwareProfile, sums: Sums[Number]) -> Number:
    """KV that decodes read, cut at the window where there is one. Nothing where a cache has room for more than the
    weights."""
    full_kv_heads, full_head_dim = shape.full_heads
    read = shape.num_full_layers * full_kv_heads * full_head_dim * sums.own_contexts
    read = read + shape.num_windowed_layers * shape.num_kv_heads * shape.head_dim * sums.windowed_own_contexts
    in_cache = profile.limits is not None and not _step_weight_bytes(shape, profile)
    return read * (0.0 if in_cache else 2.0 * _stored_bytes(profile, shape.kv_dtype_bytes))
