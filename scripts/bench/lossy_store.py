"""What a job over an object store takes when some requests are lost, compared with one that loses none.

    python scripts/bench/lossy_store.py .venvs/s3/bin/moto_server [--lost 0.01] [--repeats 5]

The shipped job reads its rows from an S3 server process and writes its parts there, a few a second, through a proxy
that loses requests with their connections. Runs alternate. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "io"))

from object_store import BUCKET, ObjectStore  # noqa: E402

from vasuki.base import commits  # noqa: E402
from vasuki.base.job_file import load_job  # noqa: E402
from vasuki.runs.options import RunOptions  # noqa: E402
from vasuki.runs.run import run_job  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", type=Path, help="moto_server, as `make test-s3` installs it")
    parser.add_argument("--lost", type=float, default=0.01, help="share of the requests")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    commits.COMMIT_S = 0.2
    with tempfile.TemporaryDirectory() as folder:
        store = ObjectStore(options.server, Path(folder) / "server.log")
        os.environ.update(store.environment)
        try:
            store.put("dates.parquet", (ROOT / "jobs" / "data" / "dates.parquet").read_bytes())
            _seconds(store)  # the first run measures the machine
            pairs = [(_seconds(store), _seconds(store, options.lost)) for _ in range(options.repeats)]
        finally:
            store.close()
    ratios = [lossy / whole for whole, lossy in pairs]
    print(" ".join(f"{ratio:.2f}" for ratio in ratios))
    print(json.dumps({"ratio": statistics.median(ratios), "requests": store.proxy.requests, "lost": store.proxy.lost}))


def _seconds(store: ObjectStore, lost_share: float = 0.0) -> float:
    """Run the job. Fails if a row has no answer."""
    store.proxy.lost_share = lost_share
    changes = (
        f"input.path=s3://{BUCKET}/dates.parquet",
        f"output.path=s3://{BUCKET}/out",
        f"model.path={ROOT}/models/dates",
    )
    manifest = run_job(
        load_job(str(ROOT / "jobs" / "quickstart.yaml"), changes), RunOptions(fresh=True, quiet=True)
    ).manifest
    store.proxy.lost_share = 0.0
    assert manifest.rows.total == manifest.rows.succeeded, manifest.rows
    return manifest.timings.makespan_s


if __name__ == "__main__":
    main()
