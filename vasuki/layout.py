"""How a model is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass

from vasuki.errors import ModelError
from vasuki.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is spread: `tensor x pipeline` devices hold one replica, and `data` replicas share the job."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1

    @property
    def gpus_per_replica(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_replica * self.data_parallel

    def check(self, shape: ModelShape) -> None:
        """Raises ModelError if the model cannot be cut this way."""
        if min(self.tensor_parallel, self.pipeline_parallel, self.data_parallel) < 1:
            raise ModelError(f"every degree of parallelism must be at least 1, not {self}")
        if shape.num_heads % self.tensor_parallel:
            raise ModelError(f"{shape.name} has {shape.num_heads} heads, not divisible by {self.tensor_parallel} GPUs")
        if self.pipeline_parallel > shape.num_layers:
            raise ModelError(f"{shape.name} has {shape.num_layers} layers, too few for {self.pipeline_parallel} stages")
