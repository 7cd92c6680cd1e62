"""Prices steps: the scheduler, order and loop of real runs in virtual time.

simulate              requests to their ends
pipeline              the same for stages and replicas, with the bubbles between them
arrivals              rows that come at their time
simulated_executor    a batch's price in the place of its computation
fast_forward          runs of steps in which nothing is decided, taken as one
"""

from vasuki.simulator.arrivals import VirtualFeed
from vasuki.simulator.pipeline import PipelineResult, simulate_pipelines
from vasuki.simulator.simulate import CountingSink, SimulationResult, simulate
from vasuki.simulator.simulated_executor import SimulatedExecutor

__all__ = [
    "CountingSink",
    "PipelineResult",
    "SimulatedExecutor",
    "SimulationResult",
    "VirtualFeed",
    "simulate",
    "simulate_pipelines",
]
