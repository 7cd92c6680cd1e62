"""Which of transformers' causal language models vasuki serves: each in a tiny form, against `generate`.

    model_survey.py [NAME ...] [--write docs/models.md]

A model is served when its greedy tokens are those of `generate`, in float32, with prompts whole and in chunks, by
torch's operators and by the kernels that a CPU would be given. Weights are random, layers few, windows short.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
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

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vasuki.base.errors import ModelError, one_line
from vasuki.hf.attention.ragged_attention import NAME
from vasuki.hf.cpu.cpu_kernels import load_cpu_kernels
from vasuki.hf.loading.load_model import prepare
from vasuki.models.config_json import shape_from_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "hf"))
tiny: Any = importlib.import_module("tiny_models")  # the random models of the golden tests, and how they are run

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_SECONDS = 60  # for one model; more means that no tiny form was found
_PARAMETERS = 30_000_000
_TOKENS = 10
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
_OWN: dict[str, dict[str, Any]] = {
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
    "qwen4_exp": _DELTA_NET,
    "zamba2": dict(mamba_d_state=16, mamba_headdim=8, n_mamba_heads=8, chunk_size=8),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one model type."""

    name: str
    served: bool = False
    kernels: str = ""  # that a CPU computes it by, beside attention and products
    is_foreseen: bool = True  # whether its config tells how much KV it stores
    refusal: str = ""
    trouble: str = ""  # why there is no tiny form of it, or how its tokens differ


def survey(name: str) -> Finding:
    """Build, generate, run."""
    try:
        with _time_limit():
            return _run(name)
    except ModelError as error:
        return Finding(name, refusal=str(error).removeprefix(f"{name}: "))
    except Exception as error:
        return Finding(name, trouble=f"{type(error).__name__}: {one_line(error)[:80]}")


def _run(name: str) -> Finding:
    """A model that is served.

    Raises ModelError if it is refused, ValueError if any way of running it gives other tokens than `generate`, or what
    building it raises.
    """
    model = _tiny_model(name)
    prompts = tiny.prompts(count=3, longest=40)
    expected = [_generated(model, prompt) for prompt in prompts]
    for kernels in (None, load_cpu_kernels()):
        ours = copy.deepcopy(model)
        ours.set_attn_implementation(NAME)
        if kernels:
            kernels.install(ours)
        ready = prepare(ours, tiny.NoTokenizer(), GenerationConfig(eos_token_id=0), name)
        ready = dataclasses.replace(ready, eos_token_ids=frozenset())
        for chunk_tokens in (64, 7):
            rows, *_ = tiny.run(ready, tiny.requests_of(prompts, _TOKENS), chunk_tokens)
            if rows.outputs != expected:
                by_itself = [_without_a_cache(model, prompt) for prompt in prompts]
                who = "`generate` changes its tokens by its cache" if rows.outputs == by_itself else "tokens differ"
                raise ValueError(f"{who}, {'with' if kernels else 'without'} kernels, chunks of {chunk_tokens}")
    stored, shape = ready.kv_layout.bytes_per_token, shape_from_config(ready.config.to_dict(), name)
    planned = shape.with_dtype("float32").kv_bytes_per_token
    is_foreseen = stored <= planned < stored + 8 * shape.num_layers  # rounded up for each layer
    return Finding(name, served=True, kernels=_kernels_of(ours), is_foreseen=is_foreseen)


def _tiny_model(name: str) -> Any:
    """The first tiny form that can be built and run. Raises what the last attempt met."""
    trouble: Exception = LookupError()
    for sizes in _ATTEMPTS:
        try:
            config = _tiny_config(type(AutoConfig.for_model(name)), {**sizes, **_OWN.get(name, {})})
            with torch.device("meta"):
                count = AutoModelForCausalLM.from_config(config).num_parameters()
            if count > _PARAMETERS:
                raise ValueError(f"its smallest form has {count:,} parameters")
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
            _generated(model, [3, 4, 5])
            return model
        except TimeoutError:
            raise
        except Exception as error:
            trouble = error
    raise trouble


def _tiny_config(kind: Any, sizes: dict[str, Any]) -> Any:
    """A configuration of that class, and of those inside it, with all sizes that it knows."""
    known = {field for base in kind.__mro__ for field in getattr(base, "__annotations__", {})} | set(kind.attribute_map)
    parts = {field: getattr(kind(), field) for field in kind.sub_configs}
    inner = {field: _tiny_config(type(part), sizes) for field, part in parts.items() if part is not None}
    return kind(**{key: value for key, value in sizes.items() if key in known}, **inner)


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
def _time_limit() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"no tiny form within {_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def page(findings: list[Finding]) -> str:
    """The survey as a page of the documentation."""
    served = [finding for finding in findings if finding.served]
    refused = [finding for finding in findings if finding.refusal]
    unknown = [finding for finding in findings if finding.trouble]
    fused = _grouped((finding.kernels, finding.name) for finding in served if finding.kernels)
    reasons = _grouped((_reason(finding.refusal), finding.name) for finding in refused)
    return f"""# Models

vasuki runs the causal language models of transformers that use its attention interface and a plain KV cache; some of
their layers may carry a state from token to token instead (Qwen 3.5, Jamba, LFM2). Models that it cannot run
correctly are refused by name before a row is read (exit code 4). Four things to know:

- Latent attention (DeepSeek) stores expanded keys and values, both as wide as keys.
- Layers that share another layer's keys and values (Gemma 4) store copies. Where layers store different amounts, none
  is streamed.
- With LongRoPE (Phi), rows end at the context of the first training.
- States stay on the device, one for each of `engine.max_num_seqs` rows, and are not shared between rows that begin
  alike.

On CUDA, transformers takes faster kernels for recurrences from flash-linear-attention, mamba-ssm and causal-conv1d if
they are installed; a run names the missing ones.

`scripts/docs/model_survey.py --write` makes this page: it builds every causal model of transformers in a tiny form
with random weights and compares greedy tokens in float32 with those of `generate`, prompts whole and in chunks, with
and without vasuki's CPU kernels. Names are those of `model_type` in config.json, findings those with transformers
{transformers.__version__}.

## Served: {len(served)}

{", ".join(finding.name for finding in served)}

Runs count the KV memory of the layers that they load. From config.json alone, `vasuki plan` counts differently for
these:
{", ".join(finding.name for finding in served if not finding.is_foreseen)}.

On a CPU, vasuki's own kernels do the matrix products and the attention of all of these. For some they do more:

| in one call | models |
|---|---|
{fused}

## Refused: {len(refused)}

| why | models |
|---|---|
{reasons}

## Not known: {len(unknown)}

The survey found no tiny form of these that `generate` runs, or whose tokens don't depend on its cache. A run serves or
refuses them when it loads one.

{", ".join(finding.name for finding in unknown)}
"""


def _grouped(pairs: Iterable[tuple[str, str]]) -> str:
    """Rows of a table: what several models have in common, and their names."""
    groups: dict[str, list[str]] = {}
    for common, name in pairs:
        groups.setdefault(common, []).append(name)
    return "\n".join(f"| {common} | {', '.join(names)} |" for common, names in sorted(groups.items()))


def _reason(refusal: str) -> str:
    """A refusal without names of classes, and without what follows from it."""
    reason = re.sub(r"^the ragged backend cannot serve \w+: ", "", refusal)
    return re.sub(r"^\w+ (does not use .*); the ragged .*", r"it \1", reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types; all by default")
    parser.add_argument("--write", action="store_true", help=f"write {_PAGE.name}")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    findings = []
    for name in options.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        findings.append(survey(name))
        print(findings[-1], flush=True)
    if options.write:
        _PAGE.write_text(page(findings), encoding="utf-8")


if __name__ == "__main__":
    main()
