"""Seconds of single operators on one device: rooflines, corrected by what was measured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vasuki.machines.cost_model.measured import MeasuredRatios, RatioCurve
from vasuki.machines.cost_model.rooflines import OperatorCost, Rooflines, roofline
from vasuki.machines.measured_points import ElementwiseOperator
from vasuki.machines.profile import HardwareProfile

DECODE_PLACES = 200  # between the contexts of the first measured decode and the last


class OperatorModel:
    """Operators one by one. A matrix that was measured follows its own points; any other follows the geometric mean of
    the measured ones.

    What operators take longer in a step, whose other operators use the same caches and the same memory, `LayerModel`
    adds.

    Raises:
        ProfileError: the profile has no rate for one of the dtypes.
    """

    def __init__(self, profile: HardwareProfile, dtype: str, kv_dtype: str = "", product_dtype: str = "") -> None:
        self._rooflines = Rooflines(profile, dtype, kv_dtype, product_dtype)
        self._rounds = bool(product_dtype)
        self._ratios = MeasuredRatios()
        if profile.measured:
            self._ratios = MeasuredRatios.of(profile.measured, Rooflines(profile.as_measured(), dtype, kv_dtype))

    def matmul(self, tokens: float, k: int, n: int, copies: int = 1) -> OperatorCost:
        """`copies` products `[tokens / copies, k] x [k, n]` with different weights, as one kernel."""
        alone = self._rooflines.matmul(tokens, k, n, copies)
        return self._corrected(alone, self._matmul_ratio(k, n), tokens / copies)

    def product(self, tokens: float, k: int, n: int) -> OperatorCost:
        """One of a layer's products. Where it has a type of its own, a kernel rounds what it takes."""
        if not self._rounds:
            return self.matmul(tokens, k, n)
        alone = self._rooflines.product(tokens, k, n)
        bytes_per_token = k * (self._rooflines.dtype_bytes + self._rooflines.product_dtype_bytes)
        rounding = self.elementwise("activation", tokens, bytes_per_token)
        return rounding + self._corrected(alone, self._matmul_ratio(k, n), tokens)

    def expert_matmul(self, tokens: float, k: int, n: int, used: float) -> OperatorCost:
        """Price a matmul of experts, `used` of them on average."""
        return self.matmul(tokens, k, n, max(1, round(used)))

    def elementwise(self, operator: ElementwiseOperator, tokens: float, bytes_per_token: float) -> OperatorCost:
        """A memory-bound operator."""
        if not bytes_per_token:
            return OperatorCost()
        alone = self._rooflines.elementwise(operator, tokens, bytes_per_token)
        return self._corrected(alone, self._ratios.elementwise.get(operator), alone.memory_bytes)

    def decode_attention(self, context_tokens: float, heads: float, kv_heads: float, head_dim: int) -> OperatorCost:
        """One layer of attention for single-token chunks, given the sum of their contexts."""
        if not context_tokens:
            return OperatorCost()
        alone = self._rooflines.attention(context_tokens, context_tokens, heads, kv_heads, head_dim)
        return self._corrected(alone, self._ratios.decode_attention, context_tokens * heads)

    def chunk_attention(
        self, pairs: float, context_tokens: float, heads: float, kv_heads: float, head_dim: int
    ) -> OperatorCost:
        """One layer of attention for longer chunks, given the sums of their (query, key) pairs and contexts."""
        if not pairs:
            return OperatorCost()
        alone = self._rooflines.attention(pairs, context_tokens, heads, kv_heads, head_dim)
        return self._corrected(alone, self._ratios.chunk_attention, pairs * heads)

    def recurrence(self, flops: float, memory_bytes: float, kernels: int, launched: bool) -> OperatorCost:
        """A recurrent layer between its matrices."""
        return self._rooflines.recurrence(flops, memory_bytes, kernels, launched)

    def ratio(self, curve: RatioCurve | None, size: float) -> float:
        """What was measured over what rooflines say; 1 where nothing was."""
        return curve(size) if curve else 1.0

    def _matmul_ratio(self, k: int, n: int) -> RatioCurve | None:
        return self._ratios.matmul.get((k, n)) or self._ratios.any_matmul

    def _corrected(self, alone: OperatorCost, curve: RatioCurve | None, size: float) -> OperatorCost:
        return alone.slowed(self.ratio(curve, size)) if curve else alone

    def attention_seconds(self, heads: float, kv_heads: float, head_dim: int) -> Callable[[float, float, float], float]:
        """A function of decode contexts, chunk pairs and chunk contexts: one layer of both kinds of attention.

        `decode_attention` and `chunk_attention` without the parts, for those who ask a million times.
        """
        attention_s, kernel_s = self._rooflines.attention_s(heads, kv_heads, head_dim), self._rooflines.kernel_s
        token_s = attention_s(1.0, 1.0) - kernel_s  # of a decode's context, whose pairs are as many
        decode_ratio, chunk_ratio = self._ratios.decode_attention, self._ratios.chunk_attention

        def seconds(decode_context: float, pairs: float, chunk_context: float) -> float:
            total_s = 0.0
            if decode_context:
                ratio = decode_ratio(decode_context * heads) if decode_ratio else 1.0
                total_s = ratio * (kernel_s + decode_context * token_s)
            if pairs:
                ratio = chunk_ratio(pairs * heads) if chunk_ratio else 1.0
                total_s += ratio * attention_s(pairs, chunk_context)
            return total_s

        return seconds

    # --- no less than this -------------------------------------------------------------------------------------------

    @property
    def attention_kernel_s(self) -> float:
        """The least of one layer's attention, of any kind, that depends on nothing."""
        curves = (self._ratios.decode_attention, self._ratios.chunk_attention)
        return self._rooflines.kernel_s * min(_least(curve) for curve in curves)

    def least_decode_attention(
        self, heads: float, kv_heads: float, head_dim: int
    ) -> tuple[list[tuple[float, float]], float]:
        """Points (contexts, seconds) by rising contexts, and the slope beyond them: one layer's `decode_attention` is
        nowhere below the lines between them, without `attention_kernel_s`.

        A ratio rises or falls all the way between two measured sizes, so the smaller one of any two places in between
        is the least there.
        """
        kernel_s, least_s = self._rooflines.kernel_s, self.attention_kernel_s
        context_s = roofline(self._rooflines.pair_s(heads, head_dim), self._rooflines.kv_read_s(kv_heads, head_dim))
        curve = self._ratios.decode_attention
        if curve is None:
            return [(0.0, 0.0), (1.0, kernel_s - least_s + context_s)], context_s
        measured = np.maximum(1.0, curve.sizes / heads)
        places = np.unique([1.0, *measured, *np.geomspace(measured[0], measured[-1], DECODE_PLACES)])
        ratios = curve.at(places * heads)
        points = [(0.0, 0.0)]
        for place, ratio, end, end_ratio in zip(places, ratios, places[1:], ratios[1:], strict=False):
            least = float(min(ratio, end_ratio))
            points += [(float(at), least * (kernel_s + float(at) * context_s) - least_s) for at in (place, end)]
        return points, float(ratios[-1]) * context_s

    def least_chunk_attention(self, heads: float, kv_heads: float, head_dim: int) -> tuple[float, float]:
        """Seconds of a pair and of a token of context: one layer's `chunk_attention` is nowhere below their roofline,
        without `attention_kernel_s`."""
        least = _least(self._ratios.chunk_attention)
        rooflines = self._rooflines
        return least * rooflines.pair_s(heads, head_dim), least * rooflines.kv_read_s(kv_heads, head_dim)


def _least(curve: RatioCurve | None) -> float:
    return curve.least_from(1.0) if curve else 1.0
