from __future__ import annotations

from pathlib import Path

import pytest

from vasuki.machines import at_hand


def test_cached_files_do_not_fill_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.max": 8 * 2**30, "memory.current": 7 * 2**30}
    monkeypatch.setattr(at_hand, "_control_group", files.get)
    monkeypatch.setattr(at_hand, "_mem_available", lambda: 64 * 2**30)
    monkeypatch.setattr(Path, "read_text", lambda path: "anon 5\ninactive_file 5368709120\nactive_file 7\n")
    assert at_hand.available_bytes() == 6 * 2**30
