"""The memory that is left for KV beside a loaded model."""

from __future__ import annotations

from vasuki.hf.device.memory import available_bytes, total_bytes
from vasuki.hf.loading.load_model import LoadedModel
from vasuki.machines.memory_budget import kv_room_bytes


def kv_budget_bytes(loaded: LoadedModel, device_memory: float | int) -> int:
    """Bytes for the KV pool, once the weights are loaded, see `kv_room_bytes`."""
    return kv_room_bytes(
        device_memory,
        total_bytes(loaded.device),
        available_bytes(loaded.device),
        token_bytes=loaded.kv_layout.bytes_per_token,
        state_bytes=loaded.recurrent.bytes_per_row if loaded.recurrent else 0,
        max_context_tokens=loaded.max_context,
        vocab_size=loaded.vocab_size,
        hidden_size=int(loaded.config.hidden_size),
    )
