"""Linear layers of a model that computes in float32 on a CPU, by a compiled kernel over packed weights.

A step has few rows, and general matrix libraries are made for many: they pack the weights anew in every call, or read
them in an order that few rows cannot pay for. Here they are packed once, when the model is loaded, and stay in bfloat16
where that is what the model was saved in, which loses nothing and halves what a step of decodes has to read.
"""

from __future__ import annotations

import ctypes

import torch

from vasuki.hf import native

Linear = torch.nn.Linear


class LinearKernel:
    """Packs weights, and multiplies rows by them. Its plain twin is `torch.nn.functional.linear`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.vasuki_panel_columns.restype = ctypes.c_int64
        self._features = library.vasuki_panel_columns()
        self._functions = {
            torch.bfloat16: library.vasuki_linear_bf16,
            torch.float32: library.vasuki_linear_float,
        }
        for function in self._functions.values():
            function.restype = None
            function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """`[out, in]` in float32 -> panels `[out / features, in, features]`, in bfloat16 if that holds every value."""
        out_features, in_features = weight.shape
        panels = -(-out_features // self._features)
        narrow = weight.to(torch.bfloat16)
        stored = narrow if torch.equal(narrow.to(weight.dtype), weight) else weight
        padded = stored.new_zeros(panels * self._features, in_features)
        padded[:out_features] = stored
        if stored is narrow:  # outputs j and j + features / 2 are neighbours
            padded = padded.view(panels, 2, self._features // 2, in_features).transpose(1, 2)
        return padded.reshape(panels, self._features, in_features).transpose(1, 2).contiguous()

    def unpack(self, panels: torch.Tensor, out_features: int) -> torch.Tensor:
        """The weight that was packed: `[out, in]` in float32."""
        num_panels, in_features, features = panels.shape
        rows = panels.transpose(1, 2)
        if panels.dtype is torch.bfloat16:
            rows = rows.reshape(num_panels, features // 2, 2, in_features).transpose(1, 2)
        return rows.reshape(num_panels * features, in_features)[:out_features].float()

    def __call__(
        self, x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, out_features: int
    ) -> torch.Tensor:
        """`[..., in]` in float32 -> `[..., out]`."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        output = rows.new_empty(len(rows), out_features)
        self._functions[panels.dtype](
            rows.data_ptr(),
            panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            *rows.shape,
            out_features,
        )
        return output.view(*x.shape[:-1], out_features)


class PackedLinear(torch.nn.Module):
    """What takes the place of a `torch.nn.Linear`."""

    panels: torch.Tensor

    def __init__(self, linear: Linear, kernel: LinearKernel) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._kernel = kernel
        self.register_buffer("panels", kernel.pack(linear.weight.data))

    @property
    def weight(self) -> torch.Tensor:
        """The weight as a model's own code may want to see it. It is made anew for each caller."""
        return self._kernel.unpack(self.panels, self.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x, self.panels, self.bias, self.out_features)


def load_kernel() -> LinearKernel | None:
    """The kernel for this processor; None if it cannot be had."""
    library = native.load("packed_linear.cpp")
    return None if library is None else LinearKernel(library)


def pack_linear_layers(model: torch.nn.Module, kernel: LinearKernel) -> None:
    """Replace a model's float32 linear layers, one by one, so that both forms of only one lie in memory."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is Linear and module.weight.dtype is torch.float32:
                setattr(parent, name, PackedLinear(module, kernel))
