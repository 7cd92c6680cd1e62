"""config.json -> the kinds of a model's layers, and those that carry a state from token to token, as architectures
spell them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vasuki.base.errors import ModelError
from vasuki.models.shape import Matrix, Recurrent

RECURRENT = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}
ATTENDING_TOO = {"hybrid", "hybrid_sliding"}  # that attend as well
MLP_ALONE = {"mlp", "moe"}
SILENT = RECURRENT - ATTENDING_TOO | MLP_ALONE  # do not attend
_LETTERS = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}  # of Nemotron-H
_SHARING = {"zamba", "zamba2"}  # whose layers have weights together; all but the hybrid ones have no MLP
_MAMBA = {"mamba", "falcon_mamba", "mamba2"}  # of layers that are nothing else
_ATTENTION_FREE = {*_MAMBA, "rwkv", "xlstm"}
_CONV_KERNELS, _SCAN_KERNELS = 15, 60  # as counted in transformers 5.23: LFM2 15, Mamba 48 to 72, delta nets 71


def layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kind of each layer, where the config says that it is not attention and an MLP."""
    if config.get("model_type") in _ATTENTION_FREE:
        return ["linear_attention"] * layers
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return list(kinds)
    if letters := config.get("hybrid_override_pattern"):
        return [_LETTERS[letter] for letter in letters]
    if config.get("model_type") == "falcon_h1":
        return ["hybrid"] * layers
    attending = _attending(config, layers)
    if attending is None:
        return []
    other = "conv" if config.get("conv_L_cache") else "linear_attention"
    return ["full_attention" if layer in attending else other for layer in range(layers)]


def _attending(config: Mapping[str, Any], layers: int) -> Collection[int] | None:
    """The layers that attend, where the config names them; the others carry a state."""
    if period := config.get("full_attention_interval") or config.get("layer_group_size"):
        return range(period - 1, layers, period)
    if period := config.get("attn_layer_period"):
        return range(config.get("attn_layer_offset", 0), layers, period)
    if kimi := config.get("linear_attn_config"):
        return [layer - 1 for layer in kimi["full_attn_layers"]]
    named: Collection[int] | None = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    return named


def layers_with_mlp(config: Mapping[str, Any], kinds: Sequence[str]) -> int | None:
    """How many layers have an MLP, of experts or not; None: all of them."""
    if config.get("model_type") in _MAMBA:
        return 0
    if config.get("model_type") in _SHARING:
        return sum(kind in ATTENDING_TOO for kind in kinds)
    return sum(kind in MLP_ALONE for kind in kinds) or None


def recurrent_layers(
    config: Mapping[str, Any], name: str, kinds: Sequence[str], hidden: int, rough: bool = False
) -> Recurrent | None:
    """The layers of a model that carry a state.

    Args:
        config: of the language model.
        name: of the model, for errors.
        kinds: of its layers.
        hidden: its hidden size.
        rough: layers of which little is known may be taken for layers that attend.

    Raises:
        ModelError: none of its layers attend, or what they are is not known.
    """
    layers = sum(kind in RECURRENT for kind in kinds)
    sizes = _sizes(config, hidden) if layers else None
    if rough and sizes is None:
        return None
    if not layers:
        if not kinds and (config.get("mamba_d_state") or config.get("ssm_state_size")):
            raise ModelError(f"{name}: its config does not say which of its layers attend")
        return None
    if set(kinds) <= SILENT and not rough:
        raise ModelError(f"{name}: none of its layers attend, which the cost model does not support")
    if sizes is None or (config.get("model_type") in _SHARING and not rough):
        raise ModelError(f"{name}: layers of type {sorted(set(kinds))} are not supported by the cost model")
    matrices, conv_size, state_size = sizes
    return Recurrent(layers, matrices, conv_size, state_size, _SCAN_KERNELS if state_size else _CONV_KERNELS)


def _sizes(config: Mapping[str, Any], hidden: int) -> tuple[tuple[Matrix, ...], int, int] | None:
    """Matrices of a layer, and the numbers that its convolution and its recurrence keep of a row."""

    def of(*spellings: str, default: int = 0) -> int:
        return next((int(config[each]) for each in spellings if isinstance(config.get(each), int)), default)

    if width := of("conv_L_cache"):  # short convolutions: LFM2
        return _in_and_out(hidden, 3 * hidden, hidden), hidden * width, 0
    width = of("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", default=4)
    if heads := of("linear_num_value_heads"):  # gated delta nets: arXiv 2412.06464
        keys, values = of("linear_num_key_heads") * of("linear_key_head_dim"), heads * of("linear_value_head_dim")
        matrices = _in_and_out(hidden, 2 * keys + 2 * values + 2 * heads, values)
        return matrices, (2 * keys + values) * width, values * of("linear_key_head_dim")
    kimi = config.get("linear_attn_config") or {}
    heads, size = (
        of("linear_num_heads", default=kimi.get("num_heads", 0)),
        of("linear_head_dim", default=kimi.get("head_dim", 0)),
    )
    if inner := heads * size:  # the same with a gate for each channel: arXiv 2510.26692
        gates = (Matrix("kv_a", hidden, 2 * size), Matrix("kv_b", 2 * size, inner))
        return (*_in_and_out(hidden, 3 * inner + heads, inner), *gates), 3 * inner * width, inner * size
    if config.get("model_type") == "rwkv":  # arXiv 2305.13048: three sums of each channel, and the token before
        inner = of("attention_hidden_size", default=hidden)
        return _in_and_out(hidden, 3 * inner, inner), 2 * hidden, 3 * inner
    if factors := config.get("qk_dim_factor"):  # mLSTM: arXiv 2405.04517
        keys, values = int(factors * hidden), int(config["v_dim_factor"] * hidden)
        heads = of("num_heads", default=1)
        return _in_and_out(hidden, 2 * keys + 2 * values + 2 * heads, values), 0, keys * values // heads
    state = of("mamba_d_state", "ssm_state_size", "state_size")
    inner = of("mamba_expand", "expand", default=2) * hidden
    if state and (heads := of("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")):
        inner = of("mamba_d_ssm") or heads * of(  # Mamba-2: arXiv 2405.21060
            "mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim", default=inner // heads
        )
        groups = of("mamba_n_groups", "mamba_ngroups", "n_groups", default=1) * state
        return _in_and_out(hidden, 2 * inner + 2 * groups + heads, inner), (inner + 2 * groups) * width, inner * state
    if state:  # Mamba: arXiv 2312.00752
        rank = of("mamba_dt_rank", "time_step_rank", default=math.ceil(hidden / 16))
        steps = (Matrix("x", inner, rank + 2 * state), Matrix("dt", rank, inner))
        return (*_in_and_out(hidden, 2 * inner, inner), *steps), inner * width, inner * state
    return None


def _in_and_out(hidden: int, inputs: int, outputs: int) -> tuple[Matrix, Matrix]:
    return Matrix("mixer", hidden, inputs), Matrix("o", outputs, hidden)
