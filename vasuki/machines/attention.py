"""Which kernel attends on a GPU, torch's packed attention or the paged one of this package, and in what blocks it wants
KV: one rule for plans of cards elsewhere and for runs.

             programs of a step of r decodes    its windowed layers read    blocks
    packed   r x KV heads                       once for each query head    pages of 256 tokens
    paged    as many as fill the card           once                        of any size

Packed attention is the more refined kernel, but it gives all keys of a row and KV head to one program: few rows leave
most of the card idle. Paged attention splits their keys. Blocks of any size are small: their ends are seldom empty.
Where packed attention walks no pages, contexts are copied together first.
"""

from __future__ import annotations

from vasuki.machines.profile import AttentionChoice
from vasuki.models.shape import ModelShape

PAGE_TOKENS = 256
_AMPERE = (8, 0)  # the first generation that packed attention runs on
_MOST_HEAD_DIM = 256
# Of packed attention's rate, where either of them keeps all processors busy. Assumed: no card has been measured.
PAGED_RATE = 0.8


def most_split_decodes(choice: AttentionChoice, processors: int, num_kv_heads: int) -> int:
    """Decodes of a step up to which paged attention is the faster one, where both are there to choose from.

    Packed attention of r rows keeps a share of r x KV heads over processors busy, below `PAGED_RATE` up to there.
    """
    return int(PAGED_RATE * processors / num_kv_heads) if choice == "auto" else 0


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
