"""Measures the machine at hand.

whole_steps        times steps of a model, by the executor of a run
fit                the profile that meets them
first_measure      both, for seconds, before a model's first run
build_profile      both, for a minute, with copies and power: `vasuki profile`
stand_in           a model with random weights, where there is none
rows               those of the steps that are timed
links              copies between host and device
timing             seconds of calls that a busy machine disturbs
"""

from vasuki.hf.profiler.build_profile import profile_machine

__all__ = ["profile_machine"]
