"""The page on security names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_claim_names_a_test_that_exists() -> None:
    claims = [row for row in (ROOT / "docs" / "security.md").read_text().splitlines() if row.startswith("| ")][1:]
    files_of_tests = (ROOT / "tests").rglob("test_*.py")
    tests = {name for file in files_of_tests for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    assert len(claims) > 5
    for claim in claims:
        *_, evidence, _ = claim.split("|")
        named = re.findall(r"`(test_\w+)`", evidence)
        files = re.findall(r"`(tests/[\w/]+\.py)`", evidence)
        assert named or files, claim
        assert set(named) <= tests
        assert all((ROOT / file).is_file() for file in files)
