"""What of a model's step gives a row other numbers with other rows.

Torch and the libraries behind it choose by the number of rows how a matrix product is summed, and some functions of
single numbers differ in their last bit between the vectors of a tensor and its end. What kernels of ours leave to such
functions is found by running a model on a few tokens.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicCache

from vasuki.hf.attention.probe import observe
from vasuki.hf.recurrent.recurrent_layer import CACHE_NAMES, cache_name

if TYPE_CHECKING:
    from vasuki.hf.loading.loaded_model import LoadedModel

_PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "_grouped_mm"}
_PRODUCTS |= {"convolution", "conv1d", "einsum"}
_FUNCTIONS = {"elu", "selu", "celu", "sinh", "cosh", "atanh", "sigmoid", "silu", "gelu", "softplus", "mish", "exp2"}


def why_rows_vary(loaded: LoadedModel) -> str:
    """Why a row of a model may get other numbers with other rows; empty where it does not."""
    if loaded.device.type != "cpu":
        return "a GPU's libraries sum products as the number of rows suggests"
    if loaded.encodes:
        return "torch computes an encoder's attention"
    if loaded.backend != "ragged":
        return f"the {loaded.backend} backend computes by torch, which sums products as the number of rows suggests"
    if loaded.same_anywhere is None or loaded.kernel is None:
        return "its layers are not computed by compiled kernels"
    with loaded.same_anywhere.mode():
        functions = varying_functions(loaded.model, recurrent=loaded.recurrent is not None)
    by_class = [f"{name} by {' and '.join(some)}" for name, some in functions.items()]
    return f"torch computes {', '.join(by_class)}, which depends on the number of rows" if by_class else ""


@torch.inference_mode()
def varying_functions(model: Any, *, recurrent: bool = False) -> dict[str, list[str]]:
    """Such functions of torch that a model calls in a step, by the class of the module that does.

    Args:
        model: with the kernels that it is given.
        recurrent: whether it has layers that carry a state, which compute by other functions where they are to keep it.
    """
    seen = _Seen()
    cache = {cache_name(model.forward, CACHE_NAMES[::-1]): DynamicCache(config=model.config)} if recurrent else {}
    handles = [register_module_forward_pre_hook(seen.enter), register_module_forward_hook(seen.leave)]
    try:
        with seen:
            observe(model, **cache)
    finally:
        for handle in handles:
            handle.remove()
    return {name: sorted(functions) for name, functions in sorted(seen.by_class.items())}


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes functions, and the module that is at work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_class: dict[str, set[str]] = defaultdict(set)
        self._inside: list[str] = []

    def enter(self, module: torch.nn.Module, _: Any) -> None:
        self._inside.append(type(module).__name__)

    def leave(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _FUNCTIONS or (name in _PRODUCTS and not _sums_nothing(args)):
            self.by_class[self._inside[-1]].add(name.lstrip("_"))
        return func(*args, **kwargs or {})


def _sums_nothing(factors: Any) -> bool:
    """Whether each number of a product is a single one, as of positions and frequencies."""
    first = factors[0]
    return isinstance(first, torch.Tensor) and first.shape[-1:] == (1,)
