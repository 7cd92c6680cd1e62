"""A machine as data, and what a step takes on it.

profile          rates, sizes and prices of a machine; profile_files: where such files lie; profile_writing
price            what its time costs
cost_model/      what a step takes on it
paging           the blocks that KV is kept in; attention: which kernel attends on a GPU
memory_budget    how much KV fits beside weights and activations
split            a machine split among replicas
stolen_time      what the host of a virtual machine takes from it
"""
