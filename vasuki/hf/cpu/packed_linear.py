"""Linear layers on a CPU, by a compiled kernel over packed weights.

A step has few rows, and general matrix libraries are made for many: they pack the weights again in every call, or read
them in an order that few rows cannot pay for. Here they are packed once, when the model is loaded, and stay in bfloat16
where that is what the model was saved in, which loses nothing and halves what a step of decodes has to read. Layers
take and give float32; in a bfloat16 model they round their input where processors multiply bfloat16 faster.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Any

import torch

from vasuki.hf.fused.replace import replace_modules

Linear = torch.nn.Linear
DTYPES = (torch.float32, torch.bfloat16)  # of weights that can be packed


class Format(enum.IntEnum):
    """`Format` of decoder_layer.hpp."""

    WIDE = 0  # weights in float32
    NARROW = 1  # weights in bfloat16
    ROUNDED = 2  # weights in bfloat16, and inputs are rounded to it; where processors multiply that


class PackedMatrix(ctypes.Structure):
    """A packed layer as the kernels take it. Valid as long as its tensors stay where they are."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )

    @classmethod
    def of(cls, panels: torch.Tensor, bias: torch.Tensor | None, out_features: int, format: Format) -> PackedMatrix:
        """Take panels as `LinearKernel.pack` makes them, and a float32 bias `[out]`."""
        bias_address = None if bias is None else bias.data_ptr()
        in_features = panels.shape[1] * (2 if format is Format.ROUNDED else 1)
        return cls(panels.data_ptr(), bias_address, in_features, out_features, format)


class LinearKernel:
    """Packs weights, and multiplies rows by them. Its plain twin is `torch.nn.functional.linear`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.vasuki_panel_columns.restype = ctypes.c_int64
        self._features = library.vasuki_panel_columns()
        self.multiplies_bfloat16 = bool(library.vasuki_multiplies_bf16())  # the processor does, faster than float32
        self._function, self._gated = library.vasuki_linear, library.vasuki_gated
        self._function.argtypes = [ctypes.POINTER(PackedMatrix)] + [ctypes.c_void_p] * 2 + [ctypes.c_int64]
        self._gated.argtypes = [ctypes.POINTER(PackedMatrix)] * 2 + [ctypes.c_void_p] * 2 + [ctypes.c_int64]
        self._function.restype = self._gated.restype = None

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, Format]:
        """`[out, in]` -> panels `[out / features, in, features]`, in bfloat16 if that holds every value.

        A weight that comes in bfloat16 has its inputs rounded where that is faster.
        """
        out_features, in_features = weight.shape
        narrow = weight.to(torch.bfloat16)
        if weight.dtype is torch.bfloat16 and self.multiplies_bfloat16 and in_features % 2 == 0:
            format, stored = Format.ROUNDED, weight
        elif torch.equal(narrow.to(weight.dtype), weight):
            format, stored = Format.NARROW, narrow
        else:
            format, stored = Format.WIDE, weight
        panels = -(-out_features // self._features)
        padded = stored.new_zeros(panels * self._features, in_features)
        padded[:out_features] = stored
        if format is Format.ROUNDED:  # inputs 2 i and 2 i + 1 are neighbours
            return padded.view(panels, self._features, -1, 2).transpose(1, 2).contiguous().flatten(2), format
        if format is Format.NARROW:  # outputs j and j + features / 2 are neighbours
            padded = padded.view(panels, 2, self._features // 2, in_features).transpose(1, 2)
        return padded.reshape(panels, self._features, in_features).transpose(1, 2).contiguous(), format

    def unpack(self, panels: torch.Tensor, format: Format, out_features: int) -> torch.Tensor:
        """The weight that was packed, `[out, in]`, in bfloat16 if inputs are rounded for it, else in float32."""
        num_panels, features = len(panels), self._features
        rows = panels.view(num_panels, -1, features, panels.shape[2] // features).transpose(1, 2).flatten(2)
        if format is Format.NARROW:
            rows = rows.view(num_panels, features // 2, 2, -1).transpose(1, 2)
        weight = rows.reshape(num_panels * features, -1)[:out_features]
        return weight if format is Format.ROUNDED else weight.float()

    def __call__(self, rows: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
        """`[num_rows, in]` in float32, contiguous -> `[num_rows, out]`."""
        output = rows.new_empty(len(rows), matrix.out_features)
        self._function(matrix, rows.data_ptr(), output.data_ptr(), len(rows))
        return output

    def gated(self, rows: torch.Tensor, up: PackedMatrix, gate: PackedMatrix) -> torch.Tensor:
        """`up(rows) * silu(gate(rows))`, without either product in memory; both have the same size and format."""
        output = rows.new_empty(len(rows), up.out_features)
        self._gated(up, gate, rows.data_ptr(), output.data_ptr(), len(rows))
        return output


class PackedLinear(torch.nn.Module):
    """What takes the place of a `torch.nn.Linear`."""

    panels: torch.Tensor

    def __init__(self, linear: Linear, kernel: LinearKernel) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        if linear.bias is not None:
            linear.bias.data = linear.bias.data.float()
        self.bias = linear.bias
        self._kernel = kernel
        panels, self.format = kernel.pack(linear.weight.data)
        self.register_buffer("panels", panels)
        self._matrix = PackedMatrix()

    @property
    def weight(self) -> torch.Tensor:
        """The weight as a model's own code may want to see it: in float32, like all that it may meet there. It is made
        for each caller."""
        return self.unpacked().float()

    def unpacked(self) -> torch.Tensor:
        """The weight in a type in which it would be packed the same way again."""
        return self._kernel.unpack(self.panels, self.format, self.out_features)

    @property
    def matrix(self) -> PackedMatrix:
        """The weights where they are now: a streamed layer's move."""
        if self._matrix.panels != self.panels.data_ptr():
            self._matrix = PackedMatrix.of(self.panels, self.bias, self.out_features, self.format)
        return self._matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` -> `[..., out]` in float32. A model's own code may bring rows to the type of `weight` first."""
        rows = x.reshape(-1, self.in_features).float().contiguous()
        return self._kernel(rows, self.matrix).view(*x.shape[:-1], self.out_features)


class GatedMLP(torch.nn.Module):
    """What takes the place of an MLP `down(silu(gate(x)) * up(x))` with packed layers."""

    def __init__(self, mlp: Any, kernel: LinearKernel) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self._kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        between = self._kernel.gated(rows, self.up_proj.matrix, self.gate_proj.matrix)
        return self._kernel(between, self.down_proj.matrix).view(x.shape)

    @staticmethod
    def replaces(module: torch.nn.Module) -> bool:
        """Whether a module is such an MLP: by the names of its parts, and by what it answers."""
        parts = dict(module.named_children())
        if set(parts) - {"act_fn"} != {"gate_proj", "up_proj", "down_proj"}:
            return False
        gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
        if not (isinstance(gate, PackedLinear) and isinstance(up, PackedLinear)):
            return False
        if gate.format is not up.format or gate.out_features != up.out_features:
            return False
        x = torch.linspace(-3, 3, gate.in_features, dtype=torch.float32)
        x = torch.stack([x, 1e3 * x]).unsqueeze(0)  # some clip what is large
        with torch.inference_mode():
            try:
                answer = module(x)
            except (TypeError, RuntimeError):  # it wants something else than rows
                return False
            expected = down(torch.nn.functional.silu(gate(x)) * up(x))
            return isinstance(answer, torch.Tensor) and torch.equal(answer, expected)


def pack_linear_layers(model: torch.nn.Module, kernel: LinearKernel) -> None:
    """Replace a model's linear layers, one by one, so that both forms of only one lie in memory; then the MLPs that are
    made of them."""

    def packed(module: torch.nn.Module) -> PackedLinear | None:
        if type(module) is not Linear or module.weight.dtype not in DTYPES:
            return None
        return PackedLinear(module, kernel)

    replace_modules(model, packed)
    replace_modules(model, lambda module: GatedMLP(module, kernel) if GatedMLP.replaces(module) else None)
