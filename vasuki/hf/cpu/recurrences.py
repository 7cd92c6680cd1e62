"""Recurrences on a CPU: compiled kernels take a row's tokens through its state one by one, in place of many operators.

For a single token that is one pass over the states instead of twenty. For a prompt it is what transformers' operators
avoid by computing chunks of tokens, filled up to a whole one, as products of matrices; a state that stays in a cache is
faster than all that (docs/LOG.md).

`fused_recurrence` gives them the place of transformers' functions.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, cast

import torch
from torch.nn.functional import silu, softplus

from vasuki.hf.kernels.recurrent_functions import Function

_ACTIVATIONS = (None, "silu", "swish")  # that a convolution applies itself


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


class _Mamba(ctypes.Structure):
    """`Mamba` of recurrences.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "step", "a", "b", "c", "states", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "channels", "numbers")),
    )


class _Convolution(ctypes.Structure):
    """`Convolution` of recurrences.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "channels", "width", "activates")),
    )


class _ConvolutionStep(ctypes.Structure):
    """`ConvolutionStep` of recurrences.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "states", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "channels", "width", "activates")),
    )


class Recurrences:
    """Kernels with the signatures of transformers' functions, which are their plain twins and take over what the
    kernels do not do. States are updated where they lie."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.vasuki_most_in_head.restype = ctypes.c_int64
        self._most_in_head = library.vasuki_most_in_head()
        self._delta_rule = _function(library.vasuki_delta_rule, _DeltaRule)
        self._mamba_2 = _function(library.vasuki_mamba_2, _Mamba2)
        self._mamba = _function(library.vasuki_mamba, _Mamba)
        self._convolution = _function(library.vasuki_convolution, _Convolution)
        self._convolution_step = _function(library.vasuki_convolution_step, _ConvolutionStep)

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
        fits = _lies_plainly(state, rows, heads, keys, values) and max(keys, values) <= self._most_in_head
        if not output_final_state or not fits:
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
        channels]`, a `[heads, channels, numbers]`, b and c `[rows, groups, numbers]`, d and dt_bias `[heads,
        channels]`, z and output like hidden_states."""
        by_head = _repeats(dt, 2) and _repeats(a, 1) and _repeats(a, 2) and (dt_bias is None or _repeats(dt_bias, 1))
        if not by_head or not _lies_plainly(state, *hidden_states.shape, b.shape[-1]):
            options = dict(dt_bias=dt_bias, dt_softplus=dt_softplus, z=z)
            result: torch.Tensor = plain(state, hidden_states, dt, a, b, c, d, **options, **others)
            return result
        step = _time_steps(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
        x, step, b, c = (tensor.unsqueeze(1) for tensor in (hidden_states, step, b, c))
        output = self._mamba_2_tokens(state, x, step, b, c, a[:, 0, 0]).squeeze(1)
        if d is not None:
            output += hidden_states.float() * d.float()
        return (output if z is None else output * silu(z.float())).to(hidden_states.dtype)

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
        if not _lies_plainly(states, rows, heads, channels, numbers) or z is not None:
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

    def mamba(
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
        """One token of each row: state `[rows, channels, numbers]`, hidden_states, dt and z `[rows, channels]`, a
        `[channels, numbers]`, b and c `[rows, numbers]`, d and dt_bias `[channels]` -> output like hidden_states."""
        if not _lies_plainly(state, *hidden_states.shape, a.shape[-1]) or not dt_softplus or a.max() > 0:
            options = dict(dt_bias=dt_bias, dt_softplus=dt_softplus, z=z)
            result: torch.Tensor = plain(state, hidden_states, dt, a, b, c, d, **options, **others)
            return result
        x, step, b, c = (tensor.unsqueeze(-1) for tensor in (hidden_states, dt, b, c))
        gate = None if z is None else z.unsqueeze(-1)
        output = self._mamba_tokens(state, x, step, dt_bias, a, b, c, d, gate)
        return output.squeeze(-1).to(hidden_states.dtype)

    def mamba_prompts(
        self,
        plain: Function,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        *,
        initial_state: torch.Tensor | None = None,
        D: torch.Tensor | None = None,  # noqa: N803
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """hidden_states, dt and z `[rows, channels, tokens]`, a `[channels, numbers]`, b and c `[rows, numbers,
        tokens]`, D and delta_bias `[channels]`, state `[rows, channels, numbers]` -> output like hidden_states, and the
        state if it is asked for.

        The plain twin ignores any earlier state, and so does this where the twin computes, or where the state
        has another shape.
        """
        (rows, channels, _), numbers = hidden_states.shape, b.shape[1]
        if not delta_softplus or a.max() > 0:
            options = dict(delta_bias=delta_bias, delta_softplus=delta_softplus, return_last_state=return_last_state)
            result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = plain(
                hidden_states, dt, a, b, c, D=D, z=z, **options, **others
            )
            return result
        if initial_state is None or initial_state.shape != (rows, channels, numbers):
            initial_state = _zeros(rows, channels, numbers)
        state = initial_state.float().contiguous()
        output = self._mamba_tokens(state, hidden_states, dt, delta_bias, a, b, c, D, z).to(hidden_states.dtype)
        return (output, state) if return_last_state else output

    def _mamba_tokens(
        self,
        states: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        skip: torch.Tensor | None,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, channels, tokens = x.shape
        step = _time_steps(dt, None if bias is None else bias[:, None], True)
        given = [tensor.float().contiguous() for tensor in (x, step, a, b.transpose(1, 2), c.transpose(1, 2))]
        output = torch.empty_like(given[0])
        pointers = [tensor.data_ptr() for tensor in (*given, states, output)]
        self._mamba(_Mamba(*pointers, rows, tokens, channels, a.shape[-1]))
        if skip is not None:
            output += x.float() * skip.float()[:, None]
        return output if gate is None else output * silu(gate.float())

    def convolution(
        self,
        plain: Function,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """hidden_states `[rows, channels, tokens]`, weight `[channels, width]`, bias `[channels]` -> the same as
        hidden_states; channels lie side by side in it."""
        if activation not in _ACTIVATIONS:
            result: torch.Tensor = plain(hidden_states, weight, bias, activation, **others)
            return result
        x, weights = (tensor.float().contiguous() for tensor in (hidden_states.transpose(1, 2), weight.t()))
        rows, tokens, channels = x.shape
        bias = None if bias is None else bias.float().contiguous()
        output = torch.empty_like(x)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (x, weights, bias, output)]
        self._convolution(_Convolution(*pointers, rows, tokens, channels, len(weights), activation is not None))
        return output.to(hidden_states.dtype).transpose(1, 2)

    def convolution_step(
        self,
        plain: Function,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """One token of each row: hidden_states `[rows, channels, 1]`, conv_state `[rows, channels, width]`, weight
        `[channels, width]`, bias `[channels]` -> the same as hidden_states, and the state has moved up."""
        rows, channels, tokens = hidden_states.shape
        width = weight.shape[-1]
        fits = tokens == 1 and _lies_plainly(conv_state, rows, channels, width)
        if not fits or activation not in _ACTIVATIONS:
            result: torch.Tensor = plain(hidden_states, conv_state, weight, bias, activation, **others)
            return result
        given = [None if each is None else each.float().contiguous() for each in (hidden_states, weight, bias)]
        output = torch.empty(rows, channels, 1)
        pointers = [None if each is None else each.data_ptr() for each in (*given, conv_state, output)]
        sizes = (rows, channels, width, activation is not None)
        self._convolution_step(_ConvolutionStep(*pointers, *sizes))
        return output.to(hidden_states.dtype)

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
    """The time step of each head for each token."""
    steps = dt.float() if bias is None else dt.float() + bias.float()
    return softplus(steps) if is_softened else steps


def _function(function: Any, kind: type[ctypes.Structure]) -> Function:
    """A function of the library, which is given a pointer to its arguments."""
    function.restype, function.argtypes = None, [ctypes.POINTER(kind)]
    return cast(Function, function)


def _lies_plainly(state: torch.Tensor, *shape: int) -> bool:
    return state.shape == shape and state.dtype is torch.float32 and state.is_contiguous()


def _repeats(tensor: torch.Tensor, dim: int) -> bool:
    """Whether a tensor has equal values all along a dimension."""
    return tensor.shape[dim] == 1 or tensor.stride(dim) == 0
