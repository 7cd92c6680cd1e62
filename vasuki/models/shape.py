"""A decoder-only transformer as sizes, and what follows from them: parameters, bytes, FLOPs.

A shape is read from a `config.json` as Hugging Face writes it, without importing transformers (`config_json`). One
layer, with the matrices that the cost model multiplies (`[rows, k] x [k, n]`):

    x ── norm ── qkv ── rope ── attention ── o ──(+)── norm ── up (gate and up) ── activation ── down ──(+)──

In a mixture-of-experts layer `up` and `down` exist once an expert, and each token passes `experts_per_token` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from vasuki.base.errors import ModelError, did_you_mean
from vasuki.models.launches import UNKNOWN_LAUNCHES

# How rows share a forward: packed end to end, padded to rectangles, or not at all; and where a model keeps nothing of a
# row, each of its tokens takes all tokens before it along.
Backend = Literal["ragged", "padded", "alone", "uncached"]
BACKENDS: dict[Backend, str] = {
    "ragged": "ragged",
    "padded": "padded",
    "alone": "padded, row by row",
    "uncached": "padded, row by row, from the first token each time",
}
Pairs = TypeVar("Pairs", bound=Any)  # a number or a NumPy array

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
TOKEN_ID_BYTES = 8  # all that is kept of a token where no layer keeps anything


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix `[k, n]` of one layer, of which a layer holds `copies` (experts) and a token meets `used`."""

    name: str
    k: int
    n: int
    copies: int = 1
    used: int = 1


@dataclass(frozen=True, slots=True)
class Latent:
    """The narrow vectors that queries, keys and values of a layer pass through.

    Multi-head latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    query_rank: int  # 0: queries do not
    kv_rank: int
    rotary_dim: int  # of a key head, the same for all
    value_dim: int  # of a value head; in memory it is as wide as a key head


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers that carry a state from token to token, instead of attention or in addition to it."""

    layers: int
    matrices: tuple[Matrix, ...]  # of each
    # Numbers that each keeps of a row, however long it is: the last inputs of a convolution, in the weights' type, and
    # what the recurrence has come to, in float32.
    conv_size: int
    state_size: int
    kernels: int  # that a step of decodes launches for each, by torch's operators

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a layer's recurrence: the state decays, is read twice and added to, at most."""
        return 8 * self.state_size

    @property
    def numbers_per_token(self) -> int:
        """Read and written between a layer's matrices: by the convolution, the recurrence, its norm and its gate."""
        into, out = self.matrices[0].n, self.matrices[1].k
        return 3 * into + 4 * out


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of the dense MLP; 0 if every layer is a mixture of experts
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of a query and a key
    vocab_size: int
    tied_embeddings: bool = False  # the output head shares the embedding's weights
    gated_mlp: bool = True  # two input matrices (gate and up) instead of one
    gated_attention: bool = False  # its output is multiplied by a projection as wide
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0  # of an expert that every token passes
    num_expert_layers: int = 0  # the other layers have the dense MLP
    sliding_window: int = 0  # tokens; 0 if every layer attends to the whole context
    num_windowed_layers: int = 0
    full_kv_heads: int = 0  # of layers without a window, and the size of their heads,
    full_head_dim: int = 0  # where they differ from layers with one
    stored_bytes: int = 0  # of a token's KV over all layers, where it is known better than from the heads,
    kept_bytes: int = 0  # and of what else a row keeps, better than from the recurrent layers
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    attention_layers: int | None = None  # that keep keys and values; None: all
    mlp_layers: int | None = None  # dense or of experts; None: all
    max_context_tokens: int = 4096
    norms_per_layer: int = 2  # over the hidden size
    vector_parameters_per_layer: int = 0  # norm weights and biases of a layer
    extra_parameters: int = 0  # outside layers, embedding and head: final norm, position table
    dtype: str = "bfloat16"
    kv_dtype: str = ""  # of keys and values, where they are kept in another
    product_dtype: str = ""  # of products of attention and dense MLPs, where both sides are rounded to another
    launched_per_layer: int = UNKNOWN_LAUNCHES  # operators that a GPU's host launches, where they are joined
    backend: Backend = "ragged"
    compiles: bool = True  # kernels for it, and joins operators; on a GPU, small steps are recorded
    longest_packed_tokens: int = 0  # of a prompt that may share a padded row with others; 0: none may
    always_packed: bool = False  # whatever that costs, see `engine.packing`
    eager: bool = False  # attention of its own, by transformers' operators: the scores of all pairs are in memory

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.kv_dtype or self.dtype]

    @property
    def in_8_bits(self) -> str:
        """What a job has rounded to 8 bits; empty for nothing."""
        kinds = {"products": self.product_dtype, "keys and values": self.kv_dtype}
        return ", ".join(what for what, dtype in kinds.items() if dtype == "float8")

    @property
    def product_dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.product_dtype or self.dtype]

    @property
    def num_dense_layers(self) -> int:
        return (self.num_layers if self.mlp_layers is None else self.mlp_layers) - self.num_expert_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.num_layers if self.attention_layers is None else self.attention_layers

    @property
    def num_full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.num_attention_layers - self.num_windowed_layers

    @property
    def state_bytes(self) -> int:
        """Bytes that a row of any length keeps in addition to its KV."""
        if self.kept_bytes or (recurrent := self.recurrent) is None:
            return self.kept_bytes
        each = recurrent.conv_size * self.dtype_bytes + recurrent.state_size * DTYPE_BYTES["float32"]
        return recurrent.layers * each

    @property
    def full_heads(self) -> tuple[int, int]:
        """KV heads of a layer without a window, and their size."""
        return self.full_kv_heads or self.num_kv_heads, self.full_head_dim or self.head_dim

    @property
    def in_blocks(self) -> bool:
        """Return whether blocks hold all that a row keeps, so that rows can share them and move to the host."""
        return self.recurrent is None and self.backend in ("ragged", "padded")

    @property
    def without_states(self) -> ModelShape:
        """Return the shape of a model that keeps nothing of a row but its KV."""
        stateless = self.recurrent and replace(self.recurrent, conv_size=0, state_size=0)
        return replace(self, recurrent=stateless, kept_bytes=0)

    @property
    def stores_evenly(self) -> bool:
        """Return whether every layer keeps equally many bytes of a token."""
        full_kv_heads, full_head_dim = self.full_heads
        if self.num_attention_layers < self.num_layers:
            return False
        return not self.stored_bytes and full_kv_heads * full_head_dim == self.num_kv_heads * self.head_dim

    @property
    def weighs_evenly(self) -> bool:
        """Return whether all but a few layers have weights of the same size."""
        return self.mlp_layers is None and 8 * min(self.num_expert_layers, self.num_dense_layers) <= self.num_layers

    @property
    def query_width(self) -> int:
        """Numbers that a layer that attends asks with for a token, on average."""
        return self.num_heads * self._mean(self.full_heads[1], self.head_dim)

    @property
    def kv_width(self) -> int:
        """Numbers of a token's key in a layer that attends, on average; its value has as many."""
        full_kv_heads, full_head_dim = self.full_heads
        return self._mean(full_kv_heads * full_head_dim, self.num_kv_heads * self.head_dim)

    def kv_heads_on(self, devices: int) -> tuple[int, int]:
        """KV heads of a layer without a window and of one with it, on each of `devices` that share them.

        At least one: heads are copied where there are fewer than devices.
        """
        return max(1, self.full_heads[0] // devices), max(1, self.num_kv_heads // devices)

    def kv_share(self, devices: int) -> float:
        """The share of a token's keys and values that each device holds."""
        full_kv_heads, full_head_dim = self.full_heads
        full, windowed = self.kv_heads_on(devices)
        held = self.num_full_layers * full * full_head_dim + self.num_windowed_layers * windowed * self.head_dim
        whole = self.num_full_layers * full_kv_heads * full_head_dim
        whole += self.num_windowed_layers * self.num_kv_heads * self.head_dim
        return held / whole if whole else 1.0

    def _mean(self, full: int, windowed: int) -> int:
        """Average over layers that attend, rounded up; 0 if none do."""
        layers = max(1, self.num_attention_layers)
        return -(-(self.num_full_layers * full + self.num_windowed_layers * windowed) // layers)

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """Projections of every layer that attends."""
        width = self.query_width
        if latent := self.latent:
            queries: tuple[Matrix, ...] = (Matrix("q", self.hidden_size, width),)
            if rank := latent.query_rank:
                queries = (Matrix("q_a", self.hidden_size, rank), Matrix("q_b", rank, width))
            expanded = self.num_heads * (self.head_dim - latent.rotary_dim + latent.value_dim)
            return (
                *queries,
                Matrix("kv_a", self.hidden_size, latent.kv_rank + latent.rotary_dim),
                Matrix("kv_b", latent.kv_rank, expanded),
                Matrix("o", self.num_heads * latent.value_dim, self.hidden_size),
            )
        asked = (2 if self.gated_attention else 1) * width
        return Matrix("qkv", self.hidden_size, asked + 2 * self.kv_width), Matrix("o", width, self.hidden_size)

    @property
    def dense_matrices(self) -> tuple[Matrix, ...]:
        """MLP of a dense layer."""
        if not self.intermediate_size:
            return ()
        up = (2 if self.gated_mlp else 1) * self.intermediate_size
        return Matrix("up", self.hidden_size, up), Matrix("down", self.intermediate_size, self.hidden_size)

    @property
    def expert_matrices(self) -> tuple[Matrix, ...]:
        """Router and experts of a mixture-of-experts layer."""
        if not self.num_experts:
            return ()
        hidden, size, shared = self.hidden_size, self.expert_intermediate_size, self.shared_intermediate_size
        inputs = 2 if self.gated_mlp else 1
        matrices: tuple[Matrix, ...] = (
            Matrix("router", hidden, self.num_experts),
            Matrix("up", hidden, inputs * size, self.num_experts, self.experts_per_token),
            Matrix("down", size, hidden, self.num_experts, self.experts_per_token),
        )
        if shared:
            matrices += (Matrix("shared_up", hidden, inputs * shared), Matrix("shared_down", shared, hidden))
        return matrices

    @property
    def packed_matrices(self) -> tuple[tuple[tuple[Matrix, ...], int], ...]:
        """Matrices that all tokens of a step pass together, for each kind of layer, and how many such layers there
        are. A layer may be of several kinds."""
        return (
            (self.attention_matrices, self.num_attention_layers),
            (self.dense_matrices, self.num_dense_layers),
            (self.expert_matrices, self.num_expert_layers),
        )

    @property
    def matrices(self) -> tuple[tuple[tuple[Matrix, ...], int], ...]:
        """All matrices: of packed and of recurrent layers."""
        recurrent = self.recurrent
        return (*self.packed_matrices, *([(recurrent.matrices, recurrent.layers)] if recurrent else []))

    @property
    def layer_parameters(self) -> int:
        """Weights in matrices of all layers."""
        return self._over_layers(lambda matrix: matrix.k * matrix.n * matrix.copies)

    @property
    def active_layer_parameters(self) -> int:
        """Weights in matrices of all layers that one token is multiplied with."""
        return self._over_layers(lambda matrix: matrix.k * matrix.n * matrix.used)

    @property
    def embedding_parameters(self) -> int:
        """Input embedding and output head, once if they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        """All parameters: 8,030,261,248 for Llama-3-8B."""
        vectors = self.num_layers * self.vector_parameters_per_layer + self.extra_parameters
        return self.layer_parameters + self.embedding_parameters + vectors

    @property
    def active_parameters(self) -> int:
        """Parameters that take part in one token."""
        return self.num_parameters - self.layer_parameters + self.active_layer_parameters

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.dtype_bytes - self.saved_bytes

    @property
    def layer_weight_bytes(self) -> int:
        """Weights of one decoder layer, on average."""
        matrices = self.layer_parameters // self.num_layers
        return (matrices + self.vector_parameters_per_layer) * self.dtype_bytes - self.saved_bytes // self.num_layers

    @property
    def saved_bytes(self) -> int:
        """By which weights of products of a type of their own are smaller, less the scale of each of their columns."""
        if not self.product_dtype:
            return 0
        narrower = self.dtype_bytes - self.product_dtype_bytes
        return sum(
            layers * (matrix.k * matrix.n * narrower - matrix.n * DTYPE_BYTES["float32"])
            for matrices, layers in self.packed_matrices
            for matrix in matrices
        )

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        """2 (K and V) x kv_heads x head_dim x bytes; on average, and not below it."""
        stored = self.stored_bytes or 2 * self.kv_width * self.kv_dtype_bytes * self.num_attention_layers
        return -(-stored // self.num_layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of a token over all layers: 128 KiB for Llama-3-8B in bfloat16."""
        return self.num_layers * self.kv_bytes_per_token_per_layer

    @property
    def linear_flops_per_token(self) -> int:
        """Multiply-adds count twice; the output head is apart, since only sampled tokens pass it."""
        return 2 * self.active_layer_parameters

    @property
    def last_mlp_flops_per_token(self) -> int:
        """FLOPs of the last layer's MLP, which tokens that are not sampled need not pass."""
        return 2 * sum(matrix.k * matrix.n * matrix.used for matrix in self.expert_matrices or self.dense_matrices)

    @property
    def head_flops_per_sample(self) -> int:
        """Output head for one sampled token."""
        return 2 * self.hidden_size * self.vocab_size

    def attention_flops(self, pairs: Pairs, windowed_pairs: Pairs | None = None) -> Pairs:
        """FLOPs of QK^T and PV over all layers for a number of (query, key) pairs, or an array of such numbers.

        Args:
            pairs: of a layer that sees the whole context; n tokens after c others make n * c + n * (n + 1) / 2.
            windowed_pairs: of a layer with a sliding window; as many as `pairs` if not given.
        """
        windowed_pairs = pairs if windowed_pairs is None else windowed_pairs
        full = self.num_full_layers * self.full_heads[1] * pairs
        windowed = self.num_windowed_layers * self.head_dim * windowed_pairs
        return cast(Pairs, 4 * self.num_heads * (full + windowed))

    def with_dtype(self, dtype: str, kv_dtype: str = "auto", quantization: str = "none") -> ModelShape:
        """Return the shape with weights in another dtype, KV in this or in one of its own, and products likewise.

        Raises ModelError if one is unknown.
        """
        kv, product = "" if kv_dtype == "auto" else kv_dtype, "" if quantization == "none" else quantization
        for name in (dtype, kv or dtype, product or dtype):
            if name not in DTYPE_BYTES:
                raise ModelError(f"unknown dtype '{name}'{did_you_mean(name, DTYPE_BYTES)}")
        return replace(self, dtype=dtype, kv_dtype=kv, product_dtype=product)

    def served_by(self, backend: Literal["auto", "ragged", "padded"]) -> ModelShape:
        """Return the shape with its rows computed as a job asks, see `engine.attention`."""
        if backend == "padded" and self.backend == "ragged":
            return replace(self, backend="padded" if self.in_blocks else "alone")
        return self

    def packed_as(self, packing: Literal["auto", "always", "never"]) -> ModelShape:
        """Return the shape with its prompts packed as a job asks, see `engine.packing`."""
        most = 0 if packing == "never" else self.longest_packed_tokens
        return replace(self, longest_packed_tokens=most, always_packed=packing == "always")

    def _over_layers(self, size: Callable[[Matrix], int]) -> int:
        return sum(layers * sum(map(size, matrices)) for matrices, layers in self.matrices)
