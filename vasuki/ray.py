"""vasuki as a step of a Ray Data pipeline: each batch is a small job of its own, on a model that stays loaded.

    answers = vasuki.ray.map_batches(dataset, "job.yaml", actors=4)

dataset ── batch ── batch.parquet ── Runner ── part-*.parquet ── batch with answers ── dataset
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from vasuki.base.config import JobConfig
from vasuki.base.job_file import load_job
from vasuki.io.batch import batch_job, with_answers
from vasuki.runs.options import RunOptions
from vasuki.runs.run import Runner
from vasuki.runs.signals import StopSignals
from vasuki.runs.workers.ray.nodes import import_ray

BATCH_ROWS = 4096  # planned as one job


def map_batches(dataset: Any, job: str, *, actors: int = 1, batch_size: int = BATCH_ROWS, **options: Any) -> Any:
    """Answer each row of a dataset.

    Args:
        dataset: a `ray.data.Dataset`.
        job: file of the job, whose `input.path` and `output.path` play no part.
        actors: how many, each with its own model.
        batch_size: rows that are planned together.
        options: others of `Dataset.map_batches`; `num_gpus` is 1 where the job may use one and the cluster has any.

    Returns:
        The dataset, with the columns that `vasuki run` writes, without `id`, in addition to its own. A row that fails
        has an `error`; `errors.max_fraction` plays no part.

    Raises:
        JobFileError: as `load_job`, or Ray is not installed.
    """
    ray = import_ray("vasuki.ray.map_batches")
    from ray.data import ActorPoolStrategy

    config = _job(job)
    on_gpu = config.engine.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    own: dict[str, Any] = {"compute": ActorPoolStrategy(size=actors), "num_gpus": int(on_gpu)}
    return dataset.map_batches(
        Answers,
        fn_constructor_args=[config],
        batch_format="pyarrow",
        batch_size=batch_size,
        **(own | options),
    )


class Answers:
    """What `map_batches` calls with each batch: for a `Dataset.map_batches` of one's own, with tables of pyarrow.

    Args:
        job: file of the job, or the job itself.

    Raises:
        VasukiError: as a run does.
    """

    def __init__(self, job: str | JobConfig) -> None:
        self._config = job if isinstance(job, JobConfig) else _job(job)
        self._runner = Runner(StopSignals(), RunOptions(quiet=True))
        self._runner.load(self._config)

    def __call__(self, batch: Any) -> Any:
        """A `pyarrow.Table`: the rows of the batch with their answers."""
        with tempfile.TemporaryDirectory(prefix="vasuki-") as folder:
            job = batch_job(self._config, batch, Path(folder))
            self._runner.run(job)
            return with_answers(batch, job)


def _job(file: str) -> JobConfig:
    return load_job(file, ["input.path='-'", "output.path='-'"])
