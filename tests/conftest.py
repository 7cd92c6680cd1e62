from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# One thread each: the machine's cores go to the tests that run side by side, and results do not depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # run Triton's kernels on a CPU; read when it is imported, as torch may do
os.environ["COLUMNS"] = "100"  # of a terminal, which tests need not have
os.environ["VASUKI_MEASURE"] = "off"  # how busy the machine is decides no plan; tests of measuring switch it on
os.environ["RAY_AUTH_MODE"] = "disabled"  # Ray would write a token into the home folder of the user who tests


# The same examples in every run, however fast the machine is.
settings.register_profile("vasuki", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vasuki")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sweeps take as long as all other tests together, and seldom find what those miss: of seven parts one is run, that
    of VASUKI_SWEEPS (1 to 7, which `make test` sets to the day of the week), or all."""
    wanted = os.environ.get("VASUKI_SWEEPS", "all")
    if wanted == "all":
        return
    parts = {item: zlib.crc32(item.nodeid.encode()) % 7 + 1 for item in items if item.get_closest_marker("sweep")}
    left_out = [item for item, part in parts.items() if part != int(wanted)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if parts.get(item, int(wanted)) == int(wanted)]


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """Commands that run within a test set up logs for their process, which other tests want to look at."""
    logger = logging.getLogger("vasuki")
    handlers, level, propagates = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagates


@pytest.fixture(autouse=True)
def no_run_beats_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at every run of the suite that ends: what it generated took no less than both bounds said."""
    from vasuki.io.output.manifest import Manifest
    from vasuki.io.output.output_folder import OutputFolder

    finish = OutputFolder.finish

    def checked(self: OutputFolder, manifest: Manifest, *how: Any, **named: Any) -> Manifest:
        finished = finish(self, manifest, *how, **named)
        bounds, taken_s = finished.bounds, finished.timings.generate_s
        assert taken_s >= (bounds.datasheet_s or 0.0), "a run took less than any can"
        assert taken_s >= (bounds.schedule_s or 0.0), "a run beat every schedule"
        return finished

    monkeypatch.setattr(OutputFolder, "finish", checked)


@pytest.fixture(autouse=True)
def short_search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans look a tenth of the time for better ways, unless a test is about what is found: two thirds of the time of
    all tests of plans would go there."""
    from vasuki.planner import search

    if request.node.get_closest_marker("whole_search") is None:
        monkeypatch.setattr(search, "LEAST_S", search.LEAST_S / 10)
        monkeypatch.setattr(search, "MOST_S", search.MOST_S / 10)


@pytest.fixture(scope="session", autouse=True)
def own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test finds what earlier runs measured on this machine, nor leaves anything for later ones."""
    from vasuki.machines.here import measured

    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "_folder", lambda: folder)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a context of 128 tokens."""
    from tiny_job import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model"))
