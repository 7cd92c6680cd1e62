"""Model shapes: exact parameter counts of published models, and what configs of many architectures mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vasuki.base.errors import ModelError
from vasuki.machines.profile_files import find_profile
from vasuki.models.config_json import shape_from_config
from vasuki.models.layout import Layout
from vasuki.models.named import NAMED_CONFIGS, named_shape
from vasuki.planner import make_plan
from vasuki.planner.lengths import Lengths

# As the models' own pages and checkpoints count them.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-9b": 9_241_705_984,
    "phi-3-mini": 3_821_079_552,
    "gpt-oss-20b": 20_914_757_184,
    "opt-6.7b": 6_658_473_984,
    "opt-30b": 29_974_540_288,
    "pythia-1.4b": 1_414_647_808,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_exact(name: str) -> None:
    assert named_shape(name).num_parameters == PARAMETERS[name]


def test_gpt_3_is_175_billion() -> None:
    assert named_shape("gpt-3").num_parameters == pytest.approx(175e9, rel=0.005)


def test_llama_3_8b_kv() -> None:
    shape = named_shape("llama-3-8b")
    assert shape.kv_bytes_per_token == 128 * 1024
    assert shape.kv_bytes_per_token_per_layer == 4096
    assert shape.weight_bytes == 2 * shape.num_parameters
    assert shape.with_dtype("float32").kv_bytes_per_token == 256 * 1024


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_flops_follow_from_active_parameters(name: str) -> None:
    shape = named_shape(name)
    assert shape.linear_flops_per_token == 2 * shape.active_layer_parameters
    assert shape.active_parameters <= shape.num_parameters
    assert (shape.active_parameters < shape.num_parameters) == bool(shape.num_experts)
    assert shape.layer_parameters + shape.embedding_parameters > 0.99 * shape.num_parameters


def test_active_parameters_of_mixtures() -> None:
    assert named_shape("mixtral-8x7b").active_parameters == pytest.approx(12.9e9, rel=0.01)
    assert named_shape("qwen3-30b-a3b").active_parameters == pytest.approx(3.3e9, rel=0.02)


def test_attention_flops_count_windowed_layers_apart() -> None:
    shape = named_shape("gemma-2-9b")
    per_pair = 4 * 16 * 256
    assert shape.attention_flops(100) == per_pair * 42 * 100
    assert shape.attention_flops(100, 10) == per_pair * (21 * 100 + 21 * 10)


def config(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": 12,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 100,
        **more,
    }


@pytest.mark.parametrize(
    ("more", "windowed"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, 12),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 16}, 0),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 8}, 4),
        ({"model_type": "gemma2", "sliding_window": 16}, 6),
        ({"model_type": "gemma3_text", "sliding_window": 16}, 10),
        ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "full_attention"] * 4}, 4),
    ],
)
def test_windowed_layers(more: dict[str, Any], windowed: int) -> None:
    shape = shape_from_config(config(**more))
    assert shape.num_windowed_layers == windowed
    assert bool(shape.sliding_window) == bool(windowed)


def test_architecture_decides_what_a_config_leaves_out() -> None:
    llama, gemma = shape_from_config(config()), shape_from_config(config(model_type="gemma"))
    neox = shape_from_config(config(model_type="gpt_neox"))
    assert (llama.tied_embeddings, gemma.tied_embeddings) == (False, True)
    assert (llama.gated_mlp, neox.gated_mlp) == (True, False)
    assert llama.num_kv_heads == 4
    assert llama.dtype == "bfloat16"
    assert shape_from_config(config(torch_dtype="float32")).dtype == "float32"
    assert shape_from_config(config(head_dim=32)).head_dim == 32


def test_multimodal_wrapper_is_read_through() -> None:
    wrapped = shape_from_config({"model_type": "gemma3", "text_config": config(model_type="gemma3_text")})
    assert wrapped.num_layers == 12
    assert wrapped.norms_per_layer == 4


def test_dense_layers_among_experts() -> None:
    shape = shape_from_config(
        config(
            model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0]
        )
    )
    assert (shape.num_expert_layers, shape.num_dense_layers) == (11, 1)
    assert sum(matrix.k * matrix.n * matrix.copies for matrix in shape.expert_matrices) == 64 * 8 + 8 * 3 * 64 * 32


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 64),  # said after scaling
        ({"rope_type": "yarn", "original_max_position_embeddings": 32}, 64),  # so that the factor is 2
        ({"type": "linear", "factor": 2.5}, 160),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}, 64),  # as Llama 3.1 says it
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "default", "factor": 4.0}, 64),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}, 64),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_contexts_reach_as_far_as_rotary_embeddings_are_scaled(rope: dict[str, Any], context: int, key: str) -> None:
    tree = config(max_position_embeddings=64, **{key: rope})
    assert shape_from_config(tree).max_context_tokens == context
    assert shape_from_config({**tree, "model_type": "gemma3_text"}).max_context_tokens == 64


def test_rows_stay_within_the_context_of_the_first_training() -> None:
    """As Phi-3's, Phi-4-mini's and transformers' own config.json spell it."""
    long = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    assert shape_from_config(config(**long)).max_context_tokens == 131072
    for kind in ({"type": "su"}, {"type": "longrope"}, {"rope_type": "longrope"}):
        assert shape_from_config(config(**long, rope_scaling=kind)).max_context_tokens == 4096
    inside = {"rope_type": "longrope", "original_max_position_embeddings": 8192}
    assert shape_from_config(config(max_position_embeddings=65536, rope_parameters=inside)).max_context_tokens == 8192
    by_type = {"full_attention": inside, "sliding_attention": {"rope_type": "default"}}
    assert shape_from_config(config(max_position_embeddings=65536, rope_parameters=by_type)).max_context_tokens == 8192
    both = {"original_max_position_embeddings": 4096, "rope_scaling": inside, "max_position_embeddings": 65536}
    assert shape_from_config(config(**both)).max_context_tokens == 4096, "as transformers has it"
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 8192}
    assert shape_from_config(config(max_position_embeddings=65536, rope_parameters=yarn)).max_context_tokens == 65536


def test_latent_attention() -> None:
    """DeepSeek-V2, arXiv 2405.04434: 16B parameters, 2.4B of them active; V3, 2412.19437: 671B and 37B."""
    lite, large = named_shape("deepseek-v2-lite"), named_shape("deepseek-v3")
    assert lite.num_parameters == 15_706_484_224
    assert large.num_parameters == pytest.approx(671.0e9, rel=1e-3)
    assert large.active_parameters - large.embedding_parameters // 2 == pytest.approx(37e9, rel=0.02)
    assert lite.head_dim == 128 + 64
    assert lite.kv_bytes_per_token == 27 * 2 * 16 * 192 * 2, "stored as heads attend to them"
    narrow = {matrix.name: (matrix.k, matrix.n) for matrix in lite.attention_matrices}
    assert narrow == {"q": (2048, 3072), "kv_a": (2048, 576), "kv_b": (512, 4096), "o": (2048, 2048)}


def test_heads_that_differ_with_the_window() -> None:
    """Gemma 4, as its makers and as transformers write its config.json."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    sizes = config(model_type="gemma4_text", head_dim=32, num_key_value_heads=4, layer_types=kinds, sliding_window=8)
    published = sizes | {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    written = sizes | {"per_layer_config": {i: {"head_dim": 64, "num_key_value_heads": 1} for i in ("05", "11")}}
    shapes = [shape_from_config(each, "gemma") for each in (published, written)]
    assert shapes[0] == shapes[1]
    shape = shapes[0]
    assert (shape.full_heads, shape.num_kv_heads, shape.head_dim) == ((1, 64), 4, 32)
    stored = 10 * 4 * 32 + 2 * 1 * 64
    assert stored * 2 * 2 <= shape.kv_bytes_per_token < stored * 2 * 2 + 4 * 12, "rounded up to whole numbers a layer"
    assert shape.attention_flops(100, 10) == 4 * 4 * (2 * 64 * 100 + 10 * 32 * 10)
    assert not shape.stores_evenly
    assert [shape.kv_share(devices) for devices in (1, 2, 4, 8)] == [
        held / stored for held in (stored, 10 * 2 * 32 + 2 * 64, 10 * 32 + 2 * 64, 10 * 32 + 2 * 64)
    ], "heads are copied where there are fewer than devices"
    for other in ({"00": {"head_dim": 64}}, {i: {"intermediate_size": 64} for i in ("05", "11")}):
        with pytest.raises(ModelError, match="differ in other ways"):
            shape_from_config(sizes | {"per_layer_config": other})


def test_gpt_2_spelling() -> None:
    shape = shape_from_config(
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    )
    assert shape.num_parameters == 124_439_808


def test_read_from_folder_and_file(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config()), encoding="utf-8")
    assert shape_from_config(folder).name == "tiny"
    assert shape_from_config(folder / "config.json", name="mine").name == "mine"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layer_types": ["linear_attention"] * 12}, "none of its layers attend"),
        ({"layer_types": ["linear_attention"] * 11 + ["full_attention"]}, "not supported by the cost model"),
        ({"model_type": "bert"}, "says is_decoder: true"),
        ({"model_type": "xlnet", "is_decoder": True}, "attend to those behind them"),
        ({"mamba_d_state": 16}, "which of its layers attend"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"num_experts": 8}, "no num_experts_per_tok"),
        ({"kv_lora_rank": 8}, "no 'qk_rope_head_dim'"),
        ({"hidden_size": "wide"}, "not understood"),
        ({"rope_scaling": "linear"}, "not understood"),
        ({"per_layer_config": [{"head_dim": 8}]}, "not understood"),
    ],
)
def test_what_cannot_be_costed_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shape_from_config(config(**more))


def test_unreadable_configs(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read model config"):
        shape_from_config(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="is not valid JSON"):
        shape_from_config(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match="does not describe a model"):
        shape_from_config(tmp_path)


def test_unknown_names() -> None:
    with pytest.raises(ModelError, match=r"unknown model shape 'llama-3-8'.*did you mean 'llama-3-8b'"):
        named_shape("llama-3-8")
    with pytest.raises(ModelError, match=r"unknown dtype 'bfloat'.*did you mean 'bfloat16'"):
        named_shape("llama-3-8b").with_dtype("bfloat")


DELTA_NET = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
# Published sizes and spellings, with the parameters that transformers counts, the layers that attend, and what a row
# keeps in addition to its KV.
HYBRIDS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "qwen3_5_text": (
        dict(vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, head_dim=256,
             num_attention_heads=16, num_key_value_heads=4, full_attention_interval=4, **DELTA_NET),
        8_953_803_264, 8, 24 * (8192 * 4 * 2 + 32 * 128 * 128 * 4),
    ),
    "qwen3_next": (
        dict(vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=48, head_dim=256,
             num_attention_heads=16, num_key_value_heads=2, full_attention_interval=4, num_experts=512,
             num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, **DELTA_NET),
        79_674_391_296, 12, 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4),
    ),
    "lfm2": (
        dict(vocab_size=65536, hidden_size=2048, block_ff_dim=12288, num_hidden_layers=16, num_attention_heads=32,
             num_key_value_heads=8, conv_L_cache=3, full_attn_idxs=[2, 5, 8, 11, 14], tie_embedding=True),
        1_176_638_080, 5, 11 * 2048 * 3 * 2,
    ),
    "jamba": (
        dict(vocab_size=65536, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8, attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2,
             expert_layer_offset=1, num_experts=16, num_experts_per_tok=2, mamba_d_state=16, mamba_d_conv=4,
             mamba_expand=2, mamba_dt_rank=256),
        51_570_323_328, 4, 28 * (8192 * 4 * 2 + 8192 * 16 * 4),
    ),
    "nemotron_h": (
        dict(vocab_size=131072, hidden_size=4096, hybrid_override_pattern="ME" * 8 + "*E*E-", num_attention_heads=32,
             num_key_value_heads=8, head_dim=128, intermediate_size=21504, ssm_state_size=128, mamba_num_heads=128,
             mamba_head_dim=64, n_groups=8, conv_kernel=4, n_routed_experts=8, n_shared_experts=1,
             moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688, num_experts_per_tok=2),
        7_879_502_848, 2, 8 * (10240 * 4 * 2 + 8192 * 128 * 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_that_carry_a_state_are_told_from_those_that_attend(name: str) -> None:
    sizes, parameters, attending, state_bytes = HYBRIDS[name]
    shape = shape_from_config({"model_type": name, **sizes})
    assert shape.num_parameters == pytest.approx(parameters, rel=3e-4)
    assert shape.num_attention_layers == attending
    assert shape.state_bytes == state_bytes
    heads = attending * shape.num_kv_heads * shape.head_dim
    assert shape.kv_bytes_per_token == pytest.approx(2 * 2 * heads, abs=shape.num_layers)


# The same of models whose rows are computed one by one, for which rough sizes do.
ALONE: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "mamba": (
        dict(vocab_size=50280, hidden_size=2560, state_size=16, num_hidden_layers=64, conv_kernel=4, expand=2),
        2_768_345_600, 0, 64 * 5120 * (4 * 2 + 16 * 4),
    ),
    "mamba2": (
        dict(vocab_size=32768, hidden_size=4096, num_heads=128, head_dim=64, state_size=128, num_hidden_layers=64,
             expand=2, conv_kernel=4, n_groups=8, tie_word_embeddings=False),
        7_285_403_648, 0, 64 * (10240 * 4 * 2 + 8192 * 128 * 4),
    ),
    "rwkv": (
        dict(vocab_size=50277, hidden_size=4096, num_hidden_layers=32),
        7_392_649_216, 0, 32 * (2 * 4096 * 2 + 3 * 4096 * 4),
    ),
    "xlstm": (
        dict(vocab_size=50304, hidden_size=4096, num_heads=8, num_hidden_layers=32, qk_dim_factor=0.5,
             v_dim_factor=1.0, ffn_proj_factor=2.667),
        6_865_424_896, 0, 32 * 8 * 256 * 512 * 4,
    ),
    "zamba": (
        dict(vocab_size=32000, hidden_size=3712, intermediate_size=14848, num_attention_heads=16, num_hidden_layers=76,
             layers_block_type=(["linear_attention"] * 5 + ["hybrid"]) * 12 + ["linear_attention"] * 4, n_mamba_heads=2,
             mamba_d_state=16, mamba_d_conv=4, mamba_expand=2),
        7_232_490_496, 12, 76 * ((7424 + 2 * 16) * 4 * 2 + 7424 * 16 * 4),
    ),
    "minimax": (
        dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
             layer_types=["linear_attention", "full_attention"] * 16),
        47_373_783_040, 32, 0,
    ),
    "openai-gpt": (dict(vocab_size=40478, n_embd=768, n_layer=12, n_head=12, n_positions=512), 116_534_784, 12, 0),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", ALONE)
def test_rows_that_are_computed_alone_have_a_rough_cost(name: str) -> None:
    sizes, parameters, attending, state_bytes = ALONE[name]
    shape = shape_from_config({"model_type": name, **sizes})
    assert not shape.in_blocks
    assert shape.num_parameters == pytest.approx(parameters, rel=0.35)
    assert (shape.num_attention_layers, shape.state_bytes) == (attending, state_bytes)
    lengths = Lengths(np.array([100, 900] * 8), np.array([50, 20] * 8))
    plan = make_plan(lengths, shape, find_profile("h200"))
    assert plan.schedule_bound_s <= plan.makespan_s
    assert plan.state_bytes == state_bytes


def test_an_encoder_may_be_a_decoder() -> None:
    assert shape_from_config(config(model_type="bert", is_decoder=True)).backend == "ragged"
    assert shape_from_config(config(model_type="roformer", is_decoder=True)).backend == "alone"


def test_how_rows_are_computed_may_be_known_better_than_from_the_type() -> None:
    unknown = config(model_type="new", layer_types=["linear_attention"] * 4)
    with pytest.raises(ModelError, match="none of its layers attend"):
        shape_from_config(unknown)
    assert shape_from_config(unknown, backend="alone").in_blocks is False


def test_a_mixture_of_one_expert_is_none() -> None:
    """Jamba's small models say `num_experts: 1` and keep the default of two for each token."""
    sizes = {**HYBRIDS["jamba"][0], "num_experts": 1}
    shape = shape_from_config({"model_type": "jamba", **sizes})
    assert (shape.num_experts, shape.num_expert_layers, shape.num_dense_layers) == (0, 0, 32)
    assert shape.active_parameters == shape.num_parameters


def test_a_model_whose_layers_all_do_both() -> None:
    sizes: dict[str, Any] = dict(mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_n_groups=2)
    shape = shape_from_config(config(model_type="falcon_h1", **sizes))
    assert shape.num_attention_layers == shape.num_layers
    assert shape.state_bytes == shape.num_layers * ((64 + 2 * 32) * 4 * 2 + 64 * 16 * 4)


def test_layers_that_a_config_class_adds_defaults_to() -> None:
    """transformers writes sizes of experts and of Mamba layers into configs of models that have none."""
    sizes = HYBRIDS["nemotron_h"][0]
    dense = {**sizes, "hybrid_override_pattern": "M-M*-"}
    without = {key: value for key, value in dense.items() if "expert" not in key and "moe" not in key}
    assert shape_from_config({"model_type": "nemotron_h", **dense}).num_parameters == pytest.approx(
        shape_from_config({"model_type": "nemotron_h", **without}).num_parameters
    )
    granite = config(
        model_type="granitemoehybrid",
        layer_types=["attention"] * 12,
        num_local_experts=0,
        shared_intermediate_size=128,
        mamba_d_state=256,
    )
    assert shape_from_config(granite).recurrent is None


def test_experts_in_every_other_layer_do_not_wait_on_the_host() -> None:
    shape = shape_from_config({"model_type": "jamba", **HYBRIDS["jamba"][0]})
    with pytest.raises(ModelError, match="very different sizes"):
        Layout(host_layers=4).check(shape)
    Layout(host_layers=4).check(shape_from_config(config()))
