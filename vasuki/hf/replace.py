"""Modules of a model that give way to faster twins."""

from __future__ import annotations

from collections.abc import Callable

import torch


def replace_modules(model: torch.nn.Module, twin_of: Callable[[torch.nn.Module], torch.nn.Module | None]) -> None:
    """Put its twin in the place of every module that has one. Nothing holds on to those replaced, so that of large ones
    only a few lie in memory twice."""
    for name, module in list(model.named_children()):
        if (twin := twin_of(module)) is not None:
            setattr(model, name, twin)
        else:
            replace_modules(module, twin_of)
