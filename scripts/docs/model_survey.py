"""Which of transformers' causal language models vasuki serves: each in a tiny form, against `generate`.

    model_survey.py [NAME ...] [--write docs/models.md]

A model is served when its greedy tokens equal `generate`'s, in float32, with prompts whole and in chunks, and with
rows that wait for slots and memory, make room for others and come back, at random: by the ragged backend, with torch's
operators and with the kernels that a CPU would be given, or else by the padded one, where prompts share rows if they
may. Weights are random, layers few, windows short.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import itertools
import logging
import re
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vasuki.base.errors import ModelError, one_line
from vasuki.hf.attention.ragged_attention import NAME
from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import prepare, prepare_padded
from vasuki.hf.padded.probe import fewest_rows
from vasuki.models.config_json import ENCODERS, shape_from_config
from vasuki.models.shape import BACKENDS, Backend

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "hf"))
tiny: Any = importlib.import_module("tiny_models")  # the random models of the golden tests, and how they are run

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_SECONDS = 900  # for one model; more means that no tiny form was found
_BATCH_SECONDS = 300  # for `generate_batch`
_PARAMETERS = 30_000_000
_TOKENS = 10
_BLOCK_TOKENS = 4
_DRAWS = 3  # of runs that are random
_SIZES: dict[str, Any] = dict(
    tiny.COMMON,
    num_hidden_layers=4,
    sliding_window=9,
    attn_logit_softcapping=5.0,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    moe_num_experts=4,
    num_experts_per_tok=2,
    moe_k=2,
    moe_topk=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    n_group=1,
    topk_group=1,
    head_dim=8,
    v_head_dim=8,
    global_head_dim=16,
    num_global_key_value_heads=1,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=tiny.VOCAB,
    laurel_rank=4,
    altup_num_inputs=2,
    activation_sparsity_pattern=[0.0] * 4,
    num_kv_shared_layers=0,
)
_LATENT = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8
)
_ATTEMPTS = (_SIZES, {**_SIZES, **_LATENT}, {key: value for key, value in _SIZES.items() if key != "head_dim"})


# What the class of a configuration leaves out, and every published model has.
_MAMBA_2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=8)
_DELTA_NET = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, head_dim=16
)
_DECODER_ALONE = dict(is_encoder_decoder=False, is_decoder=True, forced_bos_token_id=None, forced_eos_token_id=None)
_DECODER = dict(
    d_model=32,
    decoder_layers=2,
    decoder_attention_heads=4,
    decoder_ffn_dim=48,
    encoder_layers=2,
    encoder_attention_heads=4,
    encoder_ffn_dim=48,
    **_DECODER_ALONE,
)
_ROTARY_GPT = dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=256)
_ROPE = dict(rope_type="default", rope_theta=10_000.0)
_INDEXED = dict(
    _DELTA_NET,
    hc_lowrank=8,
    ngram_vocab_size_base=50,
    split_ngram_parts=1,
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=8,
    indexer_compress_ratio=2,
)
_SHARED_BLOCKS = ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"]
_OWN: dict[str, dict[str, Any]] = {
    **{name: dict(is_decoder=True) for name in ENCODERS},
    **dict.fromkeys(
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart whisper".split(), _DECODER
    ),
    "codegen": _ROTARY_GPT,
    "gptj": _ROTARY_GPT,
    "gpt_neo": dict(num_layers=4, attention_types=[[["global", "local"], 2]], window_size=7),
    "dots1": dict(n_shared_experts=1),
    "dots3_note_text": dict(
        _LATENT,
        n_shared_experts=1,
        head_dim=16,
        index_topk=8,
        index_head_dim=16,
        index_n_heads=2,
        shared_experts_intermediate_size=24,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=16,
        swa_kv_lora_rank=16,
        swa_head_dim=16,
        swa_qk_nope_head_dim=8,
        swa_v_head_dim=8,
    ),
    "dbrx": dict(
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=256,
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
        ffn_config=dict(hidden_size=32, ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    ),
    "mamba2": dict(num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=8),
    "reformer": dict(
        is_decoder=True, hash_seed=0, axial_pos_shape=[16, 16], axial_pos_embds_dim=[16, 16], feed_forward_size=48
    ),
    "xlnet": dict(d_model=32, n_layer=2, n_head=4, d_head=8, d_inner=48),
    "xlstm": dict(hidden_size=64, qk_dim_factor=1.0, num_heads=4),
    "xmod": dict(languages=["en_XX"], default_language="en_XX", is_decoder=True),
    "zaya": dict(num_experts_per_tok=1),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "bamba": dict(attn_layer_indices=[1, 3], **_MAMBA_2),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"] * 2, **_MAMBA_2),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "kimi_linear": dict(layer_types=["linear_attention", "full_attention"] * 2, linear_head_dim=8, linear_num_heads=4),
    "bailing_hybrid": dict(layer_types=["linear_attention", "full_attention"] * 2),
    "glm5_next": dict(layer_types=["linear_attention", "full_attention"] * 2, linear_head_dim=8, linear_num_heads=4),
    "nemotron_h": dict(
        layers_block_type=["mamba", "moe", "attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        moe_shared_expert_intermediate_size=24,
    ),
    "olmo_hybrid": _DELTA_NET,
    "qwen4_exp": _INDEXED,
    "qwen4_exp_text": _INDEXED,
    "cohere_compass_text": dict(rope_parameters={"full_attention": _ROPE, "sliding_attention": _ROPE}),
    "prophetnet": dict(num_decoder_layers=2, num_decoder_attention_heads=4, decoder_ffn_dim=48, **_DECODER_ALONE),
    "trocr": _DECODER,
    "xglm": dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48),
    "zamba": dict(num_hidden_layers=6, layers_block_type=_SHARED_BLOCKS, num_key_value_heads=4),
    "zamba2": dict(
        num_hidden_layers=6,
        layers_block_type=_SHARED_BLOCKS,
        num_key_value_heads=4,
        mamba_d_state=16,
        n_mamba_heads=8,
        chunk_size=8,
    ),
}


# Why there is no tiny form, where what transformers says of it explains little.
_NO_FORM = {
    "blt": "`generate` asks its config for a number of layers that is not in it",
    "gemma3n": "its image tower needs the package timm; its language model is gemma3n_text",
    "gemma4_assistant": "it drafts tokens for another model, whose keys and values it reads",
    "gemma4_unified_assistant": "it drafts tokens for another model, whose keys and values it reads",
    "moshi": "`generate` changes its tokens by its cache",
    "musicgen": "its class takes a part of its config only",
    "musicgen_melody": "its class takes a part of its config only",
    "dots3_note": "its config names layers that only its large form has",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one model type."""

    name: str
    backend: Backend | None = None  # in which it is served
    kernels: str = ""  # that a CPU computes it by, in addition to attention and products
    is_foreseen: bool = True  # whether its config tells how much KV it stores, and which backend it takes
    in_batches: bool = False  # whether transformers' `generate_batch` gives the tokens of `generate`, too
    refusal: str = ""
    trouble: str = ""  # why there is no tiny form of it, or how its tokens differ


def survey(name: str) -> Finding:
    """Build, generate, run."""
    try:
        with _time_limit(_SECONDS):
            return _run(name)
    except ModelError as error:
        return Finding(name, refusal=str(error).removeprefix(f"{name}: "))
    except Exception as error:
        return Finding(name, trouble=_NO_FORM.get(name) or one_line(error)[:90])


def _run(name: str) -> Finding:
    """A model that is served.

    Raises ModelError if it is refused, ValueError if any way of running it gives other tokens than `generate`, or what
    building it raises.
    """
    model = _tiny_model(name)
    prompts = tiny.prompts(count=5, longest=40)
    # By a new model each: RecurrentGemma begins a prompt of one token with what its layers keep of the row before.
    expected = [_generated(copy.deepcopy(model), prompt) for prompt in prompts]
    try:
        forms = [_ragged(model, name, kernels) for kernels in (None, load_cpu_kernels())]
    except ModelError:
        forms = [prepare_padded(model, tiny.NoTokenizer(), GenerationConfig(eos_token_id=0), name)]
    for ready, how in itertools.product(forms, _ways_to_run(prompts)):
        endless = dataclasses.replace(ready, eos_token_ids=frozenset())
        requests = tiny.hopeful(tiny.requests_of(prompts, _TOKENS))
        order, options = how
        rows, *_ = tiny.run(endless, [requests[i] for i in order], **options)
        if rows.outputs != expected:
            by_itself = [_without_a_cache(model, prompt) for prompt in prompts]
            if by_itself != expected:
                raise ValueError("`generate` changes its tokens by its cache")
            raise ValueError(f"tokens differ, {ready.backend}, form {forms.index(ready)}, {how}")
    stored, shape = ready.token_bytes, shape_from_config(ready.config.to_dict(), name)
    planned = shape.with_dtype("float32").kv_bytes_per_token
    is_foreseen = (
        ready.backend == shape.backend and stored <= planned < stored + 8 * shape.num_layers
    )  # each layer rounded up
    return Finding(
        name, ready.backend, _kernels_of(ready.model), is_foreseen, _serves_batches(model, prompts, expected)
    )


def _ways_to_run(prompts: list[list[int]]) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """The order of rows, and what else there is to choose: whole prompts and short chunks, all at once with ample
    memory; then late rows, few blocks, steps of any size, and rows that are shared wherever they may be."""
    for chunk_tokens in (64, 7):
        yield list(range(len(prompts))), dict(chunk_tokens=chunk_tokens)
    random = np.random.default_rng(0)
    least = -(-(max(map(len, prompts)) + _TOKENS) // _BLOCK_TOKENS)
    for _ in range(_DRAWS):
        yield (
            random.permutation(len(prompts)).tolist(),
            dict(
                chunk_tokens=int(random.integers(1, 60)),
                num_blocks=int(random.integers(least, 2 * least)),
                block_tokens=_BLOCK_TOKENS,
                max_num_seqs=int(random.integers(2, len(prompts))),
                price=fewest_rows,
            ),
        )


def _serves_batches(model: Any, prompts: list[list[int]], expected: list[list[int]]) -> bool:
    """Whether transformers' own continuous batching gives these tokens, too."""
    generation = GenerationConfig(max_new_tokens=_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    memory = ContinuousBatchingConfig(block_size=32, num_blocks=16, max_batch_tokens=64, use_cuda_graph=False)
    for attention in ("eager", "sdpa"):
        try:
            with _time_limit(_BATCH_SECONDS):
                ours = copy.deepcopy(model)
                ours.set_attn_implementation(attention)
                found = ours.generate_batch(
                    prompts, generation_config=generation, continuous_batching_config=memory, warmup=False
                )
        except Exception:
            continue
        if sorted(each.generated_tokens for each in found.values()) == sorted(expected):
            return True
    return False


def _ragged(model: Any, name: str, kernels: Any) -> LoadedModel:
    """A copy for the ragged backend. Raises ModelError if that refuses it."""
    ours = copy.deepcopy(model)
    ours.set_attn_implementation(NAME)
    if kernels:
        kernels.install(ours)
    return prepare(ours, tiny.NoTokenizer(), GenerationConfig(eos_token_id=0), name)


def _tiny_model(name: str) -> Any:
    """The first tiny form that can be built and run. Raises what the last attempt met."""
    trouble: Exception = LookupError()
    for sizes in _ATTEMPTS:
        try:
            config = _tiny_config(type(AutoConfig.for_model(name)), sizes, _OWN.get(name, {}))
            with torch.device("meta"):
                count = AutoModelForCausalLM.from_config(config).num_parameters()
            if count > _PARAMETERS:
                raise ValueError(f"its smallest form has {count:,} parameters")
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
            _generated(copy.deepcopy(model), [3, 4, 5])
            return model
        except TimeoutError:
            raise
        except Exception as error:
            trouble = error
    raise trouble


def _tiny_config(kind: Any, sizes: dict[str, Any], own: dict[str, Any]) -> Any:
    """A configuration of that class with all sizes that it knows and all of its own, and with those inside it."""
    known = {field for base in kind.__mro__ for field in getattr(base, "__annotations__", {})} | set(kind.attribute_map)
    parts = {field: getattr(kind(), field) for field in kind.sub_configs if field not in own}
    both = {**sizes, **own}
    inner = {field: _tiny_config(type(part), both, {}) for field, part in parts.items() if part is not None}
    return kind(**{key: value for key, value in sizes.items() if key in known} | own | inner)


def _generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _without_a_cache(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(_TOKENS):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1:]
            ids = torch.cat([ids, logits.argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def _kernels_of(model: Any) -> str:
    kinds = {type(module).__name__ for module in model.modules()}
    names = {"FusedDecoder": "all layers", "FusedLayer": "a layer", "FusedAttention": "a layer up to its MLP"}
    return next((text for kind, text in names.items() if kind in kinds), "")


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError after so long. One may lie within another, which then starts again."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"no tiny form within {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    outer = signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(outer)


def page(findings: list[Finding]) -> str:
    """The survey as a page of the documentation."""
    served: dict[Backend | None, list[str]] = {}
    for finding in findings:
        served.setdefault(finding.backend, []).append(finding.name)
    packed, padded, alone, uncached = (served.get(backend, []) for backend in BACKENDS)
    refused = [finding for finding in findings if finding.refusal]
    fused = _grouped((finding.kernels, finding.name) for finding in findings if finding.kernels)
    reasons = _grouped((_reason(finding.refusal), finding.name) for finding in refused)
    unknown = _grouped((finding.trouble, finding.name) for finding in findings if finding.trouble)
    in_ours = [finding for finding in findings if finding.backend]
    in_theirs = sum(finding.in_batches for finding in in_ours)
    return f"""# Models

vasuki runs the causal language models of transformers. `engine.attention: auto` takes the ragged backend for models
that use transformers' attention interface (also with recurrent layers: Qwen 3.5, Jamba, LFM2), and the padded one for
the others. What neither can run correctly is refused by name before a row is read (exit code 4). Good to know:

- Padded rows are computed by the model's own attention, under its own mask, and read as many columns as the longest;
  prompts share rows where the model lets them. `vasuki plan` says what that costs.
- Where a row keeps what no block holds (a state, a compressed cache), rows are computed one by one, each with a cache
  of the model's own. With a model that keeps nothing, each token is computed with all tokens before it.
- Encoders are served as decoders, where their config says `is_decoder: true`. Encoder-decoders (Bart, Whisper) are
  served only as decoders that were saved alone.
- Latent attention (DeepSeek) stores expanded keys and values, both as wide as keys.
- Layers that share another layer's keys and values (Gemma 4) store copies. Where layers store different amounts, none
  is streamed.
- Contexts reach as far as rotary embeddings are scaled (yarn, linear, llama3). With LongRoPE (Phi) and dynamic scaling,
  rows end at the context of the first training.
- States of recurrent layers stay on the device, one for each of `engine.max_num_seqs` rows, and are not shared between
  rows.
- Weights of 8 bits in blocks (`quant_method: fp8`, as Qwen 3 and DeepSeek publish them), of 4 (`mxfp4`, as gpt-oss),
  and, with that package, of `compressed-tensors` (8 bits, or 4 in groups) are widened to 16 bits when they are loaded,
  on every device. With [`model.quantization: float8`](same-answers.md#products-of-8-bits) dense ones are rounded to 8
  bits again. With transformers 5.17 `compressed-tensors` widens its own, and rounds what they are multiplied with where
  the checkpoint says so. Other quantised weights need the package that the refusal names, and are not tested.

On CUDA, transformers takes faster kernels for recurrences from flash-linear-attention, mamba-ssm and causal-conv1d if
they are installed; a run names the missing ones.

`scripts/docs/model_survey.py --write` makes this page: it builds every causal model of transformers in a tiny form
with random weights and compares greedy tokens in float32 with `generate`: prompts whole and in chunks, preempted rows,
prompts that share rows, with and without vasuki's CPU kernels. Names are values of `model_type` in config.json, for
transformers {transformers.__version__}.

## Ragged: {len(packed)}

{", ".join(packed)}

On a CPU, vasuki's own kernels do the matrix products and the attention of all of these. For some they do more:

| in one call | models |
|---|---|
{fused}

## Padded: {len(padded)}

{", ".join(padded)}

## Padded, row by row: {len(alone)}

{", ".join(alone)}

## Row by row, from the first token each time: {len(uncached)}

{", ".join(uncached)}

From config.json alone, `vasuki plan` counts KV memory differently from a run, or expects another backend, for
{", ".join(finding.name for finding in findings if not finding.is_foreseen)}.

## Refused: {len(refused)}

| why | models |
|---|---|
{reasons}

## Not known: {len(served.get(None, [])) - len(refused)}

A run serves or refuses these when it loads one; the survey can't tell:

| why | models |
|---|---|
{unknown}

## Compared with transformers' own continuous batching

`generate_batch` gives the tokens of `generate` for {in_theirs} of the {len(in_ours)} that are served here, with eager
attention or torch's own.
"""


def _grouped(pairs: Iterable[tuple[str, str]]) -> str:
    """Rows of a table: what several models have in common, and their names."""
    groups: dict[str, list[str]] = {}
    for common, name in pairs:
        groups.setdefault(common, []).append(name)
    return "\n".join(f"| {common} | {', '.join(names)} |" for common, names in sorted(groups.items()))


def _reason(refusal: str) -> str:
    """A refusal without names of classes, and without what follows from it."""
    return re.sub(r"^the padded backend cannot serve \w+: ", "", refusal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types; all by default")
    parser.add_argument("--write", action="store_true", help=f"write {_PAGE.name}")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)  # two that wait for each other take several times as long on a busy machine
    transformers.logging.set_verbosity_error()
    findings = []
    for name in options.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        findings.append(survey(name))
        print(findings[-1], flush=True)
    if options.write:
        _PAGE.write_text(page(findings), encoding="utf-8")


if __name__ == "__main__":
    main()
