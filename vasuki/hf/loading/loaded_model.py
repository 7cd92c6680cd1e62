"""A model that is ready to run, and what the rest of the house asks of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from vasuki.base.version import VERSION
from vasuki.hf.attention.chunks import TileKernel
from vasuki.hf.cpu.elementwise import SameAnywhere
from vasuki.hf.encoders.side_by_side import SideBySide
from vasuki.hf.kernels import levels
from vasuki.hf.kv.kv_cache import KVLayout
from vasuki.hf.kv.kv_mover import CopyEngine
from vasuki.hf.loading.tokenizer import Tokenizer
from vasuki.hf.padded.held_memory import ALL_IN_BLOCKS, HeldBytes
from vasuki.hf.recurrent.recurrent_layer import RecurrentLayers
from vasuki.machines.here import cpu
from vasuki.models.config_json import context_of, shape_from_config
from vasuki.models.mapped_weights import MappedWeights
from vasuki.models.shape import BACKENDS, Backend, ModelShape


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
    quantization: str = "none"  # of its products, as the job has it
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
        what += [f"products in {self.quantization}"] if self.quantization != "none" else []
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
        shape = shape.with_dtype(str(self.dtype).removeprefix("torch."), kv_dtype, self.quantization)
        shape = replace(shape, kept_bytes=self.state_bytes)
        stored = self.token_bytes  # which a configuration does not always tell
        return shape if stored == shape.kv_bytes_per_token else replace(shape, stored_bytes=stored)
