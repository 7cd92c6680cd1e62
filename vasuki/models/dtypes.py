"""The type that a model computes in."""

from __future__ import annotations


def computed_dtype(wanted: str, saved: str, on_cpu: bool, multiplies_bfloat16: bool) -> str:
    """`auto` keeps the type that the model was saved in, unless the device has no fast arithmetic for it.

    Args:
        wanted: `model.dtype` of the job.
        saved: the type of the weights on disk.
        on_cpu: whether it computes on a CPU, which takes float32 for all but bfloat16,
        multiplies_bfloat16: and for that too, unless it multiplies it no slower than float32.
    """
    if wanted != "auto":
        return wanted
    if on_cpu:
        return "bfloat16" if saved == "bfloat16" and multiplies_bfloat16 else "float32"
    return saved
