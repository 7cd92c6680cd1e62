"""Experts of a mixture, for few rows on cards for which torch has no grouped product.

There a mixture waits for the device twice a layer, to learn how many rows each expert has: nothing can be recorded
then, nor launched ahead. Few rows go through all experts instead, and take from each the share that the router gives
it. Every expert is read once, as some row wants most of them anyway, and such steps wait for memory.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "vasuki_all_experts"
MOST_ROWS = 128  # through each expert, for which a product takes no longer than its weights


def all_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' calling convention: rows `[tokens, hidden_size]`, and for each its experts and their shares
    `[tokens, top_k]`. Returns `[tokens, hidden_size]`."""
    if len(hidden_states) > MOST_ROWS or not module.has_gate or has_norm(module):
        output: torch.Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return output
    rows = hidden_states.expand(module.num_experts, *hidden_states.shape)
    gated = module._apply_gate(_product(module, rows, "gate_up_proj"))
    answers = _product(module, gated, "down_proj")  # [experts, tokens, hidden_size]
    shares = top_k_weights.new_zeros(len(hidden_states), module.num_experts).scatter_(1, top_k_index, top_k_weights)
    shares = shares.t().unsqueeze(-1)
    return (answers * shares).masked_fill_(shares == 0, 0).sum(dim=0).to(hidden_states.dtype)


def has_norm(experts: Any) -> bool:
    """Whether a norm is behind each expert. Of older versions of transformers, none has."""
    return getattr(experts, "has_post_expert_norm", False)


def _product(module: Any, rows: torch.Tensor, name: str) -> torch.Tensor:
    weight = getattr(module, name)  # [experts, out, in], or the other way round
    product = torch.bmm(rows, weight if module.is_transposed else weight.transpose(1, 2))
    return product + getattr(module, f"{name}_bias").unsqueeze(1) if module.has_bias else product


ALL_EXPERTS_FUNCTIONS.register(NAME, all_experts)


def use_all_experts(model: Any) -> None:
    """Let a model's experts compute so, if transformers lets them be chosen."""
    for module in model.modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            module.config._experts_implementation = NAME
