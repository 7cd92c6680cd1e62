"""A machine as data, and what a step takes on it.

profile          rates, sizes and prices of a machine; profile_files: where such files lie; profile_writing
known_error      how far predictions have been off, by where a profile's rates come from
at_hand          this machine, as its system and drivers describe it; this_cpu, gpus: a profile from that alone
profile_cache    what first runs have measured
price            what its time costs
cost_model/      what a step takes on it
paging           the blocks that KV is kept in; attention: which kernel attends on a GPU
memory_budget    how much KV fits beside weights and activations
split            a machine split among replicas
stolen_time      what the host of a virtual machine takes from it
"""
