"""The padded backend: for models that know no packed attention. Chunks are computed as rectangles of rows and columns,
by the model as transformers has it: its own attention, under its own mask.

`rectangles.py` shapes chunks, `block_cache.py` embeds the keys and values that blocks hold, `forward.py` computes a
batch, and `probe.py` finds out whether a model's tokens stay what they are. Source: Baton, section 4.
"""
