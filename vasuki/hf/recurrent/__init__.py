"""Layers that carry a state from token to token instead of attending to all that came before: gated delta nets, Mamba,
short convolutions.

What such a layer keeps of a row is of one size, however long the row is. Running rows have the first slots, so nearly
all slots of a step are adjacent, and are computed in place:

    tensors[layer][i]   [num_slots, ...]

The layer itself stays as its authors wrote it. It takes rows of equal length, `[rows, tokens, hidden_size]`, and a
cache with what they left behind. So a step's packed chunks pass it in groups: all decodes, prompts of equal length.

    packed    b7 c3 | a0 a1 a2 | d0 d1 d2 | e4 e5
    groups    [b7] with their     [a0 a1 a2] from     [e4 e5] with its
              [c3] states         [d0 d1 d2] nothing          state

recurrent_layer   a layer's forward over groups of chunks
states            what rows that run keep, and a step's groups
discovery         which modules of a model keep a state, seen by running it on a few tokens
"""
