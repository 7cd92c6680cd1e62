"""The device that torch computes on.

device    its name, driver and processors
memory    how much it has, and how much is free
board     a GPU's management interface; energy: what it draws during a run
host      threads and memory of this process, set up before torch is loaded
"""
