"""In what blocks a GPU keeps KV: one rule for plans of cards elsewhere and for runs.

Torch's packed attention walks block tables itself where blocks are pages of a multiple of 256 tokens. Elsewhere
contexts are copied together first, or walked by a kernel of ours, and blocks may be of any size: small ones, whose ends
are seldom empty.
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
        attention: which kernel its profile chooses, see `machines.attention`.
    """
    if attention == "paged":
        return None
    in_half = shape.dtype in ("bfloat16", "float16") and shape.kv_dtype in ("", shape.dtype)
    made_for = all(dim % 8 == 0 and dim <= _MOST_HEAD_DIM for dim in (shape.head_dim, shape.full_heads[1]))
    return PAGE_TOKENS if shape.way == "ragged" and generation >= _AMPERE and in_half and made_for else None
