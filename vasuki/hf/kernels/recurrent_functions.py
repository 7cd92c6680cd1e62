"""The functions by which recurrent layers compute, and what replaces them.

transformers calls them by name in the source file of a model. When it is imported, it puts kernels of other packages
there, where such are installed; those work on CUDA alone.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

Function = Callable[..., Any]

# By the name of a function: what is imported to take its place, and what to install for that.
_PACKAGES = {
    "torch_recurrent_gated_delta_rule": ("fla", "flash-linear-attention"),
    "recurrent_kimi_delta_attention": ("fla", "flash-linear-attention"),
    "mamba_selective_state_update": ("mamba_ssm", "mamba-ssm"),
    "mamba2_selective_state_update": ("mamba_ssm", "mamba-ssm"),
    "causal_conv1d_update": ("causal_conv1d", "causal-conv1d"),
}


def called_by(kind: type[torch.nn.Module], names: Iterable[str]) -> set[str]:
    """Return which of the names a kind of layer calls functions of its source file by."""
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    return {name for name in names if code and name in code.co_names and name in forward.__globals__}


@contextmanager
def in_place(kind: type[torch.nn.Module], functions: Mapping[str, Function]) -> Iterator[None]:
    """Let layers of a kind call these functions by these names, within a `with` statement."""
    place = inspect.unwrap(kind.forward).__globals__
    own = {name: place[name] for name in functions}
    place.update(functions)
    try:
        yield
    finally:
        place.update(own)


@contextmanager
def by_torch(model: torch.nn.Module) -> Iterator[None]:
    """Let a model's layers compute by torch's operators on any device, within a `with` statement."""
    kinds = {type(module) for module in model.modules()} if any(map(_is_installed, _modules())) else set()
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(in_place(kind, _torch_functions(kind)))  # type: ignore[arg-type]
        yield


@functools.cache
def _torch_functions(kind: type[torch.nn.Module]) -> dict[str, Function]:
    """The functions of its source file that a kind of layer calls, as they were written there, where others may have
    their place."""
    place = getattr(inspect.unwrap(kind.forward), "__globals__", {})
    own = {name: each for name, each in place.items() if getattr(each, "__module__", "") == kind.__module__}
    wrapped = called_by(kind, [name for name, each in own.items() if hasattr(each, "__wrapped__")])
    return {name: inspect.unwrap(own[name]) for name in wrapped}


def missing_packages(model: torch.nn.Module) -> list[str]:
    """Packages that a model's layers would gain from on CUDA, as pip calls them."""
    called = {name for kind in {type(module) for module in model.modules()} for name in called_by(kind, _PACKAGES)}
    return sorted({package for module, package in map(_PACKAGES.__getitem__, called) if not _is_installed(module)})


def _modules() -> set[str]:
    return {module for module, _ in _PACKAGES.values()}


@functools.cache
def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
