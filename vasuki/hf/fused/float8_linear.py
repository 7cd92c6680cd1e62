"""Linear layers whose weights, and what they are multiplied with, are rounded to 8 bits, for GPUs that multiply such
numbers at twice the rate of 16 bits, and read half as much.

    [rows, k] ── round each row ── 8 bits ──┐
    weights [n, k], each row rounded once ──┴─ product ── times both scales ── [rows, n]

Every row of either side has the scale at which its largest number is the largest of 8 bits, so that one outlier costs
its own row exactness, and no other. Sums are as exact as the card's: on Hopper some 14 bits (DeepSeek-V3, arXiv
2412.19437, 3.3.2), which costs less than rounding does.
"""

from __future__ import annotations

import torch

from vasuki.hf.attention.probe import observe
from vasuki.hf.attention.ragged_attention import Unsupported
from vasuki.hf.fused.attention import FusedAttention
from vasuki.hf.fused.by_torch import JoinedMLP, OffsetNorm, SmallKernels, fused
from vasuki.hf.kernels.float8 import rounded_rows
from vasuki.machines.here.gpu import torch_version

_MULTIPLE = 16  # what both sides of a product are wide, as kernels want it
_ROWS_AT_ONCE = 2048  # of weights
_TRIED_ROWS = (1, 300)  # kernels differ by the number of rows
_ADA, _SINCE_ON_ADA = (8, 9), (2, 12)  # before, its kernel did not wait for its stream (pytorch issue 177651)


class Float8Linear(torch.nn.Module):
    """What takes the place of a linear layer `x W^T + b`, which is its plain twin.

    Args:
        linear: the twin.
        kernels: ours, where there are such.
    """

    def __init__(self, linear: torch.nn.Linear, kernels: SmallKernels | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Some rows at a time, in float32 meanwhile: all of them would take several times the layer.
        parts = map(rounded_rows, torch.split(linear.weight, _ROWS_AT_ONCE))
        weight, scales = map(torch.cat, zip(*parts, strict=True))
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.scales: torch.Tensor
        self.register_buffer("scales", scales.view(1, -1))
        self.bias = linear.bias
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` -> `[..., out_features]`, in the type of `x`."""
        round_rows = self.kernels.round_rows if self.kernels is not None else rounded_rows
        rows, scales = round_rows(x.reshape(-1, self.in_features))
        # On CPUs torch 2.11 has no scales of rows, and 2.13 takes twice as long as float32.
        product = (self.on_gpu if x.is_cuda else self.in_float32)(rows, scales, x.dtype)
        return product.view(*x.shape[:-1], self.out_features)

    def on_gpu(self, rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The product of rounded rows `[num_rows, in_features]`, whose scales are `[num_rows, 1]`."""
        return torch._scaled_mm(
            rows, self.weight.t(), scales, self.scales, self.bias, out_dtype=dtype, use_fast_accum=True
        )

    def in_float32(self, rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The plain twin: the same numbers, widened."""
        product = (rows.float() @ self.weight.float().t()) * scales * self.scales
        return (product if self.bias is None else product + self.bias).to(dtype)


@torch.inference_mode()
def round_products(model: torch.nn.Module, num_layers: int, kernels: SmallKernels | None = None) -> None:
    """Let a model's attention layers and joined MLPs multiply numbers of 8 bits.

    Raises Unsupported where it has other MLPs, or they are not as wide as kernels want.
    """
    if lacks := fused(model)._replace(attentions=num_layers).lacks(num_layers):
        raise Unsupported(f"{lacks} cannot be joined")
    for part in [*observe(model), *(each for each in model.modules() if isinstance(each, JoinedMLP))]:
        for name, layer in list(part.named_children()):
            if type(layer) is torch.nn.Linear:
                if any(width % _MULTIPLE for width in layer.weight.shape):
                    shape = " by ".join(map(str, reversed(layer.weight.shape)))
                    raise Unsupported(f"its weights of {shape} are not multiples of {_MULTIPLE}")
                setattr(part, name, Float8Linear(layer, kernels))


def use_kernels(model: torch.nn.Module, kernels: SmallKernels | None) -> None:
    """Let what has taken the place of a model's modules compute by other kernels, or by torch's operators."""
    for module in model.modules():
        if isinstance(module, FusedAttention):
            module.turn_and_store = kernels.turn_and_store if kernels is not None else None
        elif isinstance(module, (Float8Linear, JoinedMLP, OffsetNorm)):
            module.kernels = kernels


def refuse_untried(device: torch.device) -> None:
    """Multiply a few numbers of 8 bits. Raises Unsupported where the card or this torch cannot, or has it wrong."""
    on_ada = device.type == "cuda" and torch.cuda.get_device_capability(device) == _ADA
    if on_ada and torch_version() < _SINCE_ON_ADA:
        raise Unsupported(f"torch {torch.__version__} may hang with them on this card; 2.12 and later do not")
    layer = torch.nn.Linear(64, 32, device=device, dtype=torch.bfloat16)
    for count in _TRIED_ROWS:
        x = torch.linspace(-1, 1, count * 64, device=device).view(count, 64).to(torch.bfloat16)
        try:
            with torch.inference_mode():
                product, expected = Float8Linear(layer)(x), layer(x)
                is_close = torch.allclose(product, expected, rtol=0, atol=0.1)
        except (RuntimeError, ValueError) as error:
            raise Unsupported(f"torch {torch.__version__} cannot here: {str(error).splitlines()[0]}") from None
        if not is_close:
            raise Unsupported(f"torch {torch.__version__} multiplies them wrongly here")
