"""The price of a step, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from vasuki.machines.profile import HardwareProfile


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted time of a step. The parts marked (+) add up to `total_s`; the others look into them."""

    total_s: float
    linear_s: float  # (+) matmuls of all layers
    attention_s: float  # (+)
    elementwise_s: float  # (+) norms, rope, KV write, activation, residuals
    outside_s: float  # (+) outside the layers: embedding, output head, sampling
    network_s: float  # (+) all-reduces and sends between stages
    launch_s: float  # (+) kernel launches that the device waits for
    overhead_s: float  # (+) once a step
    exposed_copy_s: float  # (+) KV copies that the step waits for
    hidden_copy_s: float  # KV copies behind kernels
    weights_read_s: float  # memory side of linear_s
    matmul_compute_s: float  # compute side of linear_s
    kv_read_s: float  # memory side of attention_s
    attention_compute_s: float  # compute side of attention_s
    flops: float  # useful ones, without padding
    memory_bytes: float
    energy_j: float  # of all devices that take part

    @property
    def device_s(self) -> float:
        """Time in kernels and on the network: what overlapped copies can hide behind."""
        return self.linear_s + self.attention_s + self.elementwise_s + self.outside_s + self.network_s

    def explain(self) -> str:
        """A table of the parts, longest first, for `--explain`."""
        parts = {
            f"matmuls ({_side(self.matmul_compute_s, self.weights_read_s, 'weights read')})": self.linear_s,
            f"attention ({_side(self.attention_compute_s, self.kv_read_s, 'KV read')})": self.attention_s,
            "elementwise (memory)": self.elementwise_s,
            "embedding, head, sampling": self.outside_s,
            "network": self.network_s,
            "launches not hidden": self.launch_s,
            "step overhead": self.overhead_s,
            "copies not hidden": self.exposed_copy_s,
        }
        width = max(map(len, parts))
        lines = [f"{'part':<{width}}  {'ms':>9}  {'share':>6}"]
        for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
            if seconds:
                lines.append(f"{part:<{width}}  {seconds * 1e3:9.3f}  {seconds / self.total_s:6.1%}")
        lines.append(f"{'step':<{width}}  {self.total_s * 1e3:9.3f}  {1:6.1%}")
        lines.append(
            f"{self.flops / self.total_s / 1e12:.1f} TFLOP/s, {self.memory_bytes / self.total_s / 1e9:.0f} GB/s, "
            f"{self.energy_j:.2f} J; copies hidden {self.hidden_copy_s * 1e3:.3f} ms"
        )
        return "\n".join(lines)


def _side(compute_s: float, memory_s: float, memory_name: str) -> str:
    return "compute" if compute_s > memory_s else memory_name


def energy_j(profile: HardwareProfile, dtype: str, flops: float, memory_bytes: float, seconds: float) -> float:
    """Joules of a device: power grows from idle to peak with the higher of its compute and memory utilisations.

    An estimate: memory-bound steps usually draw less.
    """
    efficiency, power = profile.efficiency, profile.power
    compute = flops / (profile.peak_flops(dtype) * efficiency.matmul)
    memory = memory_bytes / (profile.memory_bytes_per_s * efficiency.bandwidth)
    utilisation = min(1.0, max(compute, memory) / seconds)
    return seconds * (power.idle_w + (power.peak_w - power.idle_w) * utilisation)
