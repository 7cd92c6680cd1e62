"""Which kernel attends on a GPU, torch's packed attention or the paged one of this package, and in what blocks it wants
KV: one rule for plans of cards elsewhere and for runs.

             attends in             its windowed layers read    blocks
    packed   prompts                once for each query head    pages of 256 tokens
    paged    decodes                once                        of any size

Packed attention multiplies faster. Paged attention splits the keys of few rows, and reads those of many at 98 % of what
a long copy reaches (H200: 4.2 of 4.3 TB/s). Blocks of any size are small: their ends are seldom empty. Where packed
attention walks no pages, contexts are copied together first, and paged attention serves all steps.
"""

from __future__ import annotations

from vasuki.machines.profile import AttentionChoice
from vasuki.models.shape import ModelShape

PAGE_TOKENS = 256
_AMPERE = (8, 0)  # the first generation that packed attention runs on
_MOST_HEAD_DIM = 256


def page_tokens(shape: ModelShape, generation: tuple[int, int], attention: AttentionChoice) -> int | None:
    """Tokens of a page that packed attention walks for such a model; None where it does not serve it, or is not to.

    Args:
        shape: in the types that it runs in.
        generation: compute capability of the card.
        attention: which kernel its profile chooses.
    """
    if attention == "paged":
        return None
    in_half = shape.dtype in ("bfloat16", "float16") and shape.kv_dtype in ("", shape.dtype)
    made_for = all(dim % 8 == 0 and dim <= _MOST_HEAD_DIM for dim in (shape.head_dim, shape.full_heads[1]))
    return PAGE_TOKENS if shape.backend == "ragged" and generation >= _AMPERE and in_half and made_for else None
