"""Numbers of 8 bits: a sign, 4 bits of exponent, 3 of fraction (e4m3, arXiv 2209.05433).

They are equally exact from 2^-6 to 448, less so down to 2^-9, and there is nothing above. What a layer stores need not
lie there: some models' keys reach hundreds, others' values stay below 2^-6. So each layer's keys and values are divided
by a power of two before they are stored, and multiplied by it when they are read; only these 8 bits round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_ROW = 2.0**-100  # its largest number: of smaller ones nothing is left


class Scales(NamedTuple):
    """What the stored numbers of a layer are multiplied by, powers of two."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = Scales()


def stored(states: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Numbers as they are kept. Those too large for 8 bits become the largest; torch would make them no numbers."""
    if dtype is FLOAT8:
        states = (states.float() / scale).clamp(-LARGEST, LARGEST)
    return states.to(dtype)


def rounded_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[num_rows, width]` in 8 bits, each multiplied before by what makes its largest number the largest of them,
    and what to multiply them by afterwards, float32 `[num_rows, 1]`."""
    largest = rows.abs().amax(-1, keepdim=True).float().clamp_min(SMALLEST_ROW)
    numbers = rows.float() * (torch.full_like(largest, LARGEST) / largest)  # a number by a tensor would round twice
    return stored(numbers, FLOAT8, 1.0), largest / LARGEST


def in_8_bits(states: torch.Tensor, scale: float) -> torch.Tensor:
    """Numbers as they are read again."""
    return stored(states, FLOAT8, scale).to(states.dtype) * scale


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes where it holds numbers of 8 bits: torch picks those by an index, and kernels write them
    on any card."""
    return tensor.view(torch.uint8) if tensor.dtype is FLOAT8 else tensor
