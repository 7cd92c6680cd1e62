"""Whether the steps of a model can be recorded."""

from __future__ import annotations

from vasuki.hf.attention.probe import observe
from vasuki.hf.kernels import varlen
from vasuki.hf.loading.loaded_model import LoadedModel


def can_record(loaded: LoadedModel, block_tokens: int) -> bool:
    """Whether a model's steps can be recorded: not where the size of some tensor depends on contexts,
    nor where weights are waited for between layers. Parked sequences are waited for beforehand, and layers whose KV
    streams between stretches."""
    if loaded.device.type != "cuda" or not loaded.compiles or loaded.copies is not None:
        return False
    return loaded.kernel is not None or attends_by_varlen(loaded, block_tokens)


def attends_by_varlen(loaded: LoadedModel, block_tokens: int) -> bool:
    """Whether torch's packed kernel serves all layers of a model, from the blocks as they lie."""
    layout = loaded.kv_layout
    if any(varlen.why_unavailable(layout.dtype, loaded.device, head_dim) for head_dim in layout.head_dims):
        return False
    if not varlen.can_page(block_tokens) or layout.dtype is not loaded.dtype:
        return False
    return all(seen.variant.is_plain for seen in observe(loaded.model).values())
