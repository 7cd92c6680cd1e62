"""The operators of a layer, and of what is outside the layers, on each device of a tensor-parallel group."""

from __future__ import annotations

import math

from vasuki.machines.cost_model.measured import RatioCurve
from vasuki.machines.cost_model.operators import OperatorModel
from vasuki.machines.cost_model.recurrent import RecurrentModel
from vasuki.machines.cost_model.rooflines import OperatorCost
from vasuki.machines.cost_model.sharding import local_heads, local_kv_width, local_matrix
from vasuki.machines.cost_model.stages import Part
from vasuki.machines.cost_model.work import StepWork
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import Matrix, ModelShape


class LayerModel:
    """Operators as they run in a step, which takes longer than in isolation where the profile has measured it."""

    def __init__(self, shape: ModelShape, profile: HardwareProfile, layout: Layout, operators: OperatorModel) -> None:
        self._shape = shape
        self._layout = layout
        self._operators = operators
        heads, (full_kv_heads, kv_heads) = local_heads(shape, layout), shape.kv_heads_on(layout.tensor_parallel)
        # (query heads, KV heads, size of a head) of layers that attend to everything, and of those with a window
        self.full_heads = (heads, full_kv_heads, shape.full_heads[1])
        self.windowed_heads = (heads, kv_heads, shape.head_dim)
        measured = profile.measured.in_step if profile.measured else None
        self._in_step_ratio = RatioCurve(measured.tokens, measured.ratio) if measured else None
        self._recurrent = RecurrentModel(shape, profile, layout, operators) if shape.recurrent else None
        self._in_step_cache: dict[int, float] = {}
        self._linear_cache: dict[int, tuple[OperatorCost, OperatorCost]] = {}
        self._last_mlp_cache: dict[int, tuple[OperatorCost, OperatorCost]] = {}
        self._outside_cache: dict[tuple[int, int], OperatorCost] = {}
        # One layer's attention without the parts, before `in_step`.
        self.attention_seconds = operators.attention_seconds(*self.full_heads)
        self.windowed_attention_seconds = operators.attention_seconds(*self.windowed_heads)

    @property
    def is_uniform(self) -> bool:
        """Whether layers with a window are like those without, where it holds all."""
        return self.full_heads == self.windowed_heads

    def in_step(self, num_tokens: int) -> float:
        """Time of operators within a step of `num_tokens`, as a multiple of their time in isolation."""
        if self._in_step_ratio is None:
            return 1.0
        cached = self._in_step_cache.get(num_tokens)
        if cached is None:
            cached = self._in_step_cache[num_tokens] = self._in_step_ratio(max(1, num_tokens))
        return cached

    def linear(self, num_tokens: int) -> tuple[OperatorCost, OperatorCost]:
        """Mean matmuls and elementwise operators of one layer, without `recurrent`."""
        cached = self._linear_cache.get(num_tokens)
        if cached is None:
            in_step = self.in_step(num_tokens)
            cached = self.matmuls(num_tokens).slowed(in_step), self.elementwise(num_tokens).slowed(in_step)
            self._linear_cache[num_tokens] = cached
        return cached

    def recurrent(self, work: StepWork) -> tuple[OperatorCost, OperatorCost]:
        """Matmuls of all recurrent layers, and what is between them."""
        if self._recurrent is None:
            return OperatorCost(), OperatorCost()
        in_step = self.in_step(work.num_tokens)
        matmuls, between = self._recurrent.step(work)
        return matmuls.slowed(in_step), between.slowed(in_step)

    def in_part(self, work: StepWork, part: Part) -> tuple[OperatorCost, OperatorCost]:
        """Matmuls and elementwise operators of a part's layers. Only sampled tokens pass the model's last MLP."""
        num_tokens = work.num_tokens
        linear, elementwise = [cost.scaled(part.layers) for cost in self.linear(num_tokens)]
        matmuls, between = [cost.scaled(part.layers / self._shape.num_layers) for cost in self.recurrent(work)]
        linear, elementwise = linear + matmuls, elementwise + between
        if part.head:
            in_step = self.in_step(num_tokens)
            for tokens, times in ((num_tokens, -1), (min(num_tokens, max(1, work.num_samples)), 1)):
                matmuls, activation = self._last_mlp(tokens)
                linear += matmuls.slowed(in_step).scaled(times)
                elementwise += activation.slowed(in_step).scaled(times)
        return linear, elementwise

    def _last_mlp(self, num_tokens: int) -> tuple[OperatorCost, OperatorCost]:
        cached = self._last_mlp_cache.get(num_tokens)
        if cached is None:
            cached = self._last_mlp_cache[num_tokens] = self.last_mlp(num_tokens)
        return cached

    # Operators in isolation, without the `in_step` ratio. They also take arrays of step sizes: see `curves`.

    def last_mlp(self, num_tokens: int) -> tuple[OperatorCost, OperatorCost]:
        """Matmuls and activation of the last layer's MLP, which has experts if any layer has."""
        shape, matmuls = self._shape, OperatorCost()
        for matrix in shape.expert_matrices or shape.dense_matrices:
            matmuls += self._matmul(matrix, num_tokens)
        width = self._expert_width if shape.expert_matrices else shape.intermediate_size
        return matmuls, self._activation(num_tokens, width)

    def matmuls(self, num_tokens: int) -> OperatorCost:
        """Mean matmuls of one layer, without recurrent layers'."""
        shape, total = self._shape, OperatorCost()
        for matrices, layers in shape.packed_matrices:
            for matrix in matrices if layers else ():
                total += self._matmul(matrix, num_tokens).scaled(layers / shape.num_layers)
        return total

    def _matmul(self, matrix: Matrix, num_tokens: int) -> OperatorCost:
        """One matrix of a layer. Experts that no token chose are not read: with T tokens that each choose k of E at
        random, E (1 - (1 - k/E)^T) of them are."""
        k, n = local_matrix(matrix, self._shape, self._layout)
        if matrix.copies == 1:
            return self._operators.product(num_tokens, k, n)
        used = matrix.copies * (1.0 - (1.0 - matrix.used / matrix.copies) ** num_tokens)
        return self._operators.expert_matmul(num_tokens * matrix.used, k, n, used)

    def elementwise(self, num_tokens: int) -> OperatorCost:
        """Mean elementwise operators of one layer, without recurrent layers'."""
        shape, operators = self._shape, self._operators
        item, hidden = shape.dtype_bytes, shape.hidden_size
        attending = shape.num_attention_layers / shape.num_layers
        queries = attending * shape.query_width / self._layout.tensor_parallel
        keys = attending * local_kv_width(shape, self._layout)
        widths = shape.num_dense_layers * shape.intermediate_size + shape.num_expert_layers * self._expert_width
        return (
            operators.elementwise("norm", num_tokens, 2 * hidden * item).scaled(shape.norms_per_layer)
            + operators.elementwise("rope", num_tokens, 2 * queries * item + 2 * keys * (item + shape.kv_dtype_bytes))
            + self._activation(num_tokens, widths / shape.num_layers)
            + operators.elementwise("residual", num_tokens, 3 * hidden * item).scaled(2)
        )

    @property
    def _expert_width(self) -> int:
        shape = self._shape
        return shape.experts_per_token * shape.expert_intermediate_size + shape.shared_intermediate_size

    def _activation(self, num_tokens: int, mlp_width: float) -> OperatorCost:
        shape = self._shape
        values = (3 if shape.gated_mlp else 2) * mlp_width / self._layout.tensor_parallel
        return self._operators.elementwise("activation", num_tokens, values * shape.dtype_bytes)

    def attention(self, work: StepWork, layers: int) -> OperatorCost:
        """Attention of `layers` layers, windowed ones in proportion."""
        shape = self._shape
        full = self._layer_attention(
            self.full_heads, work.decode_context_tokens, work.chunk_pairs, work.chunk_context_tokens
        )
        full = full.slowed(in_step := self.in_step(work.one_call.num_tokens))
        full = full.scaled(layers * shape.num_full_layers / shape.num_layers)
        if not shape.num_windowed_layers:
            return full
        windowed = self._layer_attention(
            self.windowed_heads,
            work.windowed_decode_context_tokens,
            work.windowed_chunk_pairs,
            work.windowed_chunk_context_tokens,
        )
        return full + windowed.slowed(in_step).scaled(layers * shape.num_windowed_layers / shape.num_layers)

    def _layer_attention(
        self, heads: tuple[int, int, int], decode_context: float, chunk_pairs: float, chunk_context: float
    ) -> OperatorCost:
        """Decodes and longer chunks run as two kernels, one bound by memory, the other by compute (Sarathi, 4.3.1)."""
        decodes = self._operators.decode_attention(decode_context, *heads)
        if not chunk_pairs:
            return decodes
        if not decode_context:
            return self._operators.chunk_attention(chunk_pairs, chunk_context, *heads)
        return decodes + self._operators.chunk_attention(chunk_pairs, chunk_context, *heads)

    def outside(self, num_tokens: int, num_samples: int, part: Part) -> OperatorCost:
        """Embedding of every token, and head and sampling of sampled ones."""
        key = (num_tokens if part.embedding else 0, num_samples if part.head else 0)
        cached = self._outside_cache.get(key)
        if cached is None:
            embedded, sampled = key
            cached = OperatorCost()
            if embedded:
                cached += self.embedding(embedded)
            if sampled:
                cached += self.head(sampled)
            self._outside_cache[key] = cached
        return cached.slowed(self.in_step(num_tokens))

    def embedding(self, num_tokens: int) -> OperatorCost:
        """Embedding time in isolation."""
        return self._operators.elementwise(
            "embedding", num_tokens, 2 * self._shape.hidden_size * self._shape.dtype_bytes
        )

    def head(self, num_samples: int) -> OperatorCost:
        """Time in isolation of the output head over sampled tokens, and of three passes over float32 logits to
        sample."""
        vocab = math.ceil(self._shape.vocab_size / self._layout.tensor_parallel)
        matmul = self._operators.matmul(num_samples, self._shape.hidden_size, vocab)
        return matmul + self._operators.elementwise("activation", num_samples, 3 * 4 * vocab)
