"""How many operators a GPU's host launches for a layer of a family, in a step of prompts beside decodes.

What can be joined is (`hf.fused`), which differs by what a layer does beside its matrices. The tests of steps on a
device without a card count them; where they count others, the numbers here are wrong.
"""

from __future__ import annotations

LAUNCHES = {  # by the model_type of a configuration
    "llama": 13,
    "qwen2": 13,
    "mistral": 13,
    "granite": 16,
    "starcoder2": 14,
    "qwen3": 17,
    "olmo2": 28,
    "gpt_neox": 28,
    "phi3": 31,
    "qwen3_moe": 29,
    "ministral3": 33,
    "gemma4_text": 40,
    "gemma2": 45,
    "gpt_oss": 44,
    "deepseek_v3": 55,
    "gemma3_text": 64,
}
UNKNOWN_LAUNCHES = 30  # of other families: somewhere between
