"""The composition root of `vasuki run --on ray`."""

from __future__ import annotations

from functools import partial

from vasuki.base.config import JobConfig
from vasuki.runs.opening import Outcome
from vasuki.runs.options import AS_USUAL, RunOptions
from vasuki.runs.workers.driver import run_on_replicas
from vasuki.runs.workers.ray.nodes import Nodes, connected


def run_on_ray(config: JobConfig, address: str, options: RunOptions = AS_USUAL) -> Outcome:
    """Run what is left of a job on `engine.replicas` replicas of a cluster; as for `auto` if the job does not say.

    Raises:
        VasukiError: as `run_on_replicas` does; JobFileError also if there is no Ray, no cluster, or not enough in it.
        KeyboardInterrupt: as there.
    """
    with connected(address):
        engine = config.engine
        nodes = Nodes(engine.device, engine.replicas if "replicas" in engine.model_fields_set else "auto")

        from vasuki.runs.workers.ray.actors import Actors  # which needs Ray

        shares = [slot.share for slot in nodes.slots][: None if nodes.most == "auto" else nodes.most]
        return run_on_replicas(config, shares, options, partial(Actors, nodes))
