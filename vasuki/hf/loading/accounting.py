"""Every tensor is accounted for: those that a model computes with are in its files, and those in its files are computed
with, or belong to a part that no model here has.

    lacking        the model needs it: it would be drawn at random            refused
    other shape    the same                                                   refused
    8 bits alone   its numbers mean nothing without a scale                   refused
    not read       inside a module that the model has, or one more layer      refused: the numbers mean something else
                   a part of its own: a head for scores, an encoder, MTP      let go, by name

transformers says which are which, after its own renamings.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from vasuki.base.errors import ModelError
from vasuki.hf.kernels.float8 import FLOAT8
from vasuki.models.files import IS_POINTER, POINTER, starts_with
from vasuki.models.weight_files import StoredTensor

log = logging.getLogger(__name__)

_NAMED = 3  # tensors that a line lists; of more it gives a pattern
# Inside modules, and without effect here: causal masks and rotary angles that older files keep, and scales for a cache
# of eight bits.
_WITHOUT_EFFECT = re.compile(r"\b(attn|attention)\.(masked_)?bias$|rotary_emb\.|\.(k|v|kv|q|prob)_scale$")
_SCALE = re.compile(r"(?<!input_)(?<!activation_)scale(s|_inv)?$")
_WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DistributedDataParallel", "_fsdp_wrapped_module.": "FSDP"}
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool}
_TYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class Outline(torch.Tensor):
    """A tensor without numbers, which has a type and a shape wherever it is brought."""

    @classmethod
    def of(cls, stored: StoredTensor) -> torch.Tensor:
        dtype = _TYPES.get(stored.dtype, torch.uint8)
        return torch.empty(stored.shape, dtype=dtype, device="meta").as_subclass(cls)

    def to(self, *args: Any, dtype: torch.dtype | None = None, **others: Any) -> torch.Tensor:
        return self if dtype is None else super().to(dtype=dtype)


def pickled_tensors(path: str, files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors in pickles that a job allows, by name, without their numbers. Raises ModelError for a file that
    torch cannot read, without running code that it may hold.

    Args:
        path: as errors call the model.
        files: of which those that end in `.bin` are looked at.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if file.suffix != ".bin":
            continue
        try:
            saved = torch.load(file, map_location="meta", weights_only=True)
            named = {name: tensor for name, tensor in saved.items() if isinstance(tensor, torch.Tensor)}
        except Exception:  # of zips, of pickles, of torch, some of them pages long
            raise ModelError(f"cannot read model {path}: {file.name} {_what_it_is(file)}") from None
        tensors |= {name: StoredTensor(_NAMES.get(t.dtype, "?"), tuple(t.shape)) for name, t in named.items()}
    return tensors


def _what_it_is(file: Path) -> str:
    if starts_with(file, POINTER):
        return IS_POINTER
    return "is no dictionary of tensors by torch.save, or was cut: copy or fetch it again"


def refuse_unaccounted(path: str, model: Any, info: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
    """Refuse a model that is not what its files hold; log what no model reads.

    Args:
        path: as errors call the model.
        model: as transformers built it.
        info: what `from_pretrained` says of loading it.
        stored: the tensors in its files, as far as they are known.

    Raises:
        ModelError: by name, with shapes.
    """
    wanted = model.state_dict()
    in_files = {name: tensor.shape for name, tensor in stored.items()}
    quantised = getattr(model, "hf_quantizer", None) is not None
    if not quantised and (method := quantization_of(model.config)):
        raise ModelError(f"model {path}: transformers does not know how to read weights that are quantised by {method}")
    if not quantised:  # of a model from the hub, whose files were not here before
        _refuse_unscaled(path, {name: tensor.shape for name, tensor in wanted.items() if tensor.dtype is FLOAT8})
    if info["mismatched_keys"]:
        raise ModelError(f"model {path}: {_of_other_shapes(info['mismatched_keys'])}")
    unread = {name for name in info["unexpected_keys"] if not _WITHOUT_EFFECT.search(name)}
    if info["missing_keys"]:
        lacking = _listed(info["missing_keys"], {name: tensor.shape for name, tensor in wanted.items()})
        raise ModelError(f"model {path}: its files lack {lacking}{_instead(unread)}")
    if inside := {name for name in unread if _is_inside(model, name)}:
        raise ModelError(
            f"model {path}: its files hold {_listed(inside, in_files)}, which {type(model).__name__} does not read as "
            "config.json describes it; without them its answers would be others"
        )
    whole_numbers = {name for name, tensor in stored.items() if tensor.dtype[0] in "IU"}
    unexplained = {name for name in whole_numbers & wanted.keys() if wanted[name].is_floating_point()}
    if unexplained and not quantised:
        raise ModelError(
            f"model {path}: its files hold {_listed(unexplained, in_files)} as integers, and config.json has no "
            "quantization_config that says what they stand for"
        )
    if unread:
        log.info("%s: nothing here reads %s, and it is left out", path, _listed(unread, in_files))


def refuse_unscaled(path: str, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse weights of 8 bits without a scale beside them, which transformers widens as if it were 1.

    Raises ModelError.
    """
    scaled = {_module(name) for name in stored if _SCALE.search(name)}
    of_8_bits = {name for name, tensor in stored.items() if tensor.dtype.startswith("F8") and not _SCALE.search(name)}
    _refuse_unscaled(path, {name: stored[name].shape for name in of_8_bits if _module(name) not in scaled})


def _refuse_unscaled(path: str, shapes: Mapping[str, Iterable[int]]) -> None:
    if shapes:
        names = _listed(shapes, shapes)
        raise ModelError(f"model {path}: its files hold {names} in 8 bits, and lack what they are to be multiplied by")


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def quantization_of(config: Any) -> str:
    """How config.json says that weights are quantised; empty if it does not."""
    said = getattr(config, "quantization_config", None) or {}
    return str(said.get("quant_method", "") if isinstance(said, Mapping) else getattr(said, "quant_method", ""))


def _is_inside(model: Any, name: str) -> bool:
    """Whether a tensor that a model does not read would change a module that it has, or is one more layer.

    A part of its own hangs on the model itself, or on a module that only holds others.
    """
    module, parts = model, name.split(".")[:-1]
    for part in parts:
        inner = module._modules.get(part)
        if isinstance(module, torch.nn.ModuleList):
            return inner is not None or not _predicts_further(model.config, module, part)
        if inner is None:
            break
        module = inner
    return not module._modules


def _predicts_further(config: Any, layers: torch.nn.ModuleList, index: str) -> bool:
    """Whether a layer behind the last is one that predicts tokens further ahead (MTP), as the configuration counts."""
    further = getattr(config.get_text_config(), "num_nextn_predict_layers", 0) or 0
    return index.isdigit() and len(layers) <= int(index) < len(layers) + further


def _listed(names: Iterable[str], shapes: Mapping[str, Iterable[int]]) -> str:
    """`a [64, 48], b [64]`, or how many there are and what their names have in common."""
    ordered = sorted(names)
    sized = [f"{name} {list(shapes[name])}" if name in shapes else name for name in ordered]
    if len(sized) <= _NAMED:
        return ", ".join(sized)
    dotted = [name.split(".") for name in ordered]
    first, last = _shared(dotted), _shared([parts[::-1] for parts in dotted])
    return f"{len(sized)} tensors {'.'.join([*first, '*', *last[::-1]])}, such as {sized[0]}"


def _shared(lists: list[list[str]]) -> list[str]:
    """The common beginning of names."""
    columns = [set(column) for column in zip(*lists, strict=False)]
    return [column.pop() for column in takewhile(lambda column: len(column) == 1, columns)]


def _of_other_shapes(found: Iterable[tuple[str, Iterable[int], Iterable[int]]]) -> str:
    """What files hold in shapes that config.json does not want."""
    ordered = sorted(found)
    sized = [
        f"{name} is {list(shape)} in its files, config.json wants {list(wanted)}" for name, shape, wanted in ordered
    ]
    more = [f"and so on for {len(sized) - _NAMED} more"] if len(sized) > _NAMED else []
    return "; ".join([*sized[:_NAMED], *more])


def _instead(unread: set[str]) -> str:
    """What files hold that lack something, and where it may come from."""
    if not unread:
        return ""
    name = min(unread)
    for prefix, maker in _WRAPPERS.items():
        if name.startswith(prefix):
            return f"; they hold {name}, as {maker} wraps a model: save it without that, or rename its tensors"
    return f"; they hold {name} instead, which nothing here reads"
