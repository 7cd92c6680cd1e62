"""Which kernel attends on a GPU: torch's packed attention, or the paged one of this package.

             programs of a step of r decodes    its windowed layers read    blocks
    packed   r x KV heads                       once for each query head    pages of 256 tokens
    paged    as many as fill the card           once                        of any size

Packed attention is the more refined kernel, but it gives all keys of a row and KV head to one program: few rows leave
most of the card idle. Paged attention splits their keys.
"""

from __future__ import annotations

from vasuki.machines.profile import AttentionChoice

# Of packed attention's rate, where either of them keeps all processors busy. Assumed: no card has been measured.
PAGED_RATE = 0.8


def most_split_decodes(choice: AttentionChoice, processors: int, num_kv_heads: int) -> int:
    """Decodes of a step up to which paged attention is the faster one, where both are there to choose from.

    Packed attention of r rows keeps a share of r x KV heads over processors busy, below `PAGED_RATE` up to there.
    """
    return int(PAGED_RATE * processors / num_kv_heads) if choice == "auto" else 0
