"""Well-known models by their names, for plans without a model."""

from __future__ import annotations

from typing import Any

from vasuki.base.errors import ModelError, did_you_mean
from vasuki.models.config_json import shape_from_config
from vasuki.models.shape import ModelShape


def named_shape(name: str) -> ModelShape:
    """A well-known model's shape. Raises ModelError with the nearest name."""
    key = name.lower().replace("_", "-")
    if key not in NAMED_CONFIGS:
        raise ModelError(
            f"unknown model shape '{name}'{did_you_mean(key, NAMED_CONFIGS)}; known: {', '.join(sorted(NAMED_CONFIGS))}"
        )
    return shape_from_config(NAMED_CONFIGS[key], key)


def _llama(layers: int, hidden: int, intermediate: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "vocab_size": 32000,
        **more,
    }


def _gpt(family: str, layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": heads,
        **more,
    }


_LLAMA_3 = {"num_key_value_heads": 8, "vocab_size": 128256}
_QWEN_2 = {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768}
_DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_QWEN_3 = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}

# Published sizes: each model's config.json or paper (LLaMA: arXiv 2302.13971, table 2; GPT-3: 2005.14165, table 2.1).
NAMED_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-7b": _llama(32, 4096, 11008, 32, max_position_embeddings=2048),
    "llama-13b": _llama(40, 5120, 13824, 40, max_position_embeddings=2048),
    "llama-33b": _llama(60, 6656, 17920, 52, max_position_embeddings=2048),
    "llama-65b": _llama(80, 8192, 22016, 64, max_position_embeddings=2048),
    "llama-2-7b": _llama(32, 4096, 11008, 32, max_position_embeddings=4096),
    "llama-2-13b": _llama(40, 5120, 13824, 40, max_position_embeddings=4096),
    "llama-2-70b": _llama(80, 8192, 28672, 64, num_key_value_heads=8, max_position_embeddings=4096),
    "llama-3-8b": _llama(32, 4096, 14336, 32, **_LLAMA_3, max_position_embeddings=8192),
    "llama-3-70b": _llama(80, 8192, 28672, 64, **_LLAMA_3, max_position_embeddings=8192),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, **_LLAMA_3, max_position_embeddings=131072),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, **_LLAMA_3, max_position_embeddings=131072),
    "llama-3.2-1b": _llama(
        16, 2048, 8192, 32, **_LLAMA_3, head_dim=64, tie_word_embeddings=True, max_position_embeddings=131072
    ),
    "llama-3.2-3b": _llama(
        28, 3072, 8192, 24, **_LLAMA_3, head_dim=128, tie_word_embeddings=True, max_position_embeddings=131072
    ),
    "mistral-7b": _llama(
        32,
        4096,
        14336,
        32,
        model_type="mistral",
        num_key_value_heads=8,
        sliding_window=4096,
        max_position_embeddings=32768,
    ),
    "mixtral-8x7b": _llama(
        32,
        4096,
        14336,
        32,
        model_type="mixtral",
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32768,
    ),
    "qwen2.5-0.5b": _llama(
        24, 896, 4864, 14, **{**_QWEN_2, "vocab_size": 151936}, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "qwen2.5-1.5b": _llama(
        28, 1536, 8960, 12, **{**_QWEN_2, "vocab_size": 151936}, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "qwen2.5-7b": _llama(28, 3584, 18944, 28, **_QWEN_2, num_key_value_heads=4),
    "qwen2.5-14b": _llama(48, 5120, 13824, 40, **_QWEN_2, num_key_value_heads=8),
    "qwen2.5-32b": _llama(64, 5120, 27648, 40, **_QWEN_2, num_key_value_heads=8),
    "qwen2.5-72b": _llama(80, 8192, 29568, 64, **_QWEN_2, num_key_value_heads=8),
    "qwen3-0.6b": _llama(28, 1024, 3072, 16, **_QWEN_3, num_key_value_heads=8, tie_word_embeddings=True),
    "qwen3-4b": _llama(36, 2560, 9728, 32, **_QWEN_3, num_key_value_heads=8, tie_word_embeddings=True),
    "qwen3-8b": _llama(36, 4096, 12288, 32, **_QWEN_3, num_key_value_heads=8),
    "qwen3-30b-a3b": _llama(
        48,
        2048,
        6144,
        32,
        **{**_QWEN_3, "model_type": "qwen3_moe"},
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "gemma-2-9b": _llama(
        42,
        3584,
        14336,
        16,
        model_type="gemma2",
        num_key_value_heads=8,
        head_dim=256,
        vocab_size=256000,
        sliding_window=4096,
        max_position_embeddings=8192,
    ),
    "phi-3-mini": _llama(32, 3072, 8192, 32, model_type="phi3", vocab_size=32064, sliding_window=2047),
    "gpt-oss-20b": _llama(
        24,
        2880,
        2880,
        64,
        model_type="gpt_oss",
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        num_local_experts=32,
        num_experts_per_tok=4,
        attention_bias=True,
        sliding_window=128,
        max_position_embeddings=131072,
    ),
    "deepseek-v2-lite": _llama(
        27,
        2048,
        10944,
        16,
        **{**_DEEPSEEK, "model_type": "deepseek_v2", "vocab_size": 102400},
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        max_position_embeddings=163840,
    ),
    "deepseek-v3": _llama(
        61,
        7168,
        18432,
        128,
        **{**_DEEPSEEK, "model_type": "deepseek_v3", "vocab_size": 129280},
        q_lora_rank=1536,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        max_position_embeddings=163840,
    ),
    "opt-6.7b": _gpt("opt", 32, 4096, 32, vocab_size=50272, max_position_embeddings=2048),
    "opt-30b": _gpt("opt", 48, 7168, 56, vocab_size=50272, max_position_embeddings=2048),
    "opt-66b": _gpt("opt", 64, 9216, 72, vocab_size=50272, max_position_embeddings=2048),
    "pythia-1.4b": _gpt("gpt_neox", 24, 2048, 16, vocab_size=50304, max_position_embeddings=2048),
    "gpt-3": _gpt("gpt2", 96, 12288, 96, vocab_size=50257, max_position_embeddings=2048),
}
