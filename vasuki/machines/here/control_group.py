"""What this process may use of the machine: the limits of its control groups, of both versions, as containers,
Kubernetes and systemd set them (the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).

processor_quota   seconds of processors in a second
memory_limit      bytes
memory_room       bytes that can still be taken
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vasuki.machines.here.system_files import number_in, text_of

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NONE = 2**60  # what version 1 writes for no limit is larger


def processor_quota() -> float | None:
    """Processors that may be busy on average; None if all may. Affinity does not show it."""
    quotas = [quota for folder in _groups("cpu") if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def memory_limit() -> int | None:
    """The smallest limit of a group that this process is in; None if there is none."""
    return min((limit for _, limit in _memory_limits()), default=None)


def memory_room() -> int | None:
    """What can be taken before one of the groups is at its limit; None if none has one."""
    return min((limit - _used(folder) for folder, limit in _memory_limits()), default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's groups, the innermost first. A container may see its own as the root, whatever the
    system calls it."""
    for line in text_of(_OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [_ROOT, _ROOT / "unified"]
        elif controller in controllers.split(","):
            mounts = [_ROOT / controller, _ROOT / controllers]
        else:
            continue
        for mount in mounts:
            own = mount / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount) and folder.is_dir())


def _quota(folder: Path) -> float | None:
    either = text_of(folder / "cpu.max").split() or [
        *text_of(folder / "cpu.cfs_quota_us").split(),
        *text_of(folder / "cpu.cfs_period_us").split(),
    ]
    match either:
        case [quota, period] if quota.isdigit() and period.isdigit() and int(period):  # else "max" or -1
            return int(quota) / int(period)
    return None


def _memory_limits() -> Iterator[tuple[Path, int]]:
    for folder in _groups("memory"):
        limit = number_in(folder / "memory.max") or number_in(folder / "memory.limit_in_bytes")
        if limit and limit < _NONE:
            yield folder, limit


def _used(folder: Path) -> int:
    """Without files that the kernel caches for the group and drops when memory is short: those of a model's weights
    would make it look full."""
    used = number_in(folder / "memory.current") or number_in(folder / "memory.usage_in_bytes") or 0
    counts = dict(line.split() for line in text_of(folder / "memory.stat").splitlines())
    return used - int(counts.get("total_inactive_file") or counts.get("inactive_file") or 0)
