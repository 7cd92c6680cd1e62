"""Sections of `gpu_check.py`, each a function from the setting and its share of the time to a finding.

preflight      what everything else needs; kernel_table: what a step launches
setting        device, models with random weights, workloads, and one planned run
kernels        ceilings of the card, attention kernels, hardware profile
golden         greedy tokens against `model.generate`, with and without offload; copies byte for byte
steps          step times against the roofline, the device's idle share, copies beside compute
contest        whole workloads against transformers' own ways, predicted and measured
"""
