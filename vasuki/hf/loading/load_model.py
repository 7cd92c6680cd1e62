"""A folder or hub id -> LoadedModel, or a refusal that names what is missing.

The model runs as its authors wrote it. Only its attention is ours, through transformers' attention interface, so that
one forward serves packed chunks over paged blocks. Whatever a model asks of its attention is honoured or refused at
load time, by a probe that runs it once; nothing is ignored. What the probe refuses is loaded again, with its own
attention, for the padded backend, which has a probe too.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import reprlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import transformers
from transformers import AutoConfig, GenerationConfig
from transformers.quantizers.auto import get_hf_quantizer

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.base.version import VERSION
from vasuki.hf.attention import ragged_attention
from vasuki.hf.attention.chunks import TileKernel
from vasuki.hf.attention.probe import NOT_ON_INTERFACE, probe
from vasuki.hf.cpu.cpu_kernels import CPUKernels, load_cpu_kernels
from vasuki.hf.cpu.elementwise import SameAnywhere
from vasuki.hf.device.device import give_back, take_some, the_cpu, why_no_cuda
from vasuki.hf.encoders.side_by_side import SideBySide
from vasuki.hf.fused.by_torch import fuse_modules
from vasuki.hf.kernels import levels, paged_attention
from vasuki.hf.kernels.experts import install_experts
from vasuki.hf.kernels.recurrent_functions import missing_packages
from vasuki.hf.kv.kv_cache import KVLayout
from vasuki.hf.kv.kv_mover import CopyEngine
from vasuki.hf.loading.accounting import Outline, pickled_tensors, refuse_unaccounted
from vasuki.hf.loading.body import Body, class_for, without_pooler
from vasuki.hf.loading.tokenizer import Tokenizer
from vasuki.hf.loading.triton_kernels import small_kernels, tile_attention
from vasuki.hf.padded.held_memory import ALL_IN_BLOCKS, HeldBytes
from vasuki.hf.padded.probe import probe as probe_padded
from vasuki.hf.recurrent.discovery import wrap_layers
from vasuki.hf.recurrent.recurrent_layer import RecurrentLayers
from vasuki.machines.here import cpu
from vasuki.models.config_json import context_of, encodes, shape_from_config
from vasuki.models.dtypes import computed_dtype
from vasuki.models.files import description_folder
from vasuki.models.mapped_weights import MappedWeights
from vasuki.models.recurrent_config import MLP_ALONE, RECURRENT
from vasuki.models.shape import BACKENDS, TOKEN_ID_BYTES, Backend, ModelShape
from vasuki.models.weight_files import StoredTensor, stored_tensors, weight_files

transformers.logging.disable_progress_bar()

log = logging.getLogger(__name__)

T = TypeVar("T")
AskedBackend = Literal["auto", "ragged", "padded"]

_ACCOUNTED: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}

_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
# What generation_config.json may ask for that changes greedy output, each with its value that changes nothing.
_NOT_APPLIED: dict[str, Any] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1,
    "num_beams": 1,
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
}


class Refused(ModelError):
    """A model that a backend cannot serve."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    model: Any  # a transformers causal LM
    tokenizer: Tokenizer
    config: Any  # the text model's configuration
    eos_token_ids: frozenset[int]
    kv_layout: KVLayout
    dtype: torch.dtype  # that it multiplies in
    device: torch.device  # where it computes
    recurrent: RecurrentLayers | None = None  # those that carry a state, where it has such
    copies: CopyEngine | None = None  # brings the layers that live on the host, see hf.weights
    kernel: TileKernel | None = None  # attention of ours, where it could be compiled
    same_anywhere: SameAnywhere | None = None  # functions of ours in place of torch's, where the layers are ours
    compiles: bool = True  # whether what can be compiled or recorded for it is
    compile_s: float = 0.0  # that the kernels took to compile, or to be found on disk
    backend: Backend = "ragged"
    longest_packed_tokens: int = 0  # of a prompt that may share a padded row with others; 0: none may
    held: HeldBytes = ALL_IN_BLOCKS  # by each row that is computed alone
    encodes: str = ""  # the task of an encoder
    side_by_side: SideBySide | None = None  # how an encoder's texts share a row, if they can
    mapped: MappedWeights | None = None  # files that steps read weights from; set by the loading code
    varies: str = ""  # why a row's last bits may depend on the rows beside it; set by the loading code

    @property
    def is_on_device(self) -> bool:
        """Return whether the weights are on the device that computes; before `place_weights` they need not be."""
        return bool(self.model.device.type == self.device.type)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and output together."""
        return context_of(self.config.to_dict()) or 2**31 - 1

    @property
    def device_name(self) -> str:
        """The device's name, as the driver or the kernel reports it."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return cpu.processor().model

    @property
    def computed_on(self) -> str:
        """What answers may depend on beside the job: the device, its instructions, and the libraries."""
        what = [self.device_name]
        if self.device.type == "cpu":
            what[0] += f" ({levels.chosen().name})"
        what += [str(self.dtype).removeprefix("torch."), BACKENDS[self.backend]]
        what += [f"torch {torch.__version__}", f"transformers {transformers.__version__}", f"vasuki {VERSION}"]
        return ", ".join(what)

    @property
    def threads(self) -> int | None:
        """Threads that compute on a CPU."""
        return torch.get_num_threads() if self.device.type == "cpu" else None

    @property
    def in_blocks(self) -> bool:
        """Return whether keys and values are in blocks; else each row has a cache of the model's own."""
        return self.backend in ("ragged", "padded")

    @property
    def is_eager(self) -> bool:
        """Return whether it attends by transformers' operators, one after the other."""
        return bool(self.model.config._attn_implementation == "eager")

    @property
    def token_bytes(self) -> int:
        """Bytes that a token leaves in memory."""
        return self.held.token or self.kv_layout.bytes_per_token

    @property
    def state_bytes(self) -> int:
        """Bytes that a row keeps in addition to its tokens'."""
        return self.recurrent.bytes_per_row if self.recurrent else self.held.row

    @property
    def weight_bytes(self) -> int:
        tensors = [*self.model.parameters(), *self.model.buffers()]  # packed weights are buffers
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def shape_in_use(self, name: str, kv_dtype: str) -> ModelShape:
        """The model's shape, in the types that it really runs in.

        Args:
            name: of the model.
            kv_dtype: of keys and values, as the job has it.
        """
        shape = shape_from_config(self.config.to_dict(), name, self.backend)
        packed, compiles = self.longest_packed_tokens, self.compiles
        shape = replace(shape, longest_packed_tokens=packed, compiles=compiles, eager=self.is_eager)
        shape = shape.with_dtype(str(self.dtype).removeprefix("torch."), kv_dtype)
        shape = replace(shape, kept_bytes=self.state_bytes)
        stored = self.token_bytes  # which a configuration does not always tell
        return shape if stored == shape.kv_bytes_per_token else replace(shape, stored_bytes=stored)


def resolve_device(wanted: str) -> torch.device:
    """`auto` is CUDA where there is one.

    Raises:
        ModelError: CUDA is wanted and absent, or there is a GPU that this torch cannot use: running on the CPU instead
            would take a hundred times as long, in silence.
    """
    if wanted == "cpu":
        return the_cpu()
    if torch.cuda.is_available():
        device = torch.device("cuda")
        take_some(device)
        return device
    if reason := why_no_cuda():
        raise ModelError(reason)
    if wanted == "cuda":
        raise ModelError("engine.device is cuda, but there is no CUDA device here")
    return the_cpu()


def resolve_dtype(wanted: str, saved: Any, device: torch.device, kernels: CPUKernels | None) -> torch.dtype:
    """The type that a model computes in on a device, see `computed_dtype`.

    A CPU without bfloat16 instructions multiplies bfloat16 matrices no faster than float32 ones by our kernels, and
    several times slower by torch.
    """
    name = str(saved if isinstance(saved, torch.dtype) else torch.float32).removeprefix("torch.")
    fast = kernels.linear.multiplies_bfloat16 if kernels else torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return getattr(torch, computed_dtype(wanted, name, device.type == "cpu", fast))  # type: ignore[no-any-return]


def load_model(
    model: ModelConfig,
    device_name: str = "auto",
    stays_on_host: Callable[[int, torch.device], bool] | None = None,
    compiles: bool = True,
    kv_dtype: str = "auto",
    backend: AskedBackend = "auto",
    task: str = "generate",
) -> LoadedModel:
    """Load weights, tokenizer and generation defaults.

    Args:
        model: which.
        device_name: where it computes.
        stays_on_host: whether a number of bytes of weights waits in host memory for `hf.loading.weights.place_weights`.
        compiles: on a CPU, compute by the kernels of this package where they can be compiled; on CUDA, compute by
            fewer operators, and let steps be recorded, where they can be.
        kv_dtype: of keys and values; `auto` is the model's.
        backend: `auto` is the ragged one, or else the padded one.
        task: of the job, which says what is read of the model.

    Raises:
        ModelError: the model or its tokenizer cannot be read, or it needs what the backend does not have.
    """
    loading = _Loading.of(model, device_name, stays_on_host, compiles, kv_dtype, task)
    if loading.encodes:
        return loading.encoder()
    return _by_a_backend(loading.ragged, loading.padded, backend, loading.path)


def check_model(
    model: ModelConfig, device_name: str = "auto", backend: AskedBackend = "auto", task: str = "generate"
) -> None:
    """Refuse what `load_model` would, without reading a weight: by the files' headers, and a model without numbers.

    Raises:
        ModelError: the same, unless only running the model shows it.
    """
    loading = _Loading.of(model, device_name, task=task)
    Tokenizer(loading.path, **loading.options)
    if loading.encodes:
        loading.outline()
        return
    _by_a_backend(
        partial(loading.outline, attn_implementation=ragged_attention.NAME), loading.outline, backend, loading.path
    )


def _by_a_backend(ragged: Callable[[], T], padded: Callable[[], T], backend: AskedBackend, path: str) -> T:
    """What the first backend gives, or the second where the job leaves it open and the first refuses."""
    if backend == "padded":
        return padded()
    try:
        return ragged()
    except Refused as refusal:
        if backend == "ragged":
            raise
        try:
            return padded()
        except Refused as error:
            raise ModelError(f"{refusal}; {str(error).removeprefix(f'{path}: ')}") from None


@dataclass(frozen=True, slots=True)
class _Loading:
    """What there is to load: the arguments of `load_model`, with what they stand for."""

    model: ModelConfig
    path: str
    options: dict[str, Any]
    device: torch.device
    config: Any
    stays_on_host: Callable[[int, torch.device], bool] | None
    compiles: bool
    kv_dtype: str
    stored: Mapping[str, StoredTensor]  # what its files hold; empty for weights that are on the hub
    task: str

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        device_name: str,
        stays_on_host: Callable[[int, torch.device], bool] | None = None,
        compiles: bool = True,
        kv_dtype: str = "auto",
        task: str = "generate",
    ) -> _Loading:
        """Raises ModelError for what can be refused before anything is loaded."""
        path = model.path
        if not path:
            raise ModelError("model.shape describes a model without weights; `run` needs model.path")
        # What is missing, or not allowed, is said in a line before transformers tries for a while.
        files = weight_files(model)
        stored = stored_tensors(model, [file for file in files if file.suffix == ".safetensors"])
        path = os.path.expanduser(path)
        stored = stored or pickled_tensors(path, files)
        options: dict[str, Any] = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        device = resolve_device(device_name)
        try:
            config = AutoConfig.from_pretrained(path, **options)
        except Exception as error:
            raise ModelError(f"cannot read model {path}: {_first_line(error)}") from None
        _refuse_broken_defaults(description_folder(model) / "generation_config.json")
        return cls(model, path, options, device, config, stays_on_host, compiles, kv_dtype, stored, task)

    def ragged(self) -> LoadedModel:
        """The model for the ragged backend. Raises Refused if that does not serve it."""
        path, device = self.path, self.device
        _refuse_config(path, self.config.get_text_config())
        uses_kernels = self.compiles and device.type == "cpu"
        kernels, compile_s = _timed(load_cpu_kernels) if uses_kernels else (None, 0.0)
        tokenizer = Tokenizer(path, **self.options)
        dtype = self._dtype(kernels)
        loaded = self._weights(dtype, attn_implementation=ragged_attention.NAME)
        if kernels:
            kernels.install(loaded)
        install_experts(loaded, device)
        loaded = self._on_device(loaded)
        if self.compiles and device.type == "cuda":
            # Modules are compared with their twins where their weights lie, and Triton computes on the device alone.
            fused = fuse_modules(loaded, small_kernels(device) if loaded.device.type == "cuda" else None)
            if lacks := fused.lacks(self.config.get_text_config().num_hidden_layers):
                log.info("%s: %s launch every operator by itself: small steps take longer", path, lacks)
            give_back()  # the memory of what was joined, in which little else fits
        ready = prepare(
            loaded,
            tokenizer,
            _generation(loaded),
            path,
            self.kv_dtype,
            dtype=dtype,
            uses_kernels=self.compiles,
            device=device,
        )
        if ready.recurrent and device.type == "cuda" and (packages := missing_packages(loaded)):
            log.warning(
                "%s: its recurrent layers run by torch's operators, several times as slowly as by the kernels that "
                "transformers takes from %s; pip install them",
                path,
                " and ".join(packages),
            )
        same = kernels.same_anywhere if kernels else None
        compile_s += ready.compile_s
        return replace(ready, device=device, compiles=self.compiles, compile_s=compile_s, same_anywhere=same)

    def padded(self) -> LoadedModel:
        """The model for the padded backend, with its own attention. Raises Refused if that does not serve it."""
        tokenizer = Tokenizer(self.path, **self.options)
        loaded = self._on_device(self._weights(self._dtype(None)))
        ready = prepare_padded(loaded, tokenizer, _generation(loaded), self.path, self.kv_dtype)
        return replace(ready, device=self.device)

    @property
    def encodes(self) -> bool:
        """Whether an encoder is to give vectors or labels."""
        return self.task in ("embed", "classify") and encodes(self.config.to_dict())

    def encoder(self) -> LoadedModel:
        """A model that computes texts as wholes."""
        uses_kernels = self.compiles and self.device.type == "cpu"
        kernels, compile_s = _timed(load_cpu_kernels) if uses_kernels else (None, 0.0)
        tokenizer, model = Tokenizer(self.path, **self.options), self._on_device(self._weights(self._dtype(kernels)))
        if kernels:
            kernels.install_products(model)
        layout = KVLayout.uniform(int(model.config.num_hidden_layers), 0, 0, model.dtype)
        ready = _described(model, tokenizer, GenerationConfig(), self.path, layout, "auto")
        ready = replace(ready, device=self.device, backend="uncached", held=HeldBytes(TOKEN_ID_BYTES, 0))
        # A GPU would launch a kernel for each text.
        side_by_side = SideBySide.of(model) if self.task == "embed" and self.device.type == "cpu" else None
        return replace(ready, compile_s=compile_s, compiles=False, encodes=self.task, side_by_side=side_by_side)

    def _dtype(self, kernels: CPUKernels | None) -> torch.dtype:
        return resolve_dtype(
            self.model.dtype, getattr(self.config.get_text_config(), "dtype", None), self.device, kernels
        )

    def outline(self, **options: Any) -> None:
        """Account for the tensors by the headers of their files. Raises as loading them does."""
        if "attn_implementation" in options:
            _refuse_config(self.path, self.config.get_text_config())
        config = copy.deepcopy(self.config)
        self._made_by(get_hf_quantizer, config, None, None, True, {})  # refuses packages and devices that are not there
        if not self.stored:
            return
        options |= without_pooler(config) if self.encodes and self.task == "embed" else {}
        with torch.device("meta"):
            from_config = partial(self._class.from_config, trust_remote_code=self.model.trust_remote_code)
            empty = self._made_by(from_config, config, **options)
        outlines = {name: Outline.of(tensor) for name, tensor in self.stored.items()}
        try:
            loaded = type(empty).from_pretrained(
                None, config=empty.config, state_dict=outlines, **_ACCOUNTED, **options
            )
        except Exception as error:  # of renamings that want numbers
            log.warning("%s: its tensors are accounted for when it is loaded: %s", self.path, _first_line(error))
            return
        refuse_unaccounted(self.path, loaded[0], loaded[1], self.stored)

    def _weights(self, dtype: torch.dtype, **options: Any) -> Any:
        """The model in host memory, see `_made_by`."""
        options |= {"dtype": dtype, "use_safetensors": None if self.model.allow_pickle else True}
        options |= without_pooler(self.config) if self.encodes and self.task == "embed" else {}
        loaded = self._made_by(self._class.from_pretrained, self.path, **_ACCOUNTED, **options, **self.options)
        refuse_unaccounted(self.path, loaded[0], loaded[1], self.stored)
        model = loaded[0].eval()
        is_read = self.task in ("embed", "classify") and not self.encodes
        return Body.of(model, self.task, self.path) if is_read else model

    @property
    def _class(self) -> Any:
        return class_for(self.task, self.config.architectures)

    def _made_by(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What transformers makes. Raises ModelError, of which Refused for an attention that a class lacks."""
        try:
            return make(*arguments, **options)
        except Exception as error:
            if "attn_implementation" in options and isinstance(error, (ValueError, KeyError, NotImplementedError)):
                raise Refused(f"{self.path}: the ragged backend cannot serve it: {_first_line(error)}") from None
            raise ModelError(f"cannot load model {self.path}: {_first_line(error)}") from None

    def _on_device(self, loaded: Any) -> Any:
        weight_bytes = sum(p.numel() * p.element_size() for p in loaded.parameters())
        waits = self.stays_on_host is not None and self.stays_on_host(weight_bytes, self.device)
        return loaded if waits else loaded.to(self.device)


def _generation(model: Any) -> Any:
    return getattr(model, "generation_config", None) or GenerationConfig()


def prepare(
    model: Any,
    tokenizer: Tokenizer,
    generation: Any,
    name: str,
    kv_dtype: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    uses_kernels: bool = True,
    device: torch.device | None = None,
) -> LoadedModel:
    """Check a model in memory and describe it. The model must have been built with our attention.

    Args:
        model: a transformers causal LM.
        tokenizer: its own.
        generation: its defaults.
        name: as errors call it.
        kv_dtype: of keys and values; `auto` is the model's.
        dtype: that it multiplies in, if kernels have taken over and what lies between is in another.
        uses_kernels: whether attention may be ours.
        device: that computes, if the weights wait elsewhere.
    """
    config = model.config.get_text_config()
    _refuse_config(name, config)
    refused = f"{name}: the ragged backend cannot serve {type(model).__name__}"
    try:
        stateful = _wrap_recurrent(model, config)
        layout = probe(model, config.num_hidden_layers, _silent_layers(config, stateful))
    except ragged_attention.Unsupported as error:
        raise Refused(f"{refused}: {error}") from None
    except TypeError as error:  # what a step calls a model with, one that is not on the interface need not take
        if getattr(model, "_supports_attention_backend", False):
            raise
        raise Refused(f"{refused}: {NOT_ON_INTERFACE} ({_first_line(error)})") from error
    ready = replace(_described(model, tokenizer, generation, name, layout, kv_dtype, dtype), recurrent=stateful)
    device = device or model.device
    if uses_kernels and device.type == "cuda":
        fewest = min(num_kv_heads for num_kv_heads, _ in layout.heads if num_kv_heads)
        sharing = -(-config.num_attention_heads // fewest)
        return replace(ready, kernel=tile_attention(ready.kv_layout, sharing, model.dtype, device))
    if not uses_kernels or device.type != "cpu":
        return ready
    types = (model.dtype, ready.kv_layout.dtype, ready.dtype is torch.bfloat16)
    kernel, compile_s = _timed(partial(paged_attention.load_kernel, layout.head_dims, *types))
    return replace(ready, kernel=kernel, compile_s=compile_s)


def prepare_padded(model: Any, tokenizer: Tokenizer, generation: Any, name: str, kv_dtype: str = "auto") -> LoadedModel:
    """Check and describe a model that has its own attention, for the padded backend. Raises Refused by name."""
    try:
        found = probe_padded(model)
    except ragged_attention.Unsupported as error:
        raise Refused(f"{name}: the padded backend cannot serve {type(model).__name__}: {error}") from None
    return replace(
        _described(model, tokenizer, generation, name, found.layout, kv_dtype),
        backend=found.backend,
        longest_packed_tokens=found.longest_packed_tokens,
        held=found.held,
        compiles=False,
    )


def _described(
    model: Any,
    tokenizer: Tokenizer,
    generation: Any,
    name: str,
    layout: KVLayout,
    kv_dtype: str,
    dtype: torch.dtype | None = None,
) -> LoadedModel:
    """Describe what is the same for both backends. Arguments as for `prepare`."""
    config, dtype = model.config.get_text_config(), dtype or model.dtype
    layout = replace(layout, dtype=dtype if kv_dtype == "auto" else getattr(torch, kv_dtype))
    _warn_of_context(name, config)
    _warn_of_penalties(generation)
    eos = generation.eos_token_id
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        eos = tokenizer.eos_token_id
    eos_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
    _warn_of_end_token(name, tokenizer, eos_ids)
    return LoadedModel(model, tokenizer, config, eos_ids, layout, dtype, model.device)


def _timed(load: Callable[[], T]) -> tuple[T, float]:
    """Call the loader; return what it loads, and the seconds that took."""
    started_s = time.perf_counter()
    return load(), time.perf_counter() - started_s


def _refuse_config(name: str, config: Any) -> None:
    """Refuse what a configuration announces and the backend lacks."""
    layer_types = set(_layer_types(config))
    if odd := sorted(layer_types - _ATTENTION_LAYER_TYPES - RECURRENT - MLP_ALONE):
        raise Refused(f"{name}: the ragged backend cannot serve {config.model_type}: it has {', '.join(odd)} layers")


def _wrap_recurrent(model: Any, config: Any) -> RecurrentLayers | None:
    """Layers that carry a state from token to token, if there are any. Raises Unsupported by name."""
    if not RECURRENT & set(_layer_types(config)):
        return None
    return wrap_layers(model)


def _silent_layers(config: Any, stateful: RecurrentLayers | None) -> set[int]:
    """Layers that need not attend."""
    kinds = _layer_types(config)
    silent = {index for index, kind in enumerate(kinds) if kind in MLP_ALONE}
    return silent | (stateful.indices if stateful else set())


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ())


def _warn_of_context(name: str, config: Any) -> None:
    """Say so if rows are kept shorter than the model's positions reach."""
    reach, context = getattr(config, "max_position_embeddings", 0), context_of(config.to_dict())
    rope = getattr(config, "rope_parameters", None) or {}
    if reach and rope.get("rope_type") == "dynamic":
        reach *= rope.get("factor") or 1
    if context and reach and context < reach:
        log.warning(
            "%s has other rotary embeddings for rows of over %d tokens, which would change shorter rows of its step: "
            "rows end there, and longer prompts fail",
            name,
            context,
        )


def _refuse_broken_defaults(file: Path) -> None:
    """Refuse a generation_config.json that transformers would pass over, and with it the tokens that end answers."""
    if not file.exists():
        return
    try:
        json.loads(file.read_text(encoding="utf-8"))
        end = GenerationConfig.from_pretrained(str(file.parent)).eos_token_id
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or _first_line(error)}") from None
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {_first_line(error)}") from None
    except Exception as error:
        raise ModelError(f"{file} does not say how to generate: {_first_line(error)}") from None
    if not all(type(token_id) is int for token_id in (end if isinstance(end, list) else [end or 0])):
        raise ModelError(f"{file}: eos_token_id should be a token id or a list of them, not {end!r}")


def _warn_of_end_token(name: str, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
    """Say so if answers go on behind the token that the tokenizer has for their end."""
    own = tokenizer.eos_token_id
    if own is not None and eos_ids and own not in eos_ids:
        log.warning(
            "%s: answers end with %s, as its configuration says, and not with %s, the end token of its tokenizer; "
            "name that in sampling.stop if they should",
            name,
            " or ".join(tokenizer.text_of([token_id]) or str(token_id) for token_id in sorted(eos_ids)),
            tokenizer.text_of([own]),
        )


def _warn_of_penalties(generation: Any) -> None:
    """Say what the model asks for that rows do not get."""
    values = {name: getattr(generation, name, None) for name in _NOT_APPLIED}
    asked = [
        f"{name} {reprlib.repr(value)}"
        for name, value in values.items()
        if value not in (None, _NOT_APPLIED[name], [], {})
    ]
    if asked:
        are = "is" if len(asked) == 1 else "are"
        log.warning("generation_config.json asks for %s, which %s not applied", " and ".join(asked), are)


def _first_line(error: Exception) -> str:
    """What an error of transformers' says first, or what would help."""
    text = f"there is no {error}" if isinstance(error, KeyError) else str(error).strip()
    if "trust_remote_code=True" in text:
        return "it comes with code, which runs only if the job says model.trust_remote_code and you --trust-remote-code"
    text = re.sub(r":\n\s*", ": ", text)  # where it says of what it speaks, and then what is wrong
    return (text.splitlines() or [type(error).__name__])[0][:300]
