"""A machine is split among replicas without overlap."""

from __future__ import annotations

import os

import pytest

from vasuki.base.errors import JobFileError
from vasuki.machines.here import cpu, gpu, split
from vasuki.machines.here.split import Share


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[split._Core]:
    """Two sockets with four cores each, and two threads a core."""
    monkeypatch.setattr(gpu, "visible_gpus", list)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = [split._Core(n // 4, n // 4, n % 4, (n, n + 8)) for n in range(8)]
    monkeypatch.setattr(split, "_cores", lambda: cores)
    return cores


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8])
def test_each_core_has_one_owner(cores: list[split._Core], replicas: int) -> None:
    shares = split.split("cpu", replicas)
    assert len(shares) == replicas
    assert sorted(number for share in shares for number in share.processors) == list(range(16))
    assert sum(share.threads for share in shares) == 8
    assert all(2 * share.threads == len(share.processors) for share in shares)  # both threads of a core


def test_auto_is_one_for_each_socket(cores: list[split._Core]) -> None:
    assert [share.processors for share in split.split("auto", "auto")] == [
        (0, 1, 2, 3, 8, 9, 10, 11),
        (4, 5, 6, 7, 12, 13, 14, 15),
    ]


def test_threads_that_were_asked_for_are_shared(cores: list[split._Core], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert [share.threads for share in split.split("cpu", 2)] == [2, 2]


def test_replicas_share_a_quota(cores: list[split._Core], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "most_threads", lambda: 4)
    assert [share.threads for share in split.split("cpu", 2)] == [2, 2]
    assert [share.threads for share in split.split("cpu", 3)] == [1, 1, 1]
    with pytest.raises(JobFileError, match="5 are asked for, and there are 4 cores within the quota here"):
        split.split("cpu", 5)
    monkeypatch.setattr(cpu, "most_threads", lambda: 1)
    assert [share.threads for share in split.split("auto", "auto")] == [1]


def test_more_replicas_than_devices_are_refused(cores: list[split._Core], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobFileError, match=r"engine.replicas: 9 are asked for, and there are 8 cores here"):
        split.split("cpu", 9)
    monkeypatch.setattr(gpu, "visible_gpus", lambda: ["2"])
    assert split.split("auto", "auto") == [Share(gpu="2")]
    with pytest.raises(JobFileError, match="and there is 1 GPU here"):
        split.split("auto", 2)


def test_this_machine_is_split_into_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "visible_gpus", list)
    (share,) = split.split("auto", 1)
    assert set(share.processors) == os.sched_getaffinity(0)
