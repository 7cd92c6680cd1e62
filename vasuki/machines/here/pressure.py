"""How much work waits for a processor of this machine."""

from __future__ import annotations

from pathlib import Path

BUSY = 25.0  # percent of the last ten seconds in which somebody waited for a processor, from which on it is shared


def cpu_pressure(path: Path = Path("/proc/pressure/cpu")) -> float:
    """Percent of the last ten seconds in which some thread of the machine waited for a processor; 0 if unknown."""
    try:
        fields = dict(field.split("=") for field in path.read_text().split("\n")[0].split()[1:])
        return float(fields["avg10"])
    except (OSError, KeyError, ValueError):
        return 0.0
