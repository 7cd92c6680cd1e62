"""What each device of a tensor-parallel group holds of a layer, cut as Megatron-LM cuts it."""

from __future__ import annotations

import math

from vasuki.models.layout import Layout
from vasuki.models.shape import Matrix, ModelShape


def local_heads(shape: ModelShape, layout: Layout) -> int:
    """Query heads."""
    return shape.num_heads // layout.tensor_parallel


def local_kv_width(shape: ModelShape, layout: Layout) -> int:
    """Numbers of a token's keys, on average over layers."""
    return math.ceil(shape.kv_width * shape.kv_share(layout.tensor_parallel))


def local_matrix(matrix: Matrix, shape: ModelShape, layout: Layout) -> tuple[int, int]:
    """(k, n) of a matrix: the first of a pair is cut by columns, the second by rows."""
    group = layout.tensor_parallel
    if group == 1 or matrix.name in ("router", "q_a", "kv_a"):
        return matrix.k, matrix.n
    if matrix.name in ("o", "down", "shared_down"):
        return math.ceil(matrix.k / group), matrix.n
    if matrix.name == "qkv":
        asked = (2 if shape.gated_attention else 1) * shape.query_width
        return matrix.k, math.ceil(asked / group) + 2 * local_kv_width(shape, layout)
    return matrix.k, math.ceil(matrix.n / group)
