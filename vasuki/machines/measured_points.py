"""What was measured on a machine: operators at points by size, and what they take longer in a step."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vasuki.machines.profile_values import Count, Fraction, NonNegative, Positive, ProfileSection

ElementwiseOperator = Literal["norm", "rope", "activation", "residual", "embedding"]  # "rope" with the KV write


def _check_pairs(tokens: tuple[int, ...], values: tuple[float, ...], name: str) -> None:
    if len(tokens) != len(values) or not tokens:
        raise ValueError(f"tokens has {len(tokens)} entries and {name} has {len(values)}; they come in pairs")
    if any(after <= before for before, after in itertools.pairwise(tokens)):
        raise ValueError("tokens must rise")


class _TokenSeries(ProfileSection):
    """Times by the number of tokens."""

    tokens: tuple[Count, ...]
    """Rows, rising."""
    us: tuple[Positive, ...]
    """Microseconds, one for each entry of `tokens`."""

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        _check_pairs(self.tokens, self.us, "us")
        return self


class MatmulPoints(_TokenSeries):
    """Measured times of `[tokens, k] x [k, n]`."""

    k: Count
    """Inner size."""
    n: Count
    """Output columns."""
    dtype: str
    """Of inputs and weights."""


class ElementwisePoints(_TokenSeries):
    """Measured times of one memory-bound operator."""

    operator: ElementwiseOperator
    """Which one."""
    bytes_per_token: Count
    """What it reads and writes for a token."""


class AttentionPoint(ProfileSection):
    """One measured attention call of one layer."""

    sequences: Count
    """In the call, all of the same lengths."""
    tokens: Count
    """Query tokens of each; 1 is a decode."""
    context: Count
    """Context of each after the call."""
    us: Positive
    """Microseconds."""


class AttentionPoints(ProfileSection):
    """Measured attention of one head layout."""

    heads: Count
    """Query heads."""
    kv_heads: Count
    """Key and value heads."""
    head_dim: Count
    """Size of a head."""
    dtype: str
    """Of queries, and of keys and values unless they are kept in another."""
    kv_dtype: str = ""
    """Of keys and values, where they are."""
    points: Annotated[tuple[AttentionPoint, ...], Field(min_length=1)]
    """In any order."""


class InStep(ProfileSection):
    """What the operators of a step take there, over what they take alone: a step's other operators use the same caches
    and the same memory."""

    tokens: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Tokens of a step, rising."""
    ratio: tuple[Positive, ...]
    """One for each entry of `tokens`."""

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        _check_pairs(self.tokens, self.ratio, "ratio")
        return self


class Rates(ProfileSection):
    """Rates by which rooflines are drawn, in one place."""

    memory_gb_per_s: Positive
    """Of memory."""
    peak_tflops: Annotated[dict[str, Positive], Field(min_length=1)]
    """By dtype."""
    processors: Count
    """How many output tiles are computed at once."""
    tile_rows: Count
    """Rows of the matmul tile."""
    matmul: Fraction
    """Share of the peak."""
    bandwidth: Fraction
    """Share of the memory bandwidth."""
    attention: Fraction
    """Share of the peak."""
    kv_read: Fraction
    """Share of the memory bandwidth."""
    launch_us: NonNegative
    """Host time of an operator."""
    kernel_us: NonNegative
    """Shortest time of a kernel."""


class Measured(ProfileSection):
    """Operator times that take precedence over the analytical rooflines, which then only fill in between."""

    source: str
    """Date, device, driver, script; or whose public measurements."""
    model: str = ""
    """Sizes of the model whose steps were measured, which runs of other models don't go by. Empty where operators were
    measured, which all models have."""
    rates: Rates | None = None
    """Of the profile that the times were measured for. One with other rates keeps the shares of them that operators
    reached, not the times. Not given: the profile's own, whatever they are."""
    matmul: tuple[MatmulPoints, ...] = ()
    """Matrix products, by size."""
    elementwise: tuple[ElementwisePoints, ...] = ()
    """Memory-bound operators."""
    attention: tuple[AttentionPoints, ...] = ()
    """Attention calls."""
    in_step: InStep | None = None
    """Whole steps against the sum of their operators."""
    spread: NonNegative = 0
    """By what share the middle half of repeated whole steps lay apart: how far the machine's pace can be told."""
