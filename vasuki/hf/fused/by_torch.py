"""A model's modules in fewer of torch's operators, for GPUs: a small kernel takes longer to be launched than to run
there, and a norm alone is six of them, rotation ten.

    layer    norm | q k v | rotate q k | write k, v | attend | o | add | norm | gate up | silu, times | down | add

Rotation with the write, and silu with times, are one kernel each where there are kernels of ours (`SmallKernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import gelu, rms_norm, silu

from vasuki.hf.fused.attention import FusedAttention, TurnAndStore, fuse_attention
from vasuki.hf.fused.replace import close, replace_modules

Linear = torch.nn.Linear


@dataclass(frozen=True, slots=True)
class SmallKernels:
    """Kernels that each do what several of torch's operators do."""

    turn_and_store: TurnAndStore
    gated: Callable[[torch.Tensor, str], torch.Tensor]  # `[..., 2 width]`, gate and up -> activation(gate) * up
    norm: Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]  # rows, weight, eps, offset -> rows
    round_rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # see `kernels.float8.rounded_rows`


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}


class TorchNorm(torch.nn.Module):
    """What takes the place of a model's own RMS norm, which is its plain twin, and rounds once more in 16 bits."""

    offset = 0.0

    def __init__(self, weight: torch.nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width]` -> the same."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class OffsetNorm(torch.nn.Module):
    """What takes the place of an RMS norm that stores what its weight exceeds 1 by, a sum that has no place in 16 bits.
    Its plain twin is the norm itself, or, where there is a kernel, what it does without."""

    offset = 1.0

    def __init__(self, weight: torch.nn.Parameter, eps: float, kernels: SmallKernels | None) -> None:
        super().__init__()
        self.weight, self.eps, self.kernels = weight, eps, kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width]` -> the same."""
        if self.kernels is not None:
            return self.kernels.norm(x, self.weight, self.eps, self.offset)
        return rms_norm(x.float(), self.weight.shape, self.offset + self.weight.float(), self.eps).type_as(x)


class JoinedMLP(torch.nn.Module):
    """What takes the place of an MLP `down(act(gate(x)) * up(x))`, which is its plain twin.

    Args:
        gate_up: both of its first products in one.
        down: its last one.
        function: its activation.
        kernels: ours, where there are such.
    """

    def __init__(self, gate_up: Linear, down: Linear, function: Any, kernels: SmallKernels | None = None) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = gate_up, down, function
        self.kernels, self._activation = kernels, _activation(function, gate_up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden_size]` -> the same. It takes three widths of memory, as plans have it."""
        gate_up = self.gate_up_proj(x)
        if self.kernels is not None and self._activation is not None:
            gated = self.kernels.gated(gate_up, self._activation)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            gated = self.act_fn(gate).mul_(up)
        output: torch.Tensor = self.down_proj(gated)
        return output


def join(layers: list[Linear]) -> Linear:
    """One layer with the outputs of all, which have biases all or none, and whose weights are views of its own now."""
    outputs = sum(layer.out_features for layer in layers)
    joined = Linear(layers[0].in_features, outputs, bias=layers[0].bias is not None, device="meta")
    with torch.inference_mode(False), torch.no_grad():  # other tensors could not be moved between host and device
        joined.weight = _fixed(torch.cat([layer.weight for layer in layers]))
        parts = joined.weight.split_with_sizes([layer.out_features for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            layer.weight = _fixed(part)  # a new one: what was made in inference mode takes no other data
        if layers[0].bias is not None:
            joined.bias = _fixed(torch.cat([layer.bias for layer in layers]))
    return joined


def rotate(heads: torch.Tensor, count: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`Rotate` of `fused.attention`, in three kernels where whole heads turn by angles of their own type."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width, half = cos.shape[-1], cos.shape[-1] // 2
    before = heads[:, :count, :width]
    turned = before * cos
    turned[..., :half].addcmul_(before[..., half:], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(before[..., :half], sin[..., half:])
    if width == heads.shape[-1]:
        return turned.to(heads.dtype)
    before.copy_(turned)
    return heads[:, :count]


class Fused(NamedTuple):
    """How many of a model's modules have given way to twins of fewer operators."""

    norms: int
    attentions: int
    mlps: int

    def lacks(self, layers: int) -> str:
        """Names the parts of `layers` that were not replaced, whose operators a step launches one by one; "" if
        none."""
        kinds = {"attention": self.attentions, "MLP": self.mlps}
        left = [f"{kind} of {layers - count}" for kind, count in kinds.items() if count < layers]
        return f"the {' and the '.join(left)} of {layers} layers" if left else ""


@torch.inference_mode()
def fuse_modules(model: torch.nn.Module, kernels: SmallKernels | None = None) -> Fused:
    """Replace a model's norms, attention layers and MLPs: those that answer a few tokens as their twins do."""
    replace_modules(model, partial(_norm, kernels=kernels))
    fuse_attention(model, Linear, join, rotate, kernels.turn_and_store if kernels else None)
    replace_modules(model, partial(_mlp, kernels=kernels))
    return fused(model)


def fused(model: torch.nn.Module) -> Fused:
    """Count what `fuse_modules` has replaced."""
    kinds = ((TorchNorm, OffsetNorm), (FusedAttention,), (JoinedMLP,))
    return Fused(*(sum(isinstance(module, kind) for module in model.modules()) for kind in kinds))


def _norm(module: Any, kernels: SmallKernels | None) -> TorchNorm | OffsetNorm | None:
    """The norm that answers like a module; None if its weight, of either convention, does not explain its answers."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    rows = torch.linspace(-3, 3, 3 * len(weight)).view(3, -1) ** 3 * torch.tensor([[1.0], [1e-3], [0.0]])
    rows = rows.to(weight.device, weight.dtype)
    answers = module(rows)
    twins: list[TorchNorm | OffsetNorm] = [TorchNorm(weight, eps), OffsetNorm(weight, eps, kernels)]
    return next((twin for twin in twins if all(map(close, twin(rows), answers))), None)


def _mlp(module: Any, kernels: SmallKernels | None) -> JoinedMLP | None:
    """The twin of an MLP of such parts that answers like it."""
    parts: dict[str, Any] = dict(module.named_children())
    if parts.keys() == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        firsts, function = [parts["gate_proj"], parts["up_proj"]], parts["act_fn"]
    elif parts.keys() == {"gate_up_proj", "down_proj", "activation_fn"}:
        firsts, function = [parts["gate_up_proj"]], parts["activation_fn"]
    else:
        return None
    first, down = firsts[0], parts["down_proj"]
    if any(type(each) is not Linear for each in (*firsts, down)):
        return None
    if len({(each.weight.shape, each.bias is None) for each in firsts}) > 1:
        return None
    x = torch.linspace(-3, 3, first.in_features)
    x = torch.stack([x, 1e3 * x]).unsqueeze(0).to(first.weight.device, first.weight.dtype)  # some clip what is large
    try:
        answers = module(x)
    except (TypeError, RuntimeError):  # it wants something else than rows
        return None
    twin = JoinedMLP(join(firsts) if len(firsts) > 1 else first, down, function, kernels)
    has_shape = isinstance(answers, torch.Tensor) and answers.shape == x.shape
    return twin if has_shape and all(map(close, twin(x)[0], answers[0])) else None


def _activation(function: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> str | None:
    """The name of an activation, by what it answers; None for one that is not known."""
    x = torch.linspace(-8, 8, 65, dtype=torch.float32, device=like.device)
    return next((name for name, each in ACTIVATIONS.items() if torch.allclose(each(x), function(x), atol=1e-6)), None)


def _fixed(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
