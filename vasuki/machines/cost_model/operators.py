"""Seconds of single operators on one device: rooflines, corrected by what was measured."""

from __future__ import annotations

from collections.abc import Callable

from vasuki.machines.cost_model.measured import MeasuredRatios, RatioCurve
from vasuki.machines.cost_model.rooflines import OperatorCost, Rooflines, roofline
from vasuki.machines.profile import ElementwiseOperator, HardwareProfile


class OperatorModel:
    """Operators one by one. A matrix that was measured follows its own points; any other follows the geometric mean of
    the measured ones.

    What operators take longer in a step, whose other operators use the same caches and the same memory, `LayerModel`
    adds.

    Raises:
        ProfileError: the profile has no rate for the dtype.
    """

    def __init__(self, profile: HardwareProfile, dtype: str, kv_dtype: str = "") -> None:
        self._rooflines = Rooflines(profile, dtype, kv_dtype)
        self._ratios = MeasuredRatios.of(profile.measured, self._rooflines) if profile.measured else MeasuredRatios()

    def matmul(self, tokens: float, k: int, n: int, copies: int = 1) -> OperatorCost:
        """`copies` products `[tokens / copies, k] x [k, n]` with different weights, as one kernel."""
        alone = self._rooflines.matmul(tokens, k, n, copies)
        return _corrected(alone, self._ratios.matmul.get((k, n)) or self._ratios.any_matmul, tokens / copies)

    def elementwise(self, operator: ElementwiseOperator, tokens: float, bytes_per_token: float) -> OperatorCost:
        """A memory-bound operator."""
        alone = self._rooflines.elementwise(operator, tokens, bytes_per_token)
        return _corrected(alone, self._ratios.elementwise.get(operator), alone.memory_bytes)

    def decode_attention(self, context_tokens: float, heads: float, kv_heads: float, head_dim: int) -> OperatorCost:
        """One layer of attention for single-token chunks, given the sum of their contexts."""
        if not context_tokens:
            return OperatorCost()
        alone = self._rooflines.attention(context_tokens, context_tokens, heads, kv_heads, head_dim)
        return _corrected(alone, self._ratios.decode_attention, context_tokens * heads)

    def chunk_attention(
        self, pairs: float, context_tokens: float, heads: float, kv_heads: float, head_dim: int
    ) -> OperatorCost:
        """One layer of attention for longer chunks, given the sums of their (query, key) pairs and contexts."""
        if not pairs:
            return OperatorCost()
        alone = self._rooflines.attention(pairs, context_tokens, heads, kv_heads, head_dim)
        return _corrected(alone, self._ratios.chunk_attention, pairs * heads)

    def recurrence(self, flops: float, memory_bytes: float, kernels: int) -> OperatorCost:
        """A recurrent layer between its matrices."""
        return self._rooflines.recurrence(flops, memory_bytes, kernels)

    def attention_seconds(self, heads: float, kv_heads: float, head_dim: int) -> Callable[[float, float, float], float]:
        """A function of decode contexts, chunk pairs and chunk contexts: one layer of both kinds of attention.

        `decode_attention` and `chunk_attention` without the parts, for those who ask a million times.
        """
        rooflines = self._rooflines
        pair_s, read_s = rooflines.pair_s(heads, head_dim), rooflines.kv_read_s(kv_heads, head_dim)
        kernel_s = rooflines.kernel_s
        decode_s = roofline(pair_s, read_s)  # a decode has as many pairs as context, so its roofline is linear
        decode_ratio, chunk_ratio = self._ratios.decode_attention, self._ratios.chunk_attention

        def seconds(decode_context: float, pairs: float, chunk_context: float) -> float:
            total_s = 0.0
            if decode_context:
                ratio = decode_ratio(decode_context * heads) if decode_ratio else 1.0
                total_s = ratio * (kernel_s + decode_context * decode_s)
            if pairs:
                ratio = chunk_ratio(pairs * heads) if chunk_ratio else 1.0
                total_s += ratio * (kernel_s + roofline(pairs * pair_s, chunk_context * read_s))
            return total_s

        return seconds


def _corrected(alone: OperatorCost, ratio: RatioCurve | None, size: float) -> OperatorCost:
    return alone.slowed(ratio(size)) if ratio else alone
