"""The padded backend: for models that know no packed attention. Chunks are computed as rectangles of rows and columns,
by the model as transformers has it: its own attention, under its own mask, or one that lets prompts share rows.

Where blocks don't hold all that a model keeps of a row, rows are computed alone. Sources: Baton, section 4; Prepacking,
section 3.

rectangles    the shape of a step's chunks
block_cache   a cache of transformers over the keys and values that blocks hold
calls         how a model is called, by the arguments that it knows
forward       computes a batch
probe         finds out whether tokens stay what they are
held_memory   what a row takes that is computed alone
"""
