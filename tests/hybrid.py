"""The shape of a model with layers that carry a state, for tests of plans and costs."""

from __future__ import annotations

from vasuki.models.config_json import shape_from_config

HYBRID = shape_from_config(  # of 9 billion parameters: a state is as large as the KV of 1,584 tokens
    dict(
        model_type="qwen3_5_text",
        vocab_size=248320,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        head_dim=256,
        num_attention_heads=16,
        num_key_value_heads=4,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        max_position_embeddings=65536,
    )
)
