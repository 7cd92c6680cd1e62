"""config.json -> ModelShape, as architectures spell their sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vasuki.base.errors import ModelError
from vasuki.models.files import why_no_json
from vasuki.models.launches import LAUNCHES, UNKNOWN_LAUNCHES
from vasuki.models.recurrent_config import (
    MLP_ALONE,
    RECURRENT,
    SILENT,
    layer_kinds,
    layers_with_mlp,
    recurrent_layers,
)
from vasuki.models.shape import DTYPE_BYTES, TOKEN_ID_BYTES, Backend, Latent, ModelShape


def shape_from_config(
    source: str | Path | Mapping[str, Any], name: str = "", backend: Backend | None = None
) -> ModelShape:
    """Read a `config.json`, a folder that holds one, or its parsed content.

    Args:
        source: the file, the folder, or the parsed content.
        name: the model's; by default its source.
        backend: how its rows are computed, where that is known better than from its type.

    Raises:
        ModelError: the file cannot be read, lacks sizes, or describes a model whose cost this cannot state
            (encoder-decoder; layers of unknown kinds that all rows pass together).
    """
    if isinstance(source, Mapping):
        return _from_config(
            source, name or str(source.get("_name_or_path") or source.get("model_type", "model")), backend
        )
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    tree = read_config(path)
    shape = _from_config(tree, name or path.resolve().parent.name, backend)
    text = tree.get("text_config")
    said = any(each.get(key) for each in (tree, text or {}) for key in _SPELLINGS["dtype"])
    return shape if said else shape.with_dtype("float32")  # as transformers loads weights of which nothing is said


def read_config(path: Path) -> dict[str, Any]:
    """What a `config.json` holds. Raises ModelError if it cannot be read, or is something else."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read model config {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(why_no_json(path, error)) from None
    if not isinstance(tree, dict):
        raise ModelError(f"{path} does not describe a model")
    return tree


# How one config key is spelled across architectures; the first that is present counts.
_DECODER_HEADS = ("attention_heads", "decoder_attention_heads", "num_decoder_attention_heads")
_SPELLINGS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", *_DECODER_HEADS),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "intermediate": ("intermediate_size", "hidden_dim", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"),
    "context": ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"),
    "dtype": ("dtype", "torch_dtype"),
}

# Architectures whose MLP has no gate.
_PLAIN_MLP = {
    "gpt2",
    "gpt_neox",
    "gpt_neo",
    "gptj",
    "opt",
    "phi",
    "bloom",
    "falcon",
    "starcoder2",
    "gpt_bigcode",
    "mpt",
    "nemotron_h",
    "openai-gpt",
    "rwkv",
}
# Architectures that share embedding and head unless the config says otherwise (their configs often leave the key out).
_TIED = {"gpt2", "opt", "gemma", "gemma2", "gemma3", "gemma3_text", "bloom", "mpt", "gpt_bigcode", "cohere", "cohere2"}
_GEMMA_4 = {"gemma4_text", "gemma4_unified_text"}
_TIED |= {"mamba", "falcon_mamba", "recurrent_gemma", "openai-gpt"}
_TIED |= {"lfm2", "lfm2_moe", "lfm3", "starcoder2", "smollm3", "gpt_neo", "falcon", "gemma3n_text", *_GEMMA_4}
# Architectures with norms around both the attention and the MLP.
_SANDWICH_NORMS = {"gemma2", "gemma3", "gemma3_text", "gemma3n_text", *_GEMMA_4, "glm4"}
# LayerNorm (weight and bias) instead of RMSNorm (weight).
_LAYER_NORM = {"gpt2", "gpt_neox", "gpt_neo", "gptj", "opt", "phi", "bloom", "falcon", "starcoder2", "gpt_bigcode"}
# What the config of an architecture implies where it is silent about biases: q, k and v; output; MLP.
_BIASES = dict.fromkeys(("gpt2", "gpt_neox", "opt", "phi", "bloom", "gpt_bigcode"), (True, True, True))
_BIASES |= dict.fromkeys(("qwen2", "qwen2_moe"), (True, False, False))
_BIASES["gptj"] = (False, False, True)
# Norms on queries and keys: one weight a head dimension, or one a projected column.
_QK_NORM_PER_HEAD = {"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "gemma3n_text", *_GEMMA_4}
_QK_NORM_FULL = {"olmo2", "olmo3"}
_LONG_ROPE = {"longrope", "su"}  # the second is how early models of Phi-3 spell it
_SCALED_ROPE = {"yarn", "linear", "llama3"}  # by a factor that is the same for rows of all lengths
_SAY_SCALED = {"gemma3", "gemma3_text"}  # whose context is said after scaling, without that of the first training
_TRAINED = "original_max_position_embeddings"
_UNSUPPORTED_KEYS = {"is_encoder_decoder": "an encoder", "moe_latent_size": "narrower experts"}
# Architectures whose attention is gated by a projection as wide as its queries.
_GATED_ATTENTION = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}


# Architectures that are decoders only where their config says so, and those that never are.
ENCODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"
).split()
_NEVER_CAUSAL = {"xlm", "xlnet"}
# Encoders whose first position is the one behind that of padding.
_COUNT_FROM_PADDING = set(
    "camembert data2vec-text mpnet roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl".split()
)
# Those that never generate, of which vectors and labels may be wanted.
_ENCODE_ALONE = set("albert deberta deberta-v2 distilbert eurobert gte modernbert mpnet nomic_bert".split())
# Architectures that the ragged backend refuses, see docs/models.md.
_BACKENDS: dict[str, Backend] = dict.fromkeys(
    "big_bird bloom codegen diffllama falcon gpt_neo gptj hrm_text llama4 llama4_text megatron-bert mpt nemotron "
    "phimoe rembert stablelm xglm".split(),
    "padded",
)
_BACKENDS |= dict.fromkeys(
    "axk2 bart bigbird_pegasus blenderbot blenderbot-small deepseek_v32 deepseek_v4 doge dots3_note_text falcon_mamba "
    "git glm_moe_dsa gpt_neox_japanese hy_v4 inkling2_text inkling_text mamba mamba2 marian mbart minimax mllama mvp "
    "pegasus plbart prophetnet qwen4_exp qwen4_exp_text roformer rwkv trocr whisper xlstm zamba zamba2 zaya".split(),
    "alone",
)
_BACKENDS |= dict.fromkeys(("openai-gpt", "recurrent_gemma", "reformer"), "uncached")
# Models, of these and of the others that compute padded rows, that attend only by transformers' operators.
_EAGER = set(
    "big_bird bigbird_pegasus bloom codegen deepseek_v4 git gpt_neo gpt_neox_japanese gptj hy_v4 inkling2_text "
    "megatron-bert mpt mvp openai-gpt prophetnet reformer rembert roformer trocr xglm".split()
)


def encodes(config: Mapping[str, Any]) -> bool:
    """Whether the tokens of a model attend to those behind them, too, as its config.json tells."""
    family = str(config.get("model_type", ""))
    return family in _ENCODE_ALONE or (family in ENCODERS and not config.get("is_decoder"))


def _from_config(config: Mapping[str, Any], name: str, backend: Backend | None) -> ModelShape:
    try:
        return _read(config, name, backend)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{name}: its config has sizes that are not understood: {what}") from None


def _read(config: Mapping[str, Any], name: str, backend: Backend | None) -> ModelShape:
    text = config.get("text_config")
    if isinstance(text, Mapping):  # a multimodal wrapper: the language model decides
        config = {**{key: value for key, value in config.items() if key in ("tie_word_embeddings", "dtype")}, **text}
    family = str(config.get("model_type", "llama"))
    if backend is None and family in _NEVER_CAUSAL:
        raise ModelError(f"{name}: its tokens attend to those behind them")
    if backend is None and family in ENCODERS and not config.get("is_decoder"):
        raise ModelError(f"{name}: its tokens attend to those behind them; a decoder's config says is_decoder: true")
    backend = backend or _BACKENDS.get(family, "ragged")
    by_itself = backend in ("alone", "uncached")  # each row, so that rough sizes do
    for key, feature in _UNSUPPORTED_KEYS.items():
        if config.get(key):
            raise ModelError(f"{name}: {feature} (config key {key}) is not supported")

    def size(key: str, default: int | None = None) -> int:
        for spelling in _SPELLINGS[key]:
            value: Any = config.get(spelling)
            if isinstance(value, (list, tuple)) and value:  # one for each layer
                return round(sum(value) / len(value))
            if value is not None:
                return int(value)
        if default is None:
            raise ModelError(f"{name}: the config has no {_SPELLINGS[key][0]}")
        return default

    named = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()  # where it is not counted
    layers, hidden = size("layers", len(named) or None), size("hidden")
    heads = size("heads", 1 if by_itself else None)
    kinds = layer_kinds(config, layers)
    kv_heads = 1 if config.get("multi_query") else size("kv_heads", heads)
    latent = _latent(config)
    head_dim = int(config.get("head_dim") or config.get("kv_channels") or hidden // heads)
    if latent:  # transformers' configs call the part of it that is rotated head_dim
        kv_heads, head_dim = heads, int(config["qk_nope_head_dim"]) + latent.rotary_dim
    if config.get("vocab_size") is None:
        raise ModelError(f"{name}: the config has no vocab_size")
    vocab = int(config["vocab_size"])
    context = context_of(config) or 4096

    experts = size("experts", 0) if config.get("enable_moe_block", True) else 0
    experts = 0 if experts == 1 and not config.get("moe_intermediate_size") else experts  # one is a dense MLP: Jamba
    expert_size = int(config.get("moe_intermediate_size") or size("intermediate", 4 * hidden)) if experts else 0
    expert_layers = _num_expert_layers(config, kinds, layers) if experts else 0
    experts = experts if expert_layers else 0
    with_mlp = layers_with_mlp(config, kinds)
    wider = config.get("ffn_proj_factor") or 4
    intermediate = size("intermediate", round(wider * hidden)) if expert_layers < layers and with_mlp != 0 else 0
    intermediate, shared_size = _mlp_sizes(config, family, layers, intermediate, expert_size)
    gated = family not in _PLAIN_MLP
    window, windowed_layers = _windows(config, family, kinds, layers)
    full_kv_heads, full_head_dim = _full_heads(config, family, name)
    recurrent = recurrent_layers(config, name, kinds, hidden, rough=by_itself)
    attending = sum(kind not in SILENT for kind in kinds) if recurrent else None
    lookup = int(config.get("hidden_size_per_layer_input") or 0)  # numbers of a token that a layer looks up

    qkv_bias, o_bias, mlp_bias = _BIASES.get(family, (False, False, False))
    qkv_bias = bool(config.get("attention_bias", config.get("use_bias", qkv_bias)))
    o_bias = bool(config.get("attention_bias", config.get("use_bias", o_bias))) and family not in ("qwen2", "qwen2_moe")
    mlp_bias = bool(config.get("mlp_bias", config.get("use_bias", mlp_bias)))
    norms = 4 if family in _SANDWICH_NORMS else 2
    norm_width = hidden * (2 if family in _LAYER_NORM else 1)
    qkv_width = (heads + 2 * kv_heads) * head_dim
    vectors = norms * norm_width + qkv_bias * qkv_width + o_bias * hidden
    vectors += mlp_bias * ((2 if gated else 1) * intermediate + hidden) if not experts else 0
    vectors += 2 * hidden * lookup + hidden * (lookup > 0)
    vectors += latent.query_rank + latent.kv_rank if latent else 0
    vectors += 2 * head_dim if family in _QK_NORM_PER_HEAD else 0
    vectors += (heads + kv_heads) * head_dim if family in _QK_NORM_FULL else 0
    if family == "gpt_oss":  # sinks, router bias, and a bias for each expert's matrices
        vectors += heads + experts + experts * (2 * expert_size + hidden)
    lookups = int(config.get("vocab_size_per_layer_input") or vocab)
    positions = {"gpt2": context, "gpt_bigcode": context, "opt": context + 2}.get(family, 0)

    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        tied_embeddings=bool(config.get("tie_word_embeddings", config.get("tie_embedding", family in _TIED))),
        gated_mlp=gated,
        num_experts=experts,
        experts_per_token=min(experts, size("experts_per_token")) if experts else 0,
        expert_intermediate_size=expert_size,
        shared_intermediate_size=shared_size if experts else 0,
        num_expert_layers=expert_layers,
        sliding_window=window,
        num_windowed_layers=windowed_layers,
        full_kv_heads=full_kv_heads,
        full_head_dim=full_head_dim,
        latent=latent,
        recurrent=recurrent,
        stored_bytes=TOKEN_ID_BYTES if backend == "uncached" or attending == 0 else 0,
        attention_layers=attending,
        mlp_layers=with_mlp,
        gated_attention=family in _GATED_ATTENTION,
        max_context_tokens=context,
        norms_per_layer=norms,
        vector_parameters_per_layer=vectors,
        extra_parameters=norm_width + positions * hidden + lookup * layers * (hidden + lookups),
        dtype=_dtype(config),
        launched_per_layer=LAUNCHES.get(family, UNKNOWN_LAUNCHES),
        backend=backend,
        longest_packed_tokens=longest_packed(config),
        eager=family in _EAGER,
    )


def context_of(config: Mapping[str, Any]) -> int | None:
    """Most tokens of a row; None where the config does not say.

    Rotary embeddings that are scaled reach that many times further than in the first training. With LongRoPE and
    the dynamic kind a row that outgrows the context of that training asks for other embeddings, and one model has one
    set of them for all rows of a step. So rows are kept within that context.
    """
    said = next((int(config[spelling]) for spelling in _SPELLINGS["context"] if config.get(spelling)), None)
    if said and encodes(config) and config.get("model_type") in _COUNT_FROM_PADDING:
        said -= int(config.get("pad_token_id") or 0) + 1
    sizes = [] if said is None else [said]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):  # or one a layer type
        kind = parameters.get("rope_type", parameters.get("type"))
        trained = config.get(_TRAINED) or parameters.get(_TRAINED)
        if kind in _LONG_ROPE and trained:
            sizes.append(int(trained))
        elif kind in _SCALED_ROPE and parameters is rope and said and config.get("model_type") not in _SAY_SCALED:
            sizes[0] = max(said, int((trained or said) * (parameters.get("factor") or 1)))
    return min(sizes, default=None)


def longest_packed(config: Mapping[str, Any]) -> int:
    """Tokens of the longest prompt that may share a row with others under a dense mask; 0 if none may.

    Such a mask stands in place of the model's own, and so of its windows. ALiBi is computed from masks of padding.
    """
    if config.get("model_type") == "bloom" or config.get("alibi"):
        return 0
    windows = (config.get(key) for key in ("sliding_window", "attention_chunk_size", "window_size"))
    return min(int(size) for size in (*windows, context_of(config) or 4096) if size)


def _latent(config: Mapping[str, Any]) -> Latent | None:
    """Return the sizes that keys and values are compressed to, if they are."""
    if not config.get("kv_lora_rank"):
        return None
    sizes = {"kv_rank": "kv_lora_rank", "rotary_dim": "qk_rope_head_dim", "value_dim": "v_head_dim"}
    return Latent(int(config.get("q_lora_rank") or 0), **{name: int(config[key]) for name, key in sizes.items()})


def _mlp_sizes(
    config: Mapping[str, Any], family: str, layers: int, intermediate: int, expert_size: int
) -> tuple[int, int]:
    """Width of a dense MLP, and of the expert that every token passes, from what the keys for them seem to say."""
    own_size = config.get("shared_expert_intermediate_size") or config.get("moe_shared_expert_intermediate_size")
    shared_size = int(
        own_size or int(config.get("n_shared_experts") or config.get("num_shared_experts") or 0) * expert_size
    )
    if config.get("enable_moe_block"):  # Gemma 4 has both side by side
        shared_size = int(config["intermediate_size"])
    if family == "granitemoehybrid":  # has the expert that every token passes in any case
        shared_size = intermediate = int(config["shared_intermediate_size"])
    if family == "lfm2" and config.get("block_auto_adjust_ff_dim", True):
        multiple = int(config.get("block_multiple_of", 256))
        shrunk = 2 * int(config.get("block_ff_dim", intermediate)) / 3 * config.get("block_ffn_dim_multiplier", 1)
        intermediate = math.ceil(int(shrunk) / multiple) * multiple
    if config.get("use_double_wide_mlp"):  # of Gemma 4's layers that share keys and values with others
        intermediate = intermediate * (layers + int(config.get("num_kv_shared_layers") or 0)) // layers
    return intermediate, shared_size


def _num_expert_layers(config: Mapping[str, Any], kinds: Sequence[str], layers: int) -> int:
    """Layers whose MLP is a mixture: every `decoder_sparse_step`-th, less those that the config names as dense."""
    if MLP_ALONE & set(kinds):
        return kinds.count("moe")
    if mlps := config.get("mlp_layer_types"):
        return sum(kind != "dense" for kind in mlps)
    if period := config.get("expert_layer_period"):
        return len(range(int(config.get("expert_layer_offset", 0)), layers, period))
    step, dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or ())
    dense |= set(range(int(config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0)))
    return sum(index not in dense and (index + 1) % step == 0 for index in range(layers))


def _windows(config: Mapping[str, Any], family: str, kinds: Sequence[str], layers: int) -> tuple[int, int]:
    """Size of the sliding window and the number of layers that have one."""
    window = int(config.get("sliding_window") or 0)
    if not window or not config.get("use_sliding_window", not family.startswith("qwen")):
        return 0, 0
    if config.get("layer_types"):
        windowed = sum(kind in ("sliding_attention", "hybrid_sliding") for kind in config["layer_types"])
    elif family.startswith("qwen"):  # layers below max_window_layers attend to everything
        windowed = max(0, layers - int(config.get("max_window_layers", layers)))
    else:  # every pattern-th layer attends to everything
        implied = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
        implied |= dict.fromkeys(_GEMMA_4, 6)
        pattern = int(config.get("sliding_window_pattern") or implied.get(family, 0))
        windowed = layers - layers // pattern if pattern else layers
        windowed = 0 if RECURRENT & set(kinds) else windowed  # of which configs say so by layer
    return (window, windowed) if windowed else (0, 0)


def _full_heads(config: Mapping[str, Any], family: str, name: str) -> tuple[int, int]:
    """KV heads of layers without a window and the size of their heads, each 0 where it equals the other layers'."""
    if own := config.get("per_layer_config"):  # as transformers writes it: whatever differs, by layer
        kinds = config.get("layer_types") or []
        full = {index for index, kind in enumerate(kinds) if kind == "full_attention"}
        found = {(int(each.get("num_key_value_heads") or 0), int(each.get("head_dim") or 0)) for each in own.values()}
        others = {key for each in own.values() for key in each} - {"num_key_value_heads", "head_dim"}
        if others or len(found) > 1 or {int(index) for index in own} != full:
            raise ModelError(f"{name}: layers that differ in other ways than by their window have no cost model")
        return found.pop()
    if family in _GEMMA_4:  # as its makers write it
        own_heads = config.get("attention_k_eq_v", family != "gemma4_text")
        full_kv_heads = config.get("num_global_key_value_heads") if own_heads else 0
        return int(full_kv_heads or 0), int(config.get("global_head_dim") or 512)
    return 0, 0


def _dtype(config: Mapping[str, Any]) -> str:
    for spelling in _SPELLINGS["dtype"]:
        if config.get(spelling) in DTYPE_BYTES:
            return str(config[spelling])
    return "bfloat16"
