"""How much KV fits on a device together with weights and activations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vasuki.base.errors import ModelError
from vasuki.base.units import bytes_text
from vasuki.engine.rectangles import MOST_PADDING
from vasuki.engine.settings import MOST_SEQS, EngineSettings
from vasuki.machines.cost_model import recorded_steps
from vasuki.machines.profile import HardwareProfile
from vasuki.models.layout import Layout, spread_buffers
from vasuki.models.shape import ModelShape

_LEAST_RECORDED_CONTEXT = (
    4096  # rows up to this have room in recorded steps, whatever is foreseen: tables are small then
)
_TABLE_BYTES = 12  # of a block in a table that either attention kernel walks

DRAWN_LOGITS = 2**23  # that tokens are drawn from at a time, by `hf.sampler`
DRAWING_BYTES = 25  # held meanwhile for each: its share twice, and all in their order, with sums and a mask
_LIKELIHOOD_BYTES = 8  # held for each meanwhile where tokens are the likeliest: it and its logarithm in float32


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How the memory of one device divides."""

    total_bytes: int
    weight_bytes: int
    activation_bytes: int  # what steps work in, recorded ones too
    kv_bytes: int  # for blocks
    state_bytes: int  # for what recurrent layers keep of each row
    kv_bytes_per_token: float
    block_tokens: int

    @property
    def num_blocks(self) -> int:
        return int(self.kv_bytes / (self.kv_bytes_per_token * self.block_tokens))

    @property
    def kv_tokens(self) -> int:
        """Tokens that the whole blocks hold."""
        return self.num_blocks * self.block_tokens


def activation_bytes(
    shape: ModelShape, max_step_tokens: int, max_num_seqs: int, tensor_parallel: int = 1, row_tokens: int = 0
) -> int:
    """Peak bytes of activations: the largest of the attention's, the MLP's and the head's.

    Attention: see `attention_bytes`; none where chunks are packed. MLP: see `_mlp_token_bytes`. Head: float32 logits of
    every sampled token, and what drawing tokens holds for a slice of them. `row_tokens` is the length of the longest
    row; a row that is computed alone starts with all of them.
    """
    if shape.backend in ("alone", "uncached"):
        max_step_tokens = max(max_step_tokens, row_tokens)
    attention = attention_bytes(shape, max_step_tokens, max_num_seqs, row_tokens) / tensor_parallel
    mlp = max_step_tokens * _mlp_token_bytes(shape, tensor_parallel)
    logits, hidden = max_num_seqs * shape.vocab_size, 2 * max_step_tokens * shape.hidden_size * shape.dtype_bytes
    return math.ceil(max(attention, mlp, logits * 4 + min(logits, DRAWN_LOGITS) * DRAWING_BYTES + hidden))


def attention_bytes(shape: ModelShape, max_step_tokens: int, max_num_seqs: int, row_tokens: int) -> int:
    """Peak bytes of a layer's padded attention: for the rectangle of all decodes, or for the one of prompts."""
    if shape.backend == "ragged" or not row_tokens:
        return 0
    if shape.backend != "padded":
        return rectangle_bytes(shape, 1, row_tokens, row_tokens)
    new = min(math.ceil(MOST_PADDING * max_step_tokens), row_tokens)
    prompts = rectangle_bytes(shape, max(1, math.ceil(MOST_PADDING * max_step_tokens / new)), new, row_tokens)
    return max(prompts, rectangle_bytes(shape, max_num_seqs, 1, row_tokens))


def rectangle_bytes(shape: ModelShape, rows: int, new: int, width: int) -> int:
    """Bytes of padded attention for `[rows, new]` queries over `width` keys: gathered keys and values, and once more
    where several heads share them; a mask; and if attention is eager, the scores of each head, in float32 during the
    softmax."""
    item, columns, pairs = shape.dtype_bytes, rows * width, rows * new * width
    shared = shape.query_width if shape.query_width > shape.kv_width else 0
    scores = pairs * shape.num_heads * (2 * item + 4) if shape.eager else 0
    return 2 * columns * (shape.kv_width + shared) * item + pairs * item + scores


def recorded_context(max_context_tokens: int, longest_row_tokens: int) -> int:
    """Tokens of the longest row that recorded steps have tables for: of those that are foreseen, 0 if nothing is."""
    longest = max(longest_row_tokens, _LEAST_RECORDED_CONTEXT) if longest_row_tokens else max_context_tokens
    return min(max_context_tokens, longest)


def recorded_bytes(
    shape: ModelShape, profile: HardwareProfile, max_num_seqs: int, width: int, layout: Layout | None = None
) -> int:
    """Bytes that a GPU's recorded steps hold in addition to other steps' activations: the activations of the largest,
    with the log-probabilities of the tokens that it samples; the logits that it leaves; and block tables of `width` for
    each of its sizes, which are four times as many rows, or nine times where layers carry a state."""
    recorded = recorded_steps(shape, profile, layout or Layout())
    rows = min(max_num_seqs, recorded.rows)
    logits = rows * shape.vocab_size
    head = logits * shape.dtype_bytes + min(logits, DRAWN_LOGITS) * _LIKELIHOOD_BYTES
    mlp = max(rows, recorded.tokens) * _mlp_token_bytes(shape)
    tables = (4 if shape.recurrent is None else 9) * (rows + recorded.tokens) * width * _TABLE_BYTES
    return math.ceil(max(head, mlp) + logits * shape.dtype_bytes + tables)


def _mlp_token_bytes(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Two hidden states, the product of `up` and the activation, which are rounded where products have a type of their
    own."""
    experts = shape.experts_per_token * shape.expert_intermediate_size + shape.shared_intermediate_size
    width = max(shape.intermediate_size, experts) / tensor_parallel
    rounded = shape.product_dtype_bytes * width if shape.product_dtype else 0
    return shape.dtype_bytes * (2 * shape.hidden_size + ((2 if shape.gated_mlp else 1) + 1) * width) + rounded


def device_weight_bytes(shape: ModelShape, layout: Layout) -> int:
    """Weights on each device: layers that live on the host take no room there, but the buffers that they visit do."""
    away = layout.host_layers - spread_buffers(shape.num_layers, layout.host_layers)
    return math.ceil((shape.weight_bytes - away * shape.layer_weight_bytes) / layout.gpus_per_replica)


def host_weight_bytes(shape: ModelShape, layout: Layout) -> int:
    """Weights that live in host memory, of all the devices of a replica."""
    return layout.host_layers * shape.layer_weight_bytes


def room_bytes(device_memory: float | int, total_bytes: int, available_bytes: int) -> int:
    """Bytes that `kv.device_memory` still allows: up to a share of the device, or all but a KV pool of that size."""
    spared = (1 - device_memory) * total_bytes if device_memory <= 1 else device_memory
    return int(available_bytes - spared)


def most_kv_bytes(shape: ModelShape) -> int:
    """More than any plan's rows fill, side by side and each as long as the model allows, states included."""
    return MOST_SEQS * (shape.max_context_tokens * shape.kv_bytes_per_token + shape.state_bytes)


def memory_budget(
    shape: ModelShape,
    profile: HardwareProfile,
    *,
    device_memory: float | int = 0.9,
    block_tokens: int = 16,
    max_step_tokens: int = 2048,
    max_num_seqs: int = 256,
    row_tokens: int = 0,
    layout: Layout | None = None,
    beside_weights_bytes: int | None = None,
    host_kv_bytes: int = 0,
) -> MemoryBudget:
    """KV that fits on each device of the layout. Plans for other machines and runs on this one count it here.

    `device_memory` is as in the job file: up to 1 it is a share of the device for weights, activations and KV together,
    above 1 the KV pool's size in bytes. Activations are for steps of `max_step_tokens` that sample `max_num_seqs`,
    of rows of at most `row_tokens`.
    The states of `max_num_seqs` rows are taken from the pool. `beside_weights_bytes` is what the share leaves
    to activations and KV on a device that is at hand, where that is known better than the profile tells (`room_bytes`).
    `host_kv_bytes` of KV lie outside the pool and in the same memory: a CPU's host memory is its own.

    Raises:
        ModelError: not even one block fits; the message says what would.
    """
    layout = layout or Layout()
    layout.check(shape)
    layers = math.ceil(shape.num_layers / layout.pipeline_parallel)
    per_token = layers * shape.kv_bytes_per_token_per_layer * shape.kv_share(layout.tensor_parallel)
    weights = device_weight_bytes(shape, layout)
    activations = activation_bytes(shape, max_step_tokens, max_num_seqs, layout.tensor_parallel, row_tokens)
    states = math.ceil(max_num_seqs * shape.state_bytes / layout.gpus_per_replica)
    if device_memory <= 1:
        usable = int(profile.memory_bytes * device_memory)
        if beside_weights_bytes is not None:
            usable = weights + beside_weights_bytes
        usable -= host_kv_bytes
        kv = usable - weights - activations
    else:
        usable, kv = profile.memory_bytes - host_kv_bytes, int(device_memory)
    context = recorded_context(shape.max_context_tokens, row_tokens)
    width = min(-(-context // block_tokens), max(0, int(kv / (per_token * block_tokens))))
    recorded = recorded_bytes(shape, profile, max_num_seqs, width, layout)
    activations += recorded
    if device_memory <= 1:
        kv -= recorded
    kv = min(kv, most_kv_bytes(shape))
    pool, kv = kv, kv - states
    block_bytes = math.ceil(per_token * block_tokens)
    if states and pool >= block_bytes > kv:
        most = int((pool - block_bytes) * max_num_seqs / states)
        raise ModelError(
            f"{shape.name} keeps {bytes_text(states)} for the states of {max_num_seqs} rows that run side by side, "
            f"{profile.name} has {bytes_text(pool)} for them and KV; engine.max_num_seqs may be {most} there"
        )
    if kv < block_bytes or weights + activations + states + kv > usable:
        sizes = (weights, activations, kv, block_bytes)
        raise ModelError(_too_large(shape, profile, usable, *sizes, layout, max_step_tokens))
    return MemoryBudget(profile.memory_bytes, weights, activations, kv, states, per_token, block_tokens)


def _too_large(
    shape: ModelShape,
    profile: HardwareProfile,
    usable: int,
    weights: int,
    activations: int,
    kv: int,
    block_bytes: int,
    layout: Layout,
    max_step_tokens: int,
) -> str:
    need = (
        f"{shape.name} in {shape.dtype} needs {bytes_text(weights)} for weights and {bytes_text(activations)} for "
        f"activations on each of {layout.gpus_per_replica} {profile.name}, which offers {bytes_text(usable)}"
    )
    if weights + activations < usable:
        wrong = "much for the rest" if kv >= block_bytes else f"little: a block takes {bytes_text(block_bytes)}"
        return f"{need}; {bytes_text(max(0, kv))} of KV (kv.device_memory) is too {wrong}"
    if weights < 0.9 * usable < activations:  # which no number of GPUs makes smaller
        if shape.backend != "ragged":
            return f"{need}; its activations are too large for that: lower engine.max_num_seqs or chunk_tokens"
        most = int(0.9 * (usable - weights) / activations * max_step_tokens)
        return (
            f"{need}; steps of {max_step_tokens:,} tokens are too large for it, {most:,} would fit: lower "
            "engine.chunk_tokens"
        )
    ways = ["smaller steps (engine.chunk_tokens, engine.max_num_seqs)"] if weights < 0.9 * usable else []
    gpus = layout.gpus_per_replica
    while gpus < 1024 and shape.weight_bytes / gpus + activations > 0.9 * usable:
        gpus *= 2
    ways.append(f"{gpus} such GPUs")
    room = usable - activations
    bits = 8 * room * layout.gpus_per_replica * 0.9 / shape.num_parameters
    if shape.dtype_bytes == 4 and bits >= 16:
        ways.append("bfloat16 weights")
    elif _in_8_bits(shape, profile).weight_bytes / layout.gpus_per_replica <= 0.9 * room < weights:
        ways.append("model.quantization: float8")
    elif bits >= 4:
        ways.append(f"weights quantised to {int(bits)} bits, which vLLM runs and vasuki does not")
    host = _with_host_memory(shape, profile, room, layout)
    return f"{need}; what would fit: {', or '.join([*ways, 'a smaller model'])}{host}"


def _in_8_bits(shape: ModelShape, profile: HardwareProfile) -> ModelShape:
    """The shape with products of 8 bits, where the card multiplies them."""
    return replace(shape, product_dtype="float8") if "float8" in profile.peak_tflops else shape


def _with_host_memory(shape: ModelShape, profile: HardwareProfile, room: int, layout: Layout) -> str:
    """The host memory that lets some layers visit the device instead, leaving a tenth of the room to KV."""
    if profile.kind != "cpu":
        for host_layers in range(layout.host_layers + 1, shape.num_layers):
            deeper = replace(layout, host_layers=host_layers)
            if device_weight_bytes(shape, deeper) <= 0.9 * room:
                away = bytes_text(host_weight_bytes(shape, deeper))
                return f", or {away} of its weights on the host, see kv.host_memory"
    return ""


def footprint(
    settings: EngineSettings, block_bytes: int, num_layers: int, device_blocks: int, host_blocks: int
) -> tuple[int, int]:
    """Bytes that the blocks of the two pools take on the device and on the host.

    Streamed layers live on the host for every block of the device, and share its buffers there.
    """
    if (depth := settings.offload.depth) is not None:  # homes are there for every block
        homes = depth.most_blocks(settings.num_blocks) * block_bytes * len(depth.deepest.streamed) // num_layers
        return min(device_blocks, settings.num_blocks) * block_bytes, homes
    streamed = settings.offload.streamed_layers
    resident = (
        device_blocks * block_bytes * (num_layers - streamed + spread_buffers(num_layers, streamed)) // num_layers
    )
    homes = device_blocks * block_bytes * streamed // num_layers
    return resident, homes + host_blocks * block_bytes
