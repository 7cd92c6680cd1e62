"""What moves to host memory.

choice        mode and reason, by price: the one place where `kv.offload` is decided
streaming     layers that pass through the device in every step
parking       sequences and prompts that wait on the host
options       what the ways share, and how two are compared
by_batch      layers that each batch leaves on the host, see `engine.depth`
algorithms    how many layers can live on the host without slowing a step down (Vasuki, Algorithms 1 and 2)
"""
