"""Triton kernels for a GPU. Triton comes with torch's CUDA wheels.

attention    over paged blocks, for whatever a layer wants
float8       numbers of 8 bits
layer        norms, rotation with the write into the cache, and the gate of an MLP
sampling     tokens that are drawn, all rows of a step at once
launch       how they are launched
"""
