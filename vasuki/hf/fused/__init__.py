"""What takes the place of a model's modules, each checked against the module that it replaces.

replace        how a module gives way to its twin
attention      one product for queries, keys and values, whichever kernels multiply and rotate
by_torch       norms, projections and MLPs in fewer of torch's operators, for GPUs; `hf.cpu` has kernels of its own
float8_linear  products of 8 bits
"""
