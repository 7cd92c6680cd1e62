"""Measures the machine at hand and writes down what it finds as a hardware profile.

timing      seconds of calls that a busy machine disturbs
machine     names, memory and power of the device
operators   matrix products, attention and elementwise operators, as the engine runs them
recurrent   a layer that carries a state
links       copies between host and device, and memory bandwidth
steps       what whole steps take beyond their operators
in_step     what their operators take there, over what they take alone
build       puts these together as a HardwareProfile
output      writes it to a file, and prints it
"""

from vasuki.hf.profiler.build_profile import profile_machine
from vasuki.hf.profiler.output import prepare_folder, profile_table, write_profile

__all__ = ["prepare_folder", "profile_machine", "profile_table", "write_profile"]
