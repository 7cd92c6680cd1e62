"""Measures the machine at hand.

first_measure      seconds of real steps of the model, before its first run
build_profile      puts the measurements together as a HardwareProfile
operator_times     matrix products, attention and elementwise operators, as the engine runs them
recurrent_times    a layer that carries a state
step_overheads     what whole steps take beyond their operators; in_step: what operators take there, over alone
rows               those of the steps that are timed
links              copies between host and device, and memory bandwidth
timing             seconds of calls that a busy machine disturbs
"""

from vasuki.hf.profiler.build_profile import profile_machine

__all__ = ["profile_machine"]
