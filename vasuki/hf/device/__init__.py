"""The device that torch computes on.

device    its name, driver, processors and memory
energy    what a GPU draws during a run
host      threads and memory of this process, set up before torch is loaded
"""
