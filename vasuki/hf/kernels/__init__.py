"""Kernels, each with a plain twin.

by_triton              what a GPU's layers do besides products, in fewer kernels, and attention that torch lacks
batched_copies         many copies between device and host in one call of the driver
float8                 numbers of 8 bits, for keys and values and for products
experts                experts of a mixture for few rows, without a wait for the device
levels                 the instruction sets that there are, and which of them a CPU's kernels use
native                 compiles the C++ in `cpp/` once for such a level and keeps the library
paged_attention        attention over paged blocks on a CPU; varlen: torch's packed attention on a GPU
recurrent_functions    the functions by which transformers computes recurrent layers, and what stands in for them
top_tokens             which tokens may be drawn
transfer               small arrays to the device without making the host wait, or to where a recorded step reads them
"""
