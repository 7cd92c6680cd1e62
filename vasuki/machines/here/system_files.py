"""Small files in which the system tells about itself: /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def text_of(file: Path) -> str:
    """Empty if it is not there."""
    try:
        return file.read_text()
    except OSError:
        return ""


def number_in(file: Path) -> int | None:
    """The number that is all of it; None if it is not there, or says something else."""
    text = text_of(file).strip()
    return int(text) if text.isdigit() else None
