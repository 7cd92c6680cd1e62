"""Run folders, read: the manifest, the trace in bins, and the hardware profile of the card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from vasuki.base.errors import InputError, ProfileError, one_line
from vasuki.io.location import Location
from vasuki.io.output.manifest import MANIFEST, Manifest, read_manifest
from vasuki.machines.profile import HardwareProfile
from vasuki.machines.profile_files import find_profile, profile_for_device
from vasuki.report.timeline import Timeline, read_timeline

_MAX_DEPTH = 4  # simulate writes DIR/<gpu>, cron jobs DIR/<year>/<month>/<day>


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A run folder, real or simulated."""

    place: Location
    manifest: Manifest
    timeline: Timeline | None  # None without a trace, or where the trace was not wanted
    profile: HardwareProfile | None  # None for a device that no profile describes
    finished_at: datetime  # UTC

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.place.name

    @property
    def gpu(self) -> str:
        """The card, shortly: the profile's name, else what the driver calls it."""
        if self.profile is not None:
            return self.profile.name.upper()
        device = str(self.manifest.device.get("name") or self.manifest.device.get("type") or "unknown device")
        return device.removeprefix("NVIDIA ")

    @property
    def num_devices(self) -> int:
        count = self.manifest.device.get("count", 1)
        return count if isinstance(count, int) and count > 0 else 1

    @property
    def rows_done(self) -> int:
        return self.manifest.rows.succeeded + self.manifest.rows.failed

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of the rows that are done. What preemptions computed again is not counted."""
        return self.manifest.tokens.prompt + self.manifest.tokens.output

    @property
    def waits_for_rows(self) -> bool:
        """Whether rows arrived while it ran: its makespan says when they came, and not how fast it was."""
        return self.manifest.latency is not None

    @property
    def earlier_s(self) -> float:
        """Step time of runs that were stopped before this one ended the job, which the manifest leaves out."""
        if self.timeline is None:
            return 0.0
        own_s = self.manifest.timings.foreseen_s
        return self.timeline.earlier_s if self.timeline.total_s > 1.01 * own_s else 0.0

    @property
    def makespan_s(self) -> float:
        """First row read to last row durable, the earlier runs' steps included."""
        return self.manifest.timings.makespan_s + self.earlier_s

    @property
    def gpu_hours(self) -> float:
        """Paid time of all devices."""
        recorded = self.manifest.cost.gpu_hours or self.manifest.timings.makespan_s / 3600 * self.num_devices
        return recorded * self.makespan_s / self.manifest.timings.makespan_s

    def setting(self, section: str, key: str) -> Any:
        """A key of the job as the manifest holds it, None where it is absent."""
        values = self.manifest.job.get(section)
        return values.get(key) if isinstance(values, dict) else None

    @property
    def job(self) -> str:
        return str(self.manifest.job.get("name") or "job")

    @property
    def model(self) -> str:
        """The model's shape, or the last part of its path."""
        name = self.setting("model", "shape") or self.setting("model", "path") or ""
        return str(name).rstrip("/").rsplit("/", 1)[-1]

    @property
    def policy(self) -> str:
        return str(self.setting("engine", "policy") or "vasuki")


def load_runs(paths: Iterable[str], with_trace: bool = True) -> list[Run]:
    """Read run folders, each once. A folder without a manifest stands for the runs below it, by name.

    Args:
        paths: folders, manifest files or URLs.
        with_trace: read traces too, which takes seconds for a million steps.

    Raises:
        InputError: a path holds no run, a manifest or trace cannot be read, or a run has done no rows.
    """
    places = {str(place): place for path in paths for place in run_folders(path)}
    return [load_run(place, with_trace) for place in places.values()]


def run_folders(path: str) -> list[Location]:
    """The folder itself if it holds a manifest, else the folders below it that do, by name.

    Raises:
        InputError: there is none.
    """
    try:
        place = Location.parse(path.removesuffix(MANIFEST) or ".")
        if not place.exists():
            raise InputError(f"{path} does not exist")
        found = list(_below(place, _MAX_DEPTH))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {one_line(error)}") from None
    if not found:
        raise InputError(f"{path} has no {MANIFEST}: no run has ended there")
    return found


def _below(place: Location, depth: int) -> Iterator[Location]:
    if place.is_file() or (place / MANIFEST).exists():
        yield place
    elif depth:
        for child in place.children():
            if child.is_folder() and not child.name.startswith("."):
                yield from _below(child, depth - 1)


def load_run(place: Location, with_trace: bool = True) -> Run:
    """Read one run folder. Raises InputError as `load_runs` does."""
    manifest = read_manifest(place)
    rows = manifest.rows
    if not rows.succeeded + rows.failed:
        raise InputError(f"{place} has no finished rows, so there is nothing to compare")
    if manifest.timings.makespan_s <= 0:
        raise InputError(f"{place} has a manifest without timings.makespan_s, so there is nothing to compare")
    return Run(
        place=place,
        manifest=manifest,
        timeline=_trace(place) if with_trace and place.is_folder() else None,
        profile=_profile(manifest),
        finished_at=_finished_at(place, manifest),
    )


def _trace(place: Location) -> Timeline | None:
    try:
        return read_timeline(place)
    except InputError as error:
        raise InputError(str(error) if str(place) in str(error) else f"{place}: {error}") from None


def _profile(manifest: Manifest) -> HardwareProfile | None:
    """The profile that the run names, else the one of its device."""
    named = manifest.device.get("profile")
    device = str(manifest.device.get("name") or "")
    try:
        return find_profile(str(named)) if named else profile_for_device(device) or find_profile(device)
    except ProfileError:
        return None


def _finished_at(place: Location, manifest: Manifest) -> datetime:
    """Return when the run ended: `finished_at` of the manifest (ISO 8601), else when the file was written."""
    try:
        stated = datetime.fromisoformat(str(getattr(manifest, "finished_at", "")).replace("Z", "+00:00"))
        return stated if stated.tzinfo else stated.replace(tzinfo=UTC)
    except ValueError:
        file = place / MANIFEST if place.is_folder() else place
        written: datetime | None = file.filesystem.get_file_info(file.path).mtime
        return written or datetime.fromtimestamp(0, UTC)
