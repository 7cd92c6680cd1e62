"""How much of a virtual machine's processor time its host gave to others: such a machine is slow, and nobody in it is
to blame."""

from __future__ import annotations

from pathlib import Path

NOISE = 0.03  # share of the processors that is not worth a word
_STAT = Path("/proc/stat")
_FIELDS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; what follows is counted in the first two already


class StolenTime:
    """Counts from when it is made. Always 0 on a machine of one's own, and where the system does not say."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._before = self._ticks()

    @property
    def share(self) -> float:
        """Share of all processors' time since then, at most 1."""
        passed = [now - before for now, before in zip(self._ticks(), self._before, strict=True)]
        return passed[-1] / max(1, sum(passed))

    def _ticks(self) -> list[int]:
        try:
            total = self._stat.read_text().split("\n")[0].split()
        except OSError:
            total = []
        return [int(ticks) for ticks in total[1 : 1 + _FIELDS]] or [0] * _FIELDS
