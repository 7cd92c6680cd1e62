"""Layers that carry a state from token to token: their matrices, and what is between them.

The decodes of a step pass such a layer together, and each longer chunk by itself, so weights are read once for each.
(Prompts that happen to be equally long pass it together, too, which is not counted on here.)
"""

from __future__ import annotations

from collections.abc import Iterable

from vasuki.machines.cost_model.measured import RatioCurve
from vasuki.machines.cost_model.operators import OperatorModel
from vasuki.machines.cost_model.rooflines import OperatorCost
from vasuki.machines.cost_model.sharding import local_matrix
from vasuki.machines.cost_model.work import StepWork
from vasuki.machines.measured_points import RecurrentPoints
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout
from vasuki.models.shape import DTYPE_BYTES, Matrix, ModelShape, Recurrent

Group = tuple[float, int]  # tokens, and rows that they belong to


class RecurrentModel:
    """The recurrent layers of a model, which has some, on each device of a tensor-parallel group.

    A measured layer has its points met; any other of its type takes as much longer than is said here as that one does.
    """

    def __init__(self, shape: ModelShape, profile: HardwareProfile, layout: Layout, operators: OperatorModel) -> None:
        assert shape.recurrent is not None
        self._layer = shape.recurrent
        self._item = shape.dtype_bytes
        self._row_bytes = shape.state_bytes / self._layer.layers
        self._matrices = [local_matrix(matrix, shape, layout) for matrix in self._layer.matrices]
        self._devices = layout.tensor_parallel
        self._operators = operators
        measured = profile.measured.recurrent if profile.measured else None
        self._decode_ratio: RatioCurve | None = None
        self._chunk_ratio: RatioCurve | None = None
        if measured and DTYPE_BYTES.get(measured.dtype) == self._item:
            at_rates = OperatorModel(profile.as_measured(), shape.dtype, shape.kv_dtype)
            self._decode_ratio, self._chunk_ratio = (
                self._ratio(measured, at_rates, of_decodes) for of_decodes in (True, False)
            )

    def step(self, work: StepWork) -> tuple[OperatorCost, OperatorCost]:
        """Matmuls of all recurrent layers, and what is between them."""
        matmuls, between = OperatorCost(), OperatorCost()
        if work.num_decodes:
            matmuls, between = self.decodes(work.num_decodes)
        if chunks := work.num_chunks:
            each_matmuls, each_between = self.chunk((work.num_tokens - work.num_decodes) / chunks)
            matmuls, between = matmuls + each_matmuls.scaled(chunks), between + each_between.scaled(chunks)
        return matmuls, between

    def decodes(self, rows: int) -> tuple[OperatorCost, OperatorCost]:
        """Price rows that pass together, a token of each."""
        return self._of_layers((rows, rows), self._decode_ratio)

    def chunk(self, tokens: float) -> tuple[OperatorCost, OperatorCost]:
        """Price a longer chunk."""
        return self._of_layers((tokens, 1), self._chunk_ratio)

    def _of_layers(self, group: Group, ratio: RatioCurve | None) -> tuple[OperatorCost, OperatorCost]:
        factor = self._layer.layers * self._operators.ratio(ratio, group[0])
        layer, devices = self._layer, self._devices
        matmuls, between = self._group(self._operators, layer, self._matrices, self._row_bytes, group, devices)
        return matmuls.scaled(factor), between.scaled(factor)

    def _group(
        self,
        operators: OperatorModel,
        layer: Recurrent,
        matrices: Iterable[tuple[int, int]],
        row_bytes: float,
        group: Group,
        devices: int,
    ) -> tuple[OperatorCost, OperatorCost]:
        tokens, rows = group
        matmuls = OperatorCost()
        for k, n in matrices:
            matmuls += operators.matmul(tokens, k, n)
        flops = tokens * layer.flops_per_token
        moved = 2 * rows * row_bytes + tokens * layer.numbers_per_token * self._item
        return matmuls, operators.recurrence(flops / devices, moved / devices, layer.kernels)

    def _ratio(self, measured: RecurrentPoints, at_rates: OperatorModel, of_decodes: bool) -> RatioCurve | None:
        """What the measured layer takes over what is said here at the rates of that time, by the tokens of a group."""
        matrices = tuple(Matrix("measured", k, n) for k, n in measured.matrices)
        layer = Recurrent(1, matrices, 0, measured.state_size, self._layer.kernels)
        ratios: dict[float, float] = {}
        for point in sorted(measured.points, key=lambda point: point.sequences * point.tokens):
            if (point.tokens == 1) == of_decodes:
                group = float(point.sequences * point.tokens), point.sequences
                costs = self._group(at_rates, layer, measured.matrices, measured.row_bytes, group, devices=1)
                ratios[group[0]] = point.us * 1e-6 / sum(cost.total_s for cost in costs)
        return RatioCurve(list(ratios), list(ratios.values())) if ratios else None
