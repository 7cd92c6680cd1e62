"""Sections of `gpu_check.py`, each a function from the setting and its share of the time to a finding.

preflight      what everything else needs; kernel_table: what a step launches
setting        device, models with random weights, workloads, and one planned run
subprocesses   tests that need a card, compute-sanitizer, vLLM
commands       `vasuki run` in a process of its own
job            the shipped job as a user runs it: at once, with weights on the host, stopped and killed
moved          a job of a model on disk in little memory: what offload moves, how fast, behind what
far_blocks     a row in blocks that 32 bits cannot number
golden         greedy tokens against `model.generate`, with and without offload; copies byte for byte
cases          what the golden models are too small for
kernels        ceilings of the card, attention kernels, hardware profile
steps          step times against the roofline, the device's idle share, copies during compute
capped         half of the memory for KV, without and with offload
contest        whole workloads against transformers' own ways, predicted and measured
"""
