"""What takes the place of a model's modules on a CPU: kernels in C++, each with a plain twin in torch.

cpu_kernels        installs them all in a model
packed_linear      linear layers over weights that are packed once
packed_experts     experts of a mixture, one after the other
rms_norm           norms
fused_attention    one product for queries, keys and values; fused_layer, fused_decoder: whole layers, all layers
elementwise        functions of torch that would give a row other numbers in other company
recurrences        tokens through layers that carry a state; fused_recurrence: such layers
"""
