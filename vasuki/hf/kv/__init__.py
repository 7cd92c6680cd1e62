"""KV memory.

kv_cache      the tensors behind the block pools, on the device and on the host
block_copies  whole blocks from one tensor to another
kv_mover      what moves between them while layers compute: parked sequences, streamed layers
depth_mover   the same where layers change place from batch to batch
"""
