"""Which kernels attend in a model's steps, and whether the kernels of decodes can be recorded."""

from __future__ import annotations

from bisect import bisect_right

from vasuki.hf.attention.chunks import AttentionKernels, TileKernel
from vasuki.hf.attention.probe import observe
from vasuki.hf.cuda.step_graphs import SIZES
from vasuki.hf.kernels import varlen
from vasuki.hf.kv.kv_cache import KVLayout
from vasuki.hf.loading.load_model import LoadedModel
from vasuki.machines.attention import most_split_decodes
from vasuki.machines.profile import AttentionChoice


def attention_kernels(
    kernel: TileKernel | None, layout: KVLayout, choice: AttentionChoice, processors: int
) -> AttentionKernels:
    """The kernels by which layers attend.

    Args:
        kernel: ours, where there is one.
        layout: of the KV cache.
        choice: see `HardwareProfile.attention`.
        processors: of the device.
    """
    if kernel is None:
        return AttentionKernels()
    most = most_split_decodes(choice, processors, min(num_kv_heads for num_kv_heads, _ in layout.heads if num_kv_heads))
    # One of the sizes that are recorded, or steps that share a graph would lie on either side of it.
    return AttentionKernels(kernel, choice, SIZES[bisect_right(SIZES, most) - 1] if most else 0)


def can_record(loaded: LoadedModel, block_tokens: int) -> bool:
    """Whether a model's steps can be recorded: not where the size of some tensor depends on contexts,
    nor where copies wait between layers, nor where layers carry a state. Parked sequences are waited for beforehand."""
    if loaded.device.type != "cuda" or not loaded.compiles or loaded.recurrent or loaded.copies is not None:
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
