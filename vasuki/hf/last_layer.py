"""The end of the last layer, for sampled tokens only.

Of a prompt's tokens, every layer leaves keys and values behind, and the last one nothing else: only the logits of
sampled tokens are wanted. So the last MLP skips the others, with L layers nearly an L-th of a prompt's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vasuki.hf.loading.weights import decoder_layers


class SampledMLP(torch.nn.Module):
    """What takes the place of the last layer's MLP, its plain twin: the same where it counts, and zeros elsewhere."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self._rows: torch.Tensor | None = None

    @contextmanager
    def only(self, rows: torch.Tensor) -> Iterator[None]:
        """Compute only these of a step's tokens, int64 `[num_rows]`, within a `with` statement; if none, the first."""
        self._rows = rows if len(rows) else rows.new_zeros(1)
        try:
            yield
        finally:
            self._rows = None

    def forward(self, x: torch.Tensor) -> Any:
        """`[1, num_tokens, hidden_size]` -> the same, or a tuple that begins with it."""
        rows = self._rows
        if rows is None or len(rows) == x.shape[1]:
            return self.mlp(x)
        output = self.mlp(x[:, rows])
        first, *others = output if isinstance(output, tuple) else (output,)
        spread = torch.zeros_like(x).index_copy_(1, rows, first)
        return (spread, *others) if isinstance(output, tuple) else spread


def sampled_mlp(model: Any, num_layers: int) -> SampledMLP | None:
    """The last layer's MLP, from now on such a one; None for an architecture that has it elsewhere."""
    try:
        last: Any = decoder_layers(model, num_layers)[-1]
    except LookupError:
        return None
    mlp = getattr(last, "mlp", None)
    if mlp is None or isinstance(mlp, SampledMLP):
        return mlp
    last.mlp = SampledMLP(mlp)
    return last.mlp  # type: ignore[no-any-return]
