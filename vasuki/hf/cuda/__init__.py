"""On a GPU.

choice        which kernels attend in a model's steps, and whether these can be recorded
step_graphs   steps that are recorded and replayed
"""
