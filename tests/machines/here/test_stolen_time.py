from __future__ import annotations

from pathlib import Path

import pytest

from vasuki.machines.here.stolen_time import StolenTime

# user nice system idle iowait irq softirq steal guest guest_nice
BEFORE = "cpu  100 0 20 500 5 0 1 30 7 0\ncpu0 50 0 10 250 3 0 0 15 7 0\n"
AFTER = "cpu  160 0 30 505 5 0 1 55 9 0\ncpu0 80 0 15 253 3 0 0 27 9 0\n"


def test_the_share_is_of_the_time_that_passed_since(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(BEFORE)
    stolen = StolenTime(stat)
    assert stolen.share == 0
    stat.write_text(AFTER)
    assert stolen.share == pytest.approx(25 / 100), "a guest's time is in user already"


def test_where_the_system_does_not_say_nothing_is_stolen(tmp_path: Path) -> None:
    assert StolenTime(tmp_path / "stat").share == 0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not say")
def test_the_words_of_this_system_are_understood(tmp_path: Path) -> None:
    """A quarter of the time that passes after a real reading is given to others."""
    stat = tmp_path / "stat"
    first, *rest = Path("/proc/stat").read_text().split("\n")
    stat.write_text("\n".join([first, *rest]))
    stolen = StolenTime(stat)
    name, *ticks = first.split()
    later = [int(tick) + {3: 300, 7: 100}.get(field, 0) for field, tick in enumerate(ticks)]  # idle, steal
    stat.write_text("\n".join([" ".join([name, *map(str, later)]), *rest]))
    assert stolen.share == pytest.approx(0.25)
