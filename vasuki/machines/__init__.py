"""A machine as data, and what a step takes on it.

profile          rates, sizes and prices of a machine; profile_files: where such files lie; profile_writing
link             the path between host and device memory
measured_points  operators at points by size, as they were measured; profile_values: what values of a profile may be
gpus             profiles of NVIDIA's cards, by the names that drivers report
known_error      how far predictions have been off, by where a profile's rates come from
here/            this machine: what it is, how fast, and how much a job may hold
price            what its time costs
cost_model/      what a step takes on it
attention        which kernel attends on a GPU, and in what blocks it wants KV
experts          how a mixture's experts are computed on a GPU
memory_budget    how much KV fits together with weights and activations
"""
