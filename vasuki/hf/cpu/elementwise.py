"""Functions of torch whose last bit depends on where a number lies, computed the same wherever it does.

Torch computes most of a tensor in vectors, and by other code what is left over at its end and where threads share it.
Its `exp`, `tanh`, `erf` and `log1p` give the same numbers by both; `sigmoid` and what is made of it do not. With them,
a row would get other numbers for being computed with other rows. Products outside linear layers depend on the number of
rows likewise.
"""

from __future__ import annotations

import ctypes
import enum
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vasuki.hf.cpu.packed_linear import DTYPES, Format, LinearKernel, PackedMatrix

Function = Callable[..., Any]
MOST_PACKED = 2**22  # numbers of a weight outside linear layers that is packed too


class Activation(enum.IntEnum):
    """`Activation` of decoder.cpp."""

    SIGMOID = 0
    SILU = 1
    GELU_TANH = 2


class SameAnywhere:
    """Computes such functions, in place of torch's.

    Args:
        library: made from decoder.cpp.
        product: of linear layers, over weights that are packed.
    """

    def __init__(self, library: ctypes.CDLL, product: LinearKernel) -> None:
        self._product = product
        self._packed: dict[int, tuple[torch.Tensor, torch.Tensor, Format]] = {}  # by weight, whose address it keeps
        self._function = library.vasuki_activate
        self._function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2
        self._function.restype = None
        sigmoids = (torch.sigmoid, torch.special.expit, torch.Tensor.sigmoid, functional.sigmoid)
        self._by_twin: dict[Function, Function] = {
            **dict.fromkeys(sigmoids, self.sigmoid),
            torch.Tensor.sigmoid_: lambda x: x.copy_(self.sigmoid(x)),
            functional.silu: self.silu,
            functional.gelu: self.gelu,
            functional.softplus: softplus,
            functional.mish: mish,
            functional.linear: self.linear,
            torch.exp2: exp2,
            torch.Tensor.exp2: exp2,
        }

    def mode(self) -> TorchFunctionMode:
        """Within a `with` statement, they have the place of torch's."""
        return _InPlace(self._by_twin)

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return self._activate(x, Activation.SIGMOID)

    def silu(self, x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        answer = self._activate(x, Activation.SILU)
        return x.copy_(answer) if inplace else answer

    def gelu(self, x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        if approximate == "tanh":
            return self._activate(x, Activation.GELU_TANH)
        wide = x.float()
        return (0.5 * wide * (1 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Of a model's small weights, such as those of routers, which are packed when they are met first. What is made
        for a call alone is not: it would be kept."""
        if not isinstance(weight, torch.nn.Parameter) or weight.numel() > MOST_PACKED or weight.dtype not in DTYPES:
            return functional.linear(x, weight, bias)
        if id(weight) not in self._packed:
            self._packed[id(weight)] = (weight, *self._product.pack(weight.detach()))
        _, panels, format = self._packed[id(weight)]
        bias = None if bias is None else bias.float().contiguous()
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        answer = self._product(rows, PackedMatrix.of(panels, bias, len(weight), format))
        return answer.view(*x.shape[:-1], len(weight)).to(x.dtype)

    def _activate(self, x: torch.Tensor, kind: Activation) -> torch.Tensor:
        wide = x.float().contiguous()
        answer = torch.empty_like(wide)
        self._function(wide.data_ptr(), answer.data_ptr(), wide.numel(), kind)
        return answer.to(x.dtype)


class _InPlace(TorchFunctionMode):
    def __init__(self, by_twin: dict[Function, Function]) -> None:
        self._by_twin = by_twin

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._by_twin.get(func, func)(*args, **kwargs or {})


def softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    scaled = x.float() * beta
    soft = torch.log1p(torch.exp(scaled.clamp(max=threshold))) / beta
    return torch.where(scaled > threshold, x, soft.to(x.dtype))


def mish(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    answer = x * softplus(x).tanh()
    return x.copy_(answer) if inplace else answer


def exp2(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x * math.log(2))
