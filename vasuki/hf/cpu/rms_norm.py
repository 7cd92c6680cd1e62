"""RMS norms of a model with activations in float32 on a CPU: one pass of a compiled kernel in place of six."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from vasuki.hf.fused.replace import replace_modules


class NormKernel:
    """Norms rows and scales them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.vasuki_rms_norm
        self._function.restype = None
        self._function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float]

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`[..., width]` in float32, contiguous, and `[width]` -> `[..., width]`."""
        output, width = torch.empty_like(rows), rows.shape[-1]
        self._function(rows.data_ptr(), weight.data_ptr(), output.data_ptr(), rows.numel() // width, width, eps)
        return output


class FusedNorm(torch.nn.Module):
    """What takes the place of a model's own norm, which is its plain twin."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float, kernel: NormKernel) -> None:
        super().__init__()
        self.register_buffer("weight", weight.contiguous())
        self.eps = eps
        self._kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x.float().contiguous(), self.weight, self.eps)


def fuse_norms(model: torch.nn.Module, kernel: NormKernel) -> None:
    """Replace a model's float32 RMS norms: modules of that name that answer like one."""
    replace_modules(model, lambda module: _fused(module, kernel) if type(module).__name__.endswith("RMSNorm") else None)


@torch.inference_mode()
def _fused(module: Any, kernel: NormKernel) -> FusedNorm | None:
    """The norm that answers like a module; None if its weight, of either convention, does not explain its answers."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dtype is not torch.float32 or weight.dim() != 1:
        return None
    if not isinstance(eps, float):
        return None
    rows = torch.linspace(-3, 3, 3 * len(weight)).view(3, -1) ** 3 * torch.tensor([[1.0], [1e-3], [0.0]])
    answers = module(rows)
    for scale in (weight.detach(), 1 + weight.detach()):  # some models store what the weight exceeds 1 by
        fused = FusedNorm(scale, eps, kernel)
        if torch.allclose(fused(rows), answers, rtol=1e-5, atol=1e-6):
            return fused
    return None
