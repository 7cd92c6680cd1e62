"""The memory that is left for KV beside a loaded model."""

from __future__ import annotations

from vasuki.hf.device.memory import room_bytes
from vasuki.hf.loading.load_model import LoadedModel

# Rows that a step may sample and tokens that it may hold, for the activations to leave room for.
_STEP_SEQS, _STEP_TOKENS = 1024, 4096


def kv_budget_bytes(loaded: LoadedModel, device_memory: float | int) -> int:
    """Bytes for the KV pool, once the weights are loaded: what `kv.device_memory` asks for, if it is free.

    No more than the longest sequences side by side could use.
    """
    layout, device = loaded.kv_layout, loaded.device
    state_bytes = loaded.recurrent.bytes_per_row if loaded.recurrent else 0
    most = 2 * _STEP_SEQS * (loaded.max_context * layout.bytes_per_token + state_bytes)
    if device_memory > 1:
        return int(min(device_memory, most))
    activations = _STEP_SEQS * loaded.vocab_size * 8 + _STEP_TOKENS * loaded.config.hidden_size * 64
    return int(max(0, min(room_bytes(device, device_memory) - activations, most)))
