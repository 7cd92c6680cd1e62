"""The wheel has everything that a checkout runs with: sources, kernels, profiles and the example."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from documented import ROOT


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("vasuki", "vasuki"),
        ("solvers/vasuki_solvers", "vasuki_solvers"),
        ("profiles", "*/share/vasuki/profiles"),
        ("models/dates", "*/share/vasuki/examples/dates/model"),
        ("jobs/quickstart.yaml", "*/share/vasuki/examples/dates/job.yaml"),
        ("jobs/data/dates.parquet", "*/share/vasuki/examples/dates/dates.parquet"),
    ],
)
def test_every_file_is_in_the_wheel(packed: set[str], source: str, place: str) -> None:
    root = ROOT / source
    files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"] if root.is_dir() else [root]
    data = next(name.split("/")[0] for name in packed if ".data/" in name)
    wanted = {str(Path(place.replace("*", f"{data}/data")) / path.relative_to(root)) for path in files}
    assert len(files) >= 1
    assert wanted <= packed
