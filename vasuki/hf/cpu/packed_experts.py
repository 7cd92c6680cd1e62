"""Experts of a mixture on a CPU, one after the other, by the kernel of linear layers over packed weights.

Torch multiplies all experts in one grouped product, and chooses how by the numbers of rows: a row would get other last
bits with other rows beside it. The kernel sums a row's products in one order, however many rows there are. Weights are
packed when the model is loaded, in place of those of the model, so that one form alone lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from vasuki.hf.cpu.packed_linear import DTYPES
from vasuki.hf.kernels.experts import has_norm

NAME = "vasuki_packed_experts"


def packed_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' calling convention: rows `[tokens, hidden_size]`, and for each its experts and their shares
    `[tokens, top_k]`. Returns `[tokens, hidden_size]` in float32."""
    if not hasattr(module, "up"):  # of a type that is not packed
        output: torch.Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return output
    num_tokens, top_k = top_k_index.shape
    rows = hidden_states.reshape(num_tokens, -1).float()
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    answers = rows.new_zeros(num_tokens * top_k, rows.shape[1])
    chosen, counts = torch.unique_consecutive(experts, return_counts=True)
    for expert, here in zip(chosen.tolist(), torch.split(order, counts.tolist()), strict=True):
        inner = module.up[expert](rows[here // top_k])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        answer = module.down[expert](inner)
        answers[here] = module.post_expert_norm(answer) if has_norm(module) else answer
    shared = answers.view(num_tokens, top_k, -1) * top_k_weights.float().unsqueeze(-1)
    total = shared[:, 0].clone()
    for index in range(1, top_k):  # in one order, however many tokens there are
        total += shared[:, index]
    return total


ALL_EXPERTS_FUNCTIONS.register(NAME, packed_experts)


def are_experts(module: torch.nn.Module) -> bool:
    """Whether a module holds experts that transformers lets compute by another function, and that can be packed."""
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "down_proj")):
        return False
    weights = [getattr(module, name, None) for name in (_up(module), "down_proj")]
    return all(isinstance(each, torch.Tensor) and each.dim() == 3 and each.dtype in DTYPES for each in weights)


def pack_experts(model: torch.nn.Module, packed: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
    """Let a model's experts compute so, each by two linear layers that are `packed`."""
    for module in list(filter(are_experts, model.modules())):
        experts: Any = module
        experts.up = _layers(experts, _up(experts), packed)
        experts.down = _layers(experts, "down_proj", packed)
        experts.config._experts_implementation = NAME


def _up(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _layers(module: Any, name: str, packed: Callable[[torch.nn.Linear], torch.nn.Module]) -> torch.nn.ModuleList:
    """`[experts]` linear layers of a weight `[experts, out, in]`, or the other way round, which the module loses."""
    weights = getattr(module, name).data
    biases = getattr(module, f"{name}_bias").data if module.has_bias else None
    layers = torch.nn.ModuleList()
    for expert, weight in enumerate(weights.transpose(1, 2) if module.is_transposed else weights):
        linear = torch.nn.Linear(1, 1, bias=False)
        linear.out_features, linear.in_features = weight.shape
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        if biases is not None:
            linear.bias = torch.nn.Parameter(biases[expert].float(), requires_grad=False)
        layers.append(packed(linear))
    for lost in (name, f"{name}_bias"):
        if isinstance(getattr(module, lost, None), torch.Tensor):
            delattr(module, lost)
    return layers
