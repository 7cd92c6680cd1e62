"""The real executor: Hugging Face models on torch. The only room that imports torch and transformers.

host             threads and memory of the process
model            a folder or hub id -> LoadedModel, or a refusal that names what is missing
probe            what a model asks of its attention
tokenizer        text and messages -> token ids -> text
inputs           a Batch -> the tensors of one packed forward
attention        attention of packed chunks over paged blocks, called by the model's own layers
plain_attention  the same by torch operators, on any device
recurrent/       layers that carry a state, and the states of the rows
cpu/, cuda/      what is faster there than torch's plain operators
kv_cache         the tensors behind the block pools, on the device and on the host
sampler          logits -> token ids
executor         puts these together behind `engine.Executor`
"""

from vasuki.hf import host

host.prepare()
