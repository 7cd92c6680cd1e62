"""This machine, without torch, which takes seconds to load.

cpu            its processor and memory
control_group  what limits this process below what the machine has
gpu            its GPUs, as NVML shows them; nothing else talks to NVML
system_files   how all of these read what the system tells
split          the machine split among replicas
device         what a job computes on, and how much memory it may hold
measured       how fast it is: measured before, or as such machines are known to be
pressure       how much work waits for a processor
stolen_time    what the host of a virtual machine takes from it
"""
