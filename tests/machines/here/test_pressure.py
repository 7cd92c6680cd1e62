"""How much work waits for a processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from vasuki.machines.here.pressure import cpu_pressure


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        ("some avg10=12.50 avg60=3.00 avg300=1.00 total=7\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", 12.5),
        ("", 0.0),
        ("some avg10=much\n", 0.0),
    ],
)
def test_pressure_is_read(tmp_path: Path, text: str, percent: float) -> None:
    (tmp_path / "cpu").write_text(text)
    assert cpu_pressure(tmp_path / "cpu") == percent
    assert cpu_pressure(tmp_path / "absent") == 0.0
