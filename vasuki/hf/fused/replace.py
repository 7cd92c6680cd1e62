"""Modules of a model that give way to faster twins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from vasuki.hf.attention.probe import observe_calls

_ROUNDINGS = 3  # to 16 bits, one after another, that answers which should be equal may lie apart by


def close(answer: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> bool:
    """Whether two modules gave equal answers, up to sums in another order and, in 16 bits, intermediate values that
    only one of them rounds. `scale` is of what they were given."""
    if answer.shape != expected.shape or answer.dtype is not expected.dtype:
        return False
    if answer.dtype is torch.float32:
        return torch.allclose(answer, expected, rtol=1e-4, atol=1e-5 * scale)
    largest = float(expected.float().abs().max())
    off = _ROUNDINGS * torch.finfo(answer.dtype).eps * largest
    return math.isfinite(off) and torch.allclose(answer, expected, rtol=0, atol=off)


def replace_modules(model: torch.nn.Module, twin_of: Callable[[torch.nn.Module], torch.nn.Module | None]) -> None:
    """Put its twin in the place of every module that has one. Nothing holds on to those replaced, so that of large ones
    only a few lie in memory twice."""
    for name, module in list(model.named_children()):
        if (twin := twin_of(module)) is not None:
            setattr(model, name, twin)
        else:
            replace_modules(module, twin_of)


@torch.inference_mode()
def replace_where_equal(
    model: torch.nn.Module,
    is_candidate: Callable[[torch.nn.Module], bool],
    twin_of: Callable[[torch.nn.Module], torch.nn.Module],
) -> None:
    """Replace every candidate whose twin gives equal answers on a few tokens, as a tensor or an output that begins with
    one."""
    twins: dict[torch.nn.Module, torch.nn.Module] = {}

    def compare(module: torch.nn.Module, args: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> None:
        twin = twin_of(module)
        try:
            answer = twin(*args, **arguments)
        except TypeError:  # it is called with something else
            return
        if type(answer) is not type(output):
            return
        ours, theirs = (each if isinstance(each, torch.Tensor) else each[0] for each in (answer, output))
        if close(ours, theirs):
            twins[module] = twin

    if observe_calls(model, filter(is_candidate, model.modules()), compare):
        replace_modules(model, twins.get)
