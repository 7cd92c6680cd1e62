"""The padded backend: for models that know no packed attention. Chunks are computed as rectangles of rows and columns,
by the model as transformers has it: its own attention, under its own mask, or one that lets prompts share rows.

`rectangles.py` shapes chunks, `block_cache.py` embeds the keys and values that blocks hold, `forward.py` computes a
batch, and `probe.py` finds out whether tokens stay what they are. Where blocks don't hold all that a model keeps of a
row, rows are computed alone; `held_memory.py` says what each takes then. Sources: Baton, section 4; Prepacking,
section 3.
"""
