"""How Triton's kernels are launched."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **sizes: Any) -> None:
    """Run a kernel once for each point of a grid. It is compiled for its sizes when they first come."""
    kernel[grid](*arguments, **sizes)
