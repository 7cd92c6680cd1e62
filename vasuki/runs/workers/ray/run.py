"""Replicas in a Ray cluster, for `vasuki run --on ray`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vasuki.base.config import JobConfig
from vasuki.machines.here.split import Share
from vasuki.runs.workers.messages import Start
from vasuki.runs.workers.ray.nodes import Nodes, connected


@contextmanager
def replicas_on_ray(config: JobConfig, address: str) -> Iterator[tuple[list[Share], Start]]:
    """Shares for `engine.replicas` replicas of a cluster, as for `auto` if the job does not say, and what starts them.

    Raises JobFileError: there is no Ray, no cluster, or not enough in it.
    """
    with connected(address):
        engine = config.engine
        nodes = Nodes(engine.device, engine.replicas if "replicas" in engine.model_fields_set else "auto")

        from vasuki.runs.workers.ray.actors import Actors  # which needs Ray

        shares = [slot.share for slot in nodes.slots][: None if nodes.most == "auto" else nodes.most]
        yield shares, lambda setup_of, shares: Actors(nodes, setup_of)
