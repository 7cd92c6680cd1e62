"""The real executor: Hugging Face models on torch. The only room that imports torch and transformers.

host        threads and memory of the process
model       a folder or hub id -> LoadedModel, or a refusal that names what is missing
tokenizer   text and messages -> token ids -> text
inputs      a Batch -> the tensors of one packed forward
attention   attention of packed chunks over paged blocks, called by the model's own layers
cuda_attention, decode_graphs     on a GPU: torch's packed kernel; steps of decodes, recorded and replayed
packed_linear, rms_norm, fused_attention, fused_layer, fused_decoder, paged_attention     a CPU's kernels of ours
cpu_kernels, replace, native     how they take the place of a model's modules, and how they are compiled
kv_cache    the tensors behind the block pools, on the device and on the host
sampler     logits -> token ids
executor    puts these together behind `engine.Executor`
"""

from vasuki.hf import host

host.prepare()
