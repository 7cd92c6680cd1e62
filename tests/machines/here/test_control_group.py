"""Limits of control groups, as files that the kernel writes have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vasuki.machines.here import control_group

GIB = 2**30
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file of a group, or what /proc says of this process."""
    monkeypatch.setattr(control_group, "_ROOT", tmp_path)
    monkeypatch.setattr(control_group, "_OWN", tmp_path / "own")

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    return write


def test_nothing_limits_a_process_without_groups(write: Write) -> None:
    assert control_group.processor_quota() is control_group.memory_limit() is control_group.memory_room() is None


@pytest.mark.parametrize(
    ("text", "quota"), [("60000 100000\n", 0.6), ("400000 100000\n", 4), ("max 100000\n", None), ("", None)]
)
def test_quota_of_version_2(write: Write, text: str, quota: float | None) -> None:
    write("own", "0::/\n")
    write("cpu.max", text)
    assert control_group.processor_quota() == quota


def test_the_tightest_group_around_the_process_decides(write: Write) -> None:
    write("own", "0::/pods/one/main\n")
    write("pods/one/main/cpu.max", "max 100000\n")
    write("pods/one/cpu.max", "150000 100000\n")
    write("pods/cpu.max", "800000 100000\n")
    write("pods/other/cpu.max", "1000 100000\n")
    assert control_group.processor_quota() == 1.5


@pytest.mark.parametrize(("micros", "quota"), [("250000", 2.5), ("-1", None)])
@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_quota_of_version_1(write: Write, folder: str, micros: str, quota: float | None) -> None:
    write("own", "7:memory:/\n4:cpu,cpuacct:/docker/abc\n0::/\n")  # in the container the group is the root
    write(f"{folder}/cpu.cfs_quota_us", micros)
    write(f"{folder}/cpu.cfs_period_us", "100000")
    assert control_group.processor_quota() == quota


def test_cached_files_do_not_fill_a_container(write: Write) -> None:
    write("own", "0::/\n")
    write("memory.max", f"{8 * GIB}\n")
    write("memory.current", f"{7 * GIB}\n")
    write("memory.stat", f"anon 5\ninactive_file {5 * GIB}\nactive_file 7\n")
    assert (control_group.memory_limit(), control_group.memory_room()) == (8 * GIB, 6 * GIB)


def test_memory_of_version_1(write: Write) -> None:
    write("own", "4:memory:/a/b\n")
    write("memory/a/memory.limit_in_bytes", "9223372036854771712\n")  # none
    write("memory/a/b/memory.limit_in_bytes", f"{4 * GIB}\n")
    write("memory/a/b/memory.usage_in_bytes", f"{3 * GIB}\n")
    write("memory/a/b/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert (control_group.memory_limit(), control_group.memory_room()) == (4 * GIB, 2 * GIB)
