"""Modules of a model that give way to faster twins."""

from __future__ import annotations

from collections.abc import Callable

import torch


def replace_modules(model: torch.nn.Module, twin_of: Callable[[torch.nn.Module], torch.nn.Module | None]) -> None:
    """Put its twin in the place of every module that has one, one by one."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if (twin := twin_of(module)) is not None:
                setattr(parent, name, twin)
