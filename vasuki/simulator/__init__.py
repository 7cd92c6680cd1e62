"""Virtual time: the scheduler, order and loop of real runs over a cost model in place of kernels.

executor   prices a batch instead of computing it
pipeline   the same for stages and replicas, with the bubbles between them
job        every request of a job, and what came of it
"""

from vasuki.simulator.pipeline import PipelineResult, simulate_pipelines
from vasuki.simulator.simulate import Simulated, SimulationResult, Spread, simulate, simulate_plan
from vasuki.simulator.simulated_executor import Arrivals, SimulatedExecutor

__all__ = [
    "Arrivals",
    "PipelineResult",
    "Simulated",
    "SimulatedExecutor",
    "SimulationResult",
    "Spread",
    "simulate",
    "simulate_pipelines",
    "simulate_plan",
]
