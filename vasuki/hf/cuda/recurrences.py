"""Packages whose kernels transformers takes for recurrent layers on CUDA, where they are installed."""

from __future__ import annotations

import importlib.util
import inspect

import torch

# By the function of a model's source file that they take the place of: what to import, and what to install.
_PACKAGES = {
    "torch_recurrent_gated_delta_rule": ("fla", "flash-linear-attention"),
    "recurrent_kimi_delta_attention": ("fla", "flash-linear-attention"),
    "mamba_selective_state_update": ("mamba_ssm", "mamba-ssm"),
    "mamba2_selective_state_update": ("mamba_ssm", "mamba-ssm"),
    "causal_conv1d_update": ("causal_conv1d", "causal-conv1d"),
}


def missing_packages(model: torch.nn.Module) -> list[str]:
    """Those that a model's layers would gain from, as pip calls them."""
    called: set[str] = set()
    for kind in {type(module) for module in model.modules()}:
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        called |= set(code.co_names) if code else set()
    wanted = {_PACKAGES[name] for name in called & _PACKAGES.keys()}
    return sorted(package for module, package in wanted if importlib.util.find_spec(module) is None)
