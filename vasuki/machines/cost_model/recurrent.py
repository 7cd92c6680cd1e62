"""Layers that carry a state from token to token: their matrices, and what is between them.

The decodes of a step pass such a layer together, and each longer chunk by itself, so weights are read once for each.
(Prompts that happen to be equally long pass it together, too, which is not counted on here.)
"""

from __future__ import annotations

from vasuki.machines.cost_model.operators import OperatorModel
from vasuki.machines.cost_model.rooflines import OperatorCost
from vasuki.machines.cost_model.sharding import local_matrix
from vasuki.machines.cost_model.stages import recorded_steps
from vasuki.machines.cost_model.work import StepWork
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import ModelShape


class RecurrentModel:
    """The recurrent layers of a model, which has some, on each device of a tensor-parallel group."""

    def __init__(self, shape: ModelShape, profile: HardwareProfile, layout: Layout, operators: OperatorModel) -> None:
        assert shape.recurrent is not None
        self._layer = shape.recurrent
        self._item = shape.dtype_bytes
        self._row_bytes = shape.state_bytes / self._layer.layers
        self._matrices = [local_matrix(matrix, shape, layout) for matrix in self._layer.matrices]
        self._devices = layout.tensor_parallel
        self._operators = operators
        self._replays_decodes = recorded_steps(shape, profile, layout).rows > 0

    def step(self, work: StepWork) -> tuple[OperatorCost, OperatorCost]:
        """Matmuls of all recurrent layers, and what is between them."""
        matmuls, between = OperatorCost(), OperatorCost()
        if work.num_decodes:
            matmuls, between = self.decodes(work.num_decodes, beside_prompts=work.num_chunks > 0)
        if chunks := work.num_chunks:
            each_matmuls, each_between = self.chunk((work.num_tokens - work.num_decodes) / chunks)
            matmuls, between = matmuls + each_matmuls.scaled(chunks), between + each_between.scaled(chunks)
        return matmuls, between

    def decodes(self, rows: int, beside_prompts: bool = False) -> tuple[OperatorCost, OperatorCost]:
        """Price rows that pass together, a token of each."""
        return self._of_layers(rows, rows, launched=beside_prompts or not self._replays_decodes)

    def chunk(self, tokens: float) -> tuple[OperatorCost, OperatorCost]:
        """Price a longer chunk."""
        return self._of_layers(tokens, 1, launched=True)

    def _of_layers(self, tokens: float, rows: int, launched: bool) -> tuple[OperatorCost, OperatorCost]:
        """Price tokens that pass together, of so many rows."""
        layer, operators, matmuls = self._layer, self._operators, OperatorCost()
        for k, n in self._matrices:
            matmuls += operators.matmul(tokens, k, n)
        flops = tokens * layer.flops_per_token
        moved = 2 * rows * self._row_bytes + tokens * layer.numbers_per_token * self._item
        between = operators.recurrence(flops / self._devices, moved / self._devices, layer.kernels, launched)
        return matmuls.scaled(layer.layers), between.scaled(layer.layers)
