"""A small cluster on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster


@contextmanager
def two_nodes() -> Iterator[Any]:
    """A head without processors, and two nodes with one each."""
    cluster = Cluster()
    cluster.add_node(num_cpus=0)
    cluster.workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
    yield cluster
    cluster.shutdown()
