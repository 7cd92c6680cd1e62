"""The layout of a model's weights over devices and host."""

from __future__ import annotations

from dataclasses import dataclass

from vasuki.base.errors import JobFileError, ModelError
from vasuki.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Layout:
    """The spread of a model: `tensor x pipeline` devices hold one replica, and `data` replicas share the job.

    Of models larger than that, some decoder layers' weights live in host memory and visit the device in every step.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    host_layers: int = 0  # of the whole model

    @property
    def gpus_per_replica(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_replica * self.data_parallel

    @property
    def num_streams(self) -> int:
        """Batches in flight at the same time: one on each stage of each replica."""
        return self.pipeline_parallel * self.data_parallel

    @property
    def label(self) -> str:
        """A name for files: `tp8-pp8`, empty for a single device."""
        degrees = (("tp", self.tensor_parallel), ("pp", self.pipeline_parallel), ("dp", self.data_parallel))
        return "-".join(f"{name}{degree}" for name, degree in degrees if degree > 1)

    def to_dict(self) -> dict[str, int]:
        """Return the layout as a manifest holds it."""
        return {
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "data_parallel": self.data_parallel,
            "gpus": self.num_gpus,
        }

    def check(self, shape: ModelShape) -> None:
        """Raises JobFileError if the model cannot be cut over so many devices, ModelError if its weights cannot wait on
        the host like this."""
        if min(self.tensor_parallel, self.pipeline_parallel, self.data_parallel) < 1:
            degrees = f"{self.tensor_parallel} x {self.pipeline_parallel} x {self.data_parallel}"
            raise JobFileError(
                f"every degree of parallelism must be at least 1, not {degrees} (tensor, pipeline, data)"
            )
        group = self.tensor_parallel
        if shape.num_heads % group:
            raise JobFileError(f"{shape.name} has {shape.num_heads} heads, not divisible by {group} GPUs")
        for kv_heads in (shape.num_kv_heads, shape.full_heads[0]):
            if kv_heads % group and group % kv_heads:
                raise JobFileError(
                    f"{shape.name} has {kv_heads} KV heads, which {group} GPUs can neither divide nor copy evenly"
                )
        if self.pipeline_parallel > shape.num_layers:
            raise JobFileError(
                f"{shape.name} has {shape.num_layers} layers, too few for {self.pipeline_parallel} stages"
            )
        if self.host_layers and not shape.weighs_evenly:
            raise ModelError(f"{shape.name} has layers of very different sizes, whose weights cannot wait on the host")
        if not 0 <= self.host_layers < shape.num_layers:
            raise ModelError(
                f"{shape.name} has {shape.num_layers} layers, of which at least one stays on the device: "
                f"the weights of {self.host_layers} cannot live on the host"
            )


def spread_buffers(num_layers: int, streamed: int) -> int:
    """Device buffers that `streamed` layers, evenly spaced among all, pass through when they come from the host.

    While one is read by the layer that runs, another fills for the next streamed layer. Where the spacing alternates
    between one layer and two, a third takes up the difference.
    """
    return min(streamed, 2 if streamed == num_layers or 2 * streamed <= num_layers else 3)
