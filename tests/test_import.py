"""What importing the package costs, by what it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest


def imported_by(code: str) -> set[str]:
    """Top-level packages that are not Python's own."""
    show = f"import sys; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names


def test_the_package_imports_nothing_but_itself() -> None:
    assert imported_by("import vasuki; dir(vasuki)") == {"vasuki"}


@pytest.mark.parametrize("name", ["plan", "run", "simulate", "report", "RunOptions"])
def test_no_name_of_the_package_imports_what_takes_seconds(name: str) -> None:
    found = imported_by(f"import vasuki; vasuki.{name}")
    assert "pydantic" in found
    assert not {"torch", "transformers", "pandas", "pynvml", "ray"} & found
