"""Attention of packed chunks over paged blocks.

probe               what a model asks of its attention, seen by running it on a few tokens
chunks              a step's chunks, as each way of computing attention wants them
inputs              a Batch -> the tensors of one packed forward
ragged_attention    what a model's layers call: keys and values into blocks, then attention over them
plain_attention     its plain twin, by torch operators on any device
"""
