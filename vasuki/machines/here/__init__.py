"""This machine, without torch, which takes seconds to load.

cpu            its processor and memory
gpu            its GPUs, as NVML shows them; nothing else talks to NVML
split          the machine split among replicas
measured       what earlier runs have measured
stolen_time    what the host of a virtual machine takes from it
"""
