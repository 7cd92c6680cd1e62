"""Recurrences on a CPU: compiled kernels take a row's tokens through its state one by one, in place of many operators.

For a single token that is one pass over the states instead of twenty. For a prompt it is what transformers' operators
avoid by computing chunks of tokens, filled up to a whole one, as products of matrices; a state that stays in a cache is
faster than all that (docs/LOG.md).

The kernels take the place of transformers' functions (`hf.recurrent.functions`) while a layer of the model runs.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import softplus

from vasuki.hf.recurrent.functions import Function, called_by, in_place


class _DeltaRule(ctypes.Structure):
    """`DeltaRule` of recurrences.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "log_decay", "beta", "states", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "heads", "key_heads", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("decays", "normalizes")),
    )


class _Mamba2(ctypes.Structure):
    """`Mamba2` of recurrences.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "step", "decay", "b", "c", "states", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "heads", "groups", "channels", "numbers")),
    )


class Recurrences:
    """Kernels with the signatures of transformers' functions, which are their plain twins and take over what the
    kernels do not do. States are updated where they lie."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.vasuki_most_in_head.restype = ctypes.c_int64
        self._most_in_head = library.vasuki_most_in_head()
        self._delta_rule, self._mamba_2 = library.vasuki_delta_rule, library.vasuki_mamba_2
        self._delta_rule.restype = self._mamba_2.restype = None
        self._delta_rule.argtypes = [ctypes.POINTER(_DeltaRule)]
        self._mamba_2.argtypes = [ctypes.POINTER(_Mamba2)]

    def delta_rule(
        self,
        plain: Function,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query and key `[rows, tokens, key_heads, keys]`, value `[rows, tokens, heads, values]`, g `[rows, tokens,
        heads]` or one for each key, beta `[rows, tokens, heads]`, state `[rows, heads, keys, values]` -> output like
        value, and the state."""
        rows, tokens, key_heads, keys = key.shape
        heads, values = value.shape[2:]
        state = _zeros(rows, heads, keys, values) if initial_state is None else initial_state
        if not output_final_state or not _lies_plainly(state) or max(keys, values) > self._most_in_head:
            options = dict(output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
            result: tuple[torch.Tensor, torch.Tensor | None] = plain(
                query, key, value, g=g, beta=beta, initial_state=initial_state, **options, **others
            )
            return result
        given = [tensor.float().contiguous() for tensor in (query, key, value, g, beta)]
        output = torch.empty_like(given[2])
        pointers = [tensor.data_ptr() for tensor in (*given, state, output)]
        decays = g.numel() // (rows * tokens * heads)
        sizes = (rows, tokens, heads, key_heads, keys, values, decays, use_qk_l2norm_in_kernel)
        self._delta_rule(_DeltaRule(*pointers, *sizes))
        return output.to(query.dtype), state

    def mamba_2(
        self,
        plain: Function,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """One token of each row: state `[rows, heads, channels, numbers]`, hidden_states and dt `[rows, heads,
        channels]`, a `[heads, channels, numbers]`, b and c `[rows, groups, numbers]`, d and dt_bias `[heads, channels]`
        -> output like hidden_states."""
        by_head = _repeats(dt, 2) and _repeats(a, 1) and _repeats(a, 2) and (dt_bias is None or _repeats(dt_bias, 1))
        if not by_head or not _lies_plainly(state) or z is not None:
            options = dict(dt_bias=dt_bias, dt_softplus=dt_softplus, z=z)
            result: torch.Tensor = plain(state, hidden_states, dt, a, b, c, d, **options, **others)
            return result
        step = _time_steps(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
        x, step, b, c = (tensor.unsqueeze(1) for tensor in (hidden_states, step, b, c))
        output = self._mamba_2_tokens(state, x, step, b, c, a[:, 0, 0]).squeeze(1)
        skipped = output if d is None else output + hidden_states.float() * d.float()
        return skipped.to(hidden_states.dtype)

    def mamba_2_prompts(
        self,
        plain: Function,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        *,
        chunk_size: int,
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False,
        z: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """hidden_states `[rows, tokens, heads, channels]`, dt `[rows, tokens, heads]`, a, D and dt_bias `[heads]`, b
        and c `[rows, tokens, groups, numbers]`, states `[rows, heads, channels, numbers]` -> output like hidden_states,
        and the states if they are asked for."""
        (rows, _, heads, channels), numbers = hidden_states.shape, b.shape[-1]
        states = _zeros(rows, heads, channels, numbers) if initial_states is None else initial_states
        if not _lies_plainly(states) or z is not None:
            options = dict(dt_bias=dt_bias, initial_states=initial_states, dt_softplus=dt_softplus, dt_limit=dt_limit)
            result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = plain(
                hidden_states, dt, a, b, c, chunk_size=chunk_size, D=D, z=z, return_final_states=return_final_states,
                **options, **others
            )  # fmt: skip
            return result
        step = _time_steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        output = self._mamba_2_tokens(states, hidden_states, step, b, c, a)
        if D is not None:
            output += hidden_states.float() * D.float()[:, None]
        return (output, states) if return_final_states else output

    def _mamba_2_tokens(
        self,
        states: torch.Tensor,
        x: torch.Tensor,
        step: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        a: torch.Tensor,
    ) -> torch.Tensor:
        rows, tokens, heads, channels = x.shape
        groups, numbers = b.shape[2:]
        given = [tensor.float().contiguous() for tensor in (x, step, torch.exp(step * a.float()), b, c)]
        output = torch.empty_like(given[0])
        pointers = [tensor.data_ptr() for tensor in (*given, states, output)]
        self._mamba_2(_Mamba2(*pointers, rows, tokens, heads, groups, channels, numbers))
        return output


def _zeros(*size: int) -> torch.Tensor:
    """States of rows that begin."""
    return torch.zeros(size, dtype=torch.float32)


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, is_softened: bool) -> torch.Tensor:
    """How far each head goes in a token."""
    steps = dt.float() if bias is None else dt.float() + bias.float()
    return softplus(steps) if is_softened else steps


def _lies_plainly(state: torch.Tensor) -> bool:
    return state.dtype is torch.float32 and state.device.type == "cpu" and state.is_contiguous()


def _repeats(tensor: torch.Tensor, dim: int) -> bool:
    """Whether it says the same all along a dimension."""
    return tensor.shape[dim] == 1 or tensor.stride(dim) == 0


class FusedRecurrence:
    """A layer's forward, within which kernels have the place of some functions.

    Args:
        forward: the layer's own.
        kind: of the layer.
        functions: by their names.
    """

    def __init__(self, forward: Function, kind: type[torch.nn.Module], functions: Mapping[str, Function]) -> None:
        self.__wrapped__ = forward  # whose signature this has
        self._kind = kind
        self._functions = functions

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        with in_place(self._kind, self._functions):
            return self.__wrapped__(*args, **arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedRecurrence:
        return FusedRecurrence(copy.deepcopy(self.__wrapped__, memo), self._kind, self._functions)


def fuse_recurrences(model: torch.nn.Module, kernels: Recurrences) -> None:
    """Let a model's layers compute by the kernels, where they do it by functions that these know."""
    known: dict[str, Function] = {
        "torch_recurrent_gated_delta_rule": kernels.delta_rule,
        "torch_chunk_gated_delta_rule": kernels.delta_rule,
        "recurrent_kimi_delta_attention": kernels.delta_rule,
        "chunk_kimi_delta_attention": kernels.delta_rule,
        "mamba2_selective_state_update": kernels.mamba_2,
        "mamba2_chunk_scan": kernels.mamba_2_prompts,
    }
    for module in model.modules():
        kind = type(module)
        if names := called_by(kind, known):
            own = inspect.unwrap(kind.forward).__globals__
            functions = {name: functools.partial(known[name], inspect.unwrap(own[name])) for name in names}
            module.forward = FusedRecurrence(module.forward, kind, functions)
