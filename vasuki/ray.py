"""vasuki as a step of a Ray Data pipeline.

answers = vasuki.ray.map_batches(dataset, "job.yaml", actors=4)
"""

from vasuki.commands.cluster.data import Answers, map_batches

__all__ = ["Answers", "map_batches"]
