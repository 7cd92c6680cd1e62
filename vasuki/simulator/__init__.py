"""Prices steps: the scheduler, order and loop of real runs in virtual time.

simulate              requests to their ends
replicas              the same for machines that share a job by leases, and may be taken away
pipeline              the same for stages, with the bubbles between them
arrivals              rows that come at their time
simulated_executor    a batch's price in the place of its computation
fast_forward          runs of steps in which nothing is decided, taken as one
"""

from vasuki.simulator.arrivals import VirtualFeed
from vasuki.simulator.pipeline import PipelineResult, simulate_pipelines
from vasuki.simulator.replicas import ReplicasResult, SimulatedMachine, simulate_replicas
from vasuki.simulator.simulate import CountingSink, SimulationResult, simulate
from vasuki.simulator.simulated_executor import SimulatedExecutor

__all__ = [
    "CountingSink",
    "PipelineResult",
    "ReplicasResult",
    "SimulatedExecutor",
    "SimulatedMachine",
    "SimulationResult",
    "VirtualFeed",
    "simulate",
    "simulate_pipelines",
    "simulate_replicas",
]
