"""A folder or hub id -> LoadedModel, or a refusal that names what is missing.

The model runs as its authors wrote it. Only its attention is ours, through transformers' attention interface, so that
one forward serves packed chunks over paged blocks. Whatever a model asks of its attention is honoured or refused at
load time, by a probe that runs it once; nothing is ignored. What the probe refuses is loaded again, with its own
attention, for the padded backend, which has a probe too.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import transformers
from transformers import AutoConfig, GenerationConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, get_hf_quantizer

from vasuki.base.config import ModelConfig
from vasuki.base.errors import ModelError
from vasuki.hf.attention import ragged_attention
from vasuki.hf.cpu.cpu_kernels import CPUKernels, load_cpu_kernels
from vasuki.hf.device.device import give_back, take_some, the_cpu, why_no_cuda
from vasuki.hf.encoders.side_by_side import SideBySide
from vasuki.hf.fused.by_torch import fuse_modules
from vasuki.hf.kernels.experts import use_all_experts
from vasuki.hf.kernels.recurrent_functions import missing_packages
from vasuki.hf.kv.kv_cache import KVLayout
from vasuki.hf.loading.accounting import (
    Outline,
    pickled_tensors,
    quantization_of,
    refuse_unaccounted,
    refuse_unscaled,
)
from vasuki.hf.loading.body import Body, class_for, without_pooler
from vasuki.hf.loading.defaults import first_line, generation_of, refuse_broken_defaults
from vasuki.hf.loading.loaded_model import LoadedModel
from vasuki.hf.loading.prepare import Refused, described, prepare, prepare_padded, refuse_config, timed
from vasuki.hf.loading.quantized import on_its_device, quantize
from vasuki.hf.loading.tokenizer import Tokenizer
from vasuki.hf.loading.triton_kernels import small_kernels
from vasuki.hf.padded.held_memory import HeldBytes
from vasuki.machines.experts import waits_for_experts
from vasuki.models.config_json import encodes
from vasuki.models.dtypes import computed_dtype
from vasuki.models.files import description_folder
from vasuki.models.shape import TOKEN_ID_BYTES
from vasuki.models.weight_files import StoredTensor, stored_tensors, weight_files

transformers.logging.disable_progress_bar()

log = logging.getLogger(__name__)

T = TypeVar("T")
AskedBackend = Literal["auto", "ragged", "padded"]

_ACCOUNTED: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}


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
            raise ModelError(f"cannot read model {path}: {first_line(error)}") from None
        if _is_widened(config):
            refuse_unscaled(path, stored)
            config.quantization_config["dequantize"] = True
        refuse_broken_defaults(description_folder(model) / "generation_config.json")
        return cls(model, path, options, device, config, stays_on_host, compiles, kv_dtype, stored, task)

    def ragged(self) -> LoadedModel:
        """The model for the ragged backend. Raises Refused if that does not serve it."""
        path, device = self.path, self.device
        refuse_config(path, self.config.get_text_config())
        if self.model.quantization != "none" and not (self.compiles and device.type == "cuda"):
            raise ModelError(f"{path}: model.quantization: {self.model.quantization} is for joined layers on a GPU")
        uses_kernels = self.compiles and device.type == "cpu"
        kernels, compile_s = timed(load_cpu_kernels) if uses_kernels else (None, 0.0)
        tokenizer = Tokenizer(path, **self.options)
        dtype = self._dtype(kernels)
        loaded = self._weights(dtype, attn_implementation=ragged_attention.NAME)
        if kernels:
            kernels.install(loaded)
        install_experts(loaded, device)
        loaded = self._on_device(loaded)
        if self.compiles and device.type == "cuda":
            # Modules are compared with their twins where their weights lie, and Triton computes on the device alone.
            small = small_kernels(device) if loaded.device.type == "cuda" else None
            fused = fuse_modules(loaded, small)
            if self.model.quantization == "float8":
                quantize(loaded, path, small, device)
                if loaded.device.type == "cpu" and (loaded := self._on_device(loaded)).device.type == "cuda":
                    on_its_device(loaded, path, small_kernels(device))
            elif lacks := fused.lacks(self.config.get_text_config().num_hidden_layers):
                log.info("%s: %s launch every operator by itself: small steps take longer", path, lacks)
            give_back()  # the memory of what was joined, in which little else fits
        ready = prepare(
            loaded,
            tokenizer,
            generation_of(loaded),
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
        return replace(
            ready,
            device=device,
            quantization=self.model.quantization,
            compiles=self.compiles,
            compile_s=compile_s,
            same_anywhere=same,
        )

    def padded(self) -> LoadedModel:
        """The model for the padded backend, with its own attention. Raises Refused if that does not serve it."""
        if self.model.quantization != "none":
            raise Refused(f"{self.path}: model.quantization: {self.model.quantization} is for packed attention")
        tokenizer = Tokenizer(self.path, **self.options)
        loaded = self._on_device(self._weights(self._dtype(None)))
        ready = prepare_padded(loaded, tokenizer, generation_of(loaded), self.path, self.kv_dtype)
        return replace(ready, device=self.device)

    @property
    def encodes(self) -> bool:
        """Whether an encoder is to give vectors or labels."""
        return self.task in ("embed", "classify") and encodes(self.config.to_dict())

    def encoder(self) -> LoadedModel:
        """A model that computes texts as wholes."""
        uses_kernels = self.compiles and self.device.type == "cpu"
        kernels, compile_s = timed(load_cpu_kernels) if uses_kernels else (None, 0.0)
        tokenizer, model = Tokenizer(self.path, **self.options), self._on_device(self._weights(self._dtype(kernels)))
        if kernels:
            kernels.install_products(model)
        layout = KVLayout.uniform(int(model.config.num_hidden_layers), 0, 0, model.dtype)
        ready = described(model, tokenizer, GenerationConfig(), self.path, layout, "auto")
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
            refuse_config(self.path, self.config.get_text_config())
        config = copy.deepcopy(self.config)
        self._made_by(get_hf_quantizer, config, None, None, True, {})  # refuses packages and devices that are not there
        if not self.stored:
            return
        if _is_widened(self.config):
            log.info("%s: its tensors are accounted for when they are widened", self.path)
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
            log.warning("%s: its tensors are accounted for when it is loaded: %s", self.path, first_line(error))
            return
        refuse_unaccounted(self.path, loaded[0], loaded[1], self.stored)

    def _weights(self, dtype: torch.dtype, **options: Any) -> Any:
        """The model in host memory, see `_made_by`."""
        options |= {"dtype": dtype, "use_safetensors": None if self.model.allow_pickle else True}
        options |= without_pooler(self.config) if self.encodes and self.task == "embed" else {}
        options |= {"config": copy.deepcopy(self.config)} if _is_widened(self.config) else {}
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
                raise Refused(f"{self.path}: the ragged backend cannot serve it: {first_line(error)}") from None
            raise ModelError(f"cannot load model {self.path}: {first_line(error)}") from None

    def _on_device(self, loaded: Any) -> Any:
        weight_bytes = sum(p.numel() * p.element_size() for p in loaded.parameters())
        waits = self.stays_on_host is not None and self.stays_on_host(weight_bytes, self.device)
        return loaded if waits else loaded.to(self.device)


def _is_widened(config: Any) -> bool:
    """Whether weights of few bits are widened as they are loaded, as transformers can with some. Their own layers, with
    kernels from the hub, are others than those which are joined, recorded and compiled here."""
    how = AUTO_QUANTIZATION_CONFIG_MAPPING.get(quantization_of(config))
    return how is not None and "dequantize" in inspect.signature(how.__init__).parameters


def install_experts(model: Any, device: torch.device) -> None:
    """Let few rows pass all of a mixture's experts, where a card would wait for how many each of them has."""
    if device.type == "cuda" and waits_for_experts(torch.cuda.get_device_capability(device)):
        use_all_experts(model)
