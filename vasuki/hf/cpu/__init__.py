"""A CPU's own kernels: C++ that is compiled for the processor at hand, each with a plain twin in torch.

native             compiles a source once and keeps the library
kernels            all of decoder.cpp, and how they take the place of a model's modules (replace)
packed_linear      linear layers over weights that are packed once
rms_norm, fused_attention, fused_layer, fused_decoder     norms; one product for queries, keys and values; whole layers;
                   all layers in one call
recurrences, fused_recurrence     tokens through layers that carry a state: delta rules, Mamba, short convolutions
paged_attention    attention over paged blocks
"""
