"""Rows of the steps that are timed."""

from __future__ import annotations

import numpy as np

from vasuki.base.arrays import Ints
from vasuki.engine.blocks import BlockTable
from vasuki.engine.sequence import Request, Sequence


def row_at(row: int, token_ids: Ints, computed: int, blocks: list[int]) -> Sequence:
    """A row that has those tokens, of which so many are computed.

    If all but one are, it decodes: its last token is output. Tokens of prompts and outputs pass kernels of their own.
    """
    prompt = len(token_ids) - (0 < computed == len(token_ids) - 1)
    request = Request(row, row, prompt, len(token_ids), token_ids[:prompt].astype(np.int32))
    output, table = token_ids[prompt:].tolist(), BlockTable(device=blocks)
    return Sequence(request, output, num_computed_tokens=computed, block_table=table)
