"""How many operators a GPU's host launches for a layer of a family, in a step of prompts and decodes.

What can be joined is (`hf.fused`), which differs by what a layer does besides its matrices. The tests of steps on a
device without a card count them; where they count others, the numbers here are wrong.
"""

from __future__ import annotations

LAUNCHES = {  # by the model_type of a configuration
    "llama": 13,
    "qwen2": 13,
    "mistral": 13,
    "granite": 16,
    "starcoder2": 14,
    "qwen3": 13,
    "olmo2": 17,
    "gpt_neox": 25,
    "phi3": 15,
    "qwen3_moe": 25,
    "ministral3": 32,
    "gemma4_text": 40,
    "gemma2": 16,
    "gpt_oss": 29,
    "deepseek_v3": 54,
    "gemma3_text": 15,
}
UNKNOWN_LAUNCHES = 30  # of other families: somewhere between
