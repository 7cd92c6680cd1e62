"""On a GPU.

recordable    whether a model's steps can be recorded
step_graphs   steps that are recorded and replayed
"""
